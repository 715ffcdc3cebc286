"""How many keys a graphed function captures and keeps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable

import torch

from cgraph import _core
from cgraph._functions.keys import Key
from cgraph._recording.options import Options
from cgraph._recording.recorded import Recorded
from cgraph._recording.refusals import OF_WAITING
from cgraph._recording.training import Trained
from cgraph.reports import State

__all__ = ["Limits"]

# So many keys in a row that served only the call that they were captured for, and the next ones run
# eagerly: each call seems to have another one.
_FRUITLESS = 8
# A key that ran eagerly for that reason is captured at this call.
_RECURRING = 3
# So many keys without a graph are remembered.
_WITHOUT_GRAPH = 256
# What the reason begins with where there are too many; see :data:`cgraph.reports.FIXES`.
_TOO_MANY = "too many keys"


class Limits:
    """Puts graphs away that are too many, and sees that captures are worth their time.

    Args:
        keys: The function's keys, which it takes old ones out of.
        dispatcher: Finds native entries.
        options: The function's options.
    """

    def __init__(
        self, keys: dict[Hashable, Key], dispatcher: _core.Dispatcher, options: Options
    ) -> None:
        self._keys = keys
        self._dispatcher = dispatcher
        self._options = options
        self._newest: deque[Key] = deque(maxlen=_FRUITLESS)
        # Those whose template alone is left, the one that was put away first comes first.
        self._away: list[Key] = []

    def explosion(self, key: Key) -> str | None:
        """Why a new key is not captured any more, if no key was ever used twice."""
        if key.state == "evicted" or len(self._newest) < _FRUITLESS:
            return None
        if any(one.replays > 1 or one.eager_calls > 1 for one in self._newest):
            return None
        text = f"{_TOO_MANY}: each of the last calls had a new one"
        last = self._newest[-1]
        if any(one.recorded is not None for one in self._newest):
            return text
        reason = (last.reason or last.waits_for or "").removeprefix(f"{OF_WAITING}: ")
        return f"{text}, and none could be captured: {reason}"

    def is_of_many(self, reason: str) -> bool:
        """Whether it is the reason of a key that is not captured, as no key is used twice."""
        return reason.startswith(_TOO_MANY)

    def tried(self, key: Key) -> None:
        """Count a key that was captured for a call, or could not be."""
        if key not in self._newest:
            self._newest.append(key)

    def is_recurring(self, key: Key) -> bool:
        """Whether a key ran eagerly as there are too many, and has come often enough now."""
        is_of_many = key.reason is not None and self.is_of_many(key.reason)
        return is_of_many and key.eager_calls + 1 >= _RECURRING

    def forget(self, new: Key) -> None:
        """Forget the oldest keys that have no graph, as far as these are too many.

        Args:
            new: One that was made just now.
        """
        if len(self._keys) <= _WITHOUT_GRAPH:
            return
        without = [
            identity
            for identity, key in self._keys.items()
            if key.recorded is None and not key.is_awaited and key is not new
        ]
        for identity in without[:-_WITHOUT_GRAPH]:
            self.drop(self._keys.pop(identity), "eager")

    def forget_unused(self, key: Key) -> None:
        """Forget a key, if no call was ever answered for it."""
        if key.recorded is None and not key.eager_calls and not key.replays:
            # The function may have changed what its identity was made of.
            for identity in [name for name, one in self._keys.items() if one is key]:
                del self._keys[identity]

    def knows(self, key: Key) -> bool:
        """Whether a key is remembered."""
        return key in self._keys.values()

    def knows_same_arguments(self, key: Key) -> bool:
        """Whether another key has a graph, whose arguments are the same given in another way."""
        others = (one for one in self._keys.values() if one is not key and one.state == "captured")
        return any(one.words == key.words for one in others)

    def have_room(self, count: int) -> bool:
        """Whether so many keys more can be captured, and none has to go."""
        captured = sum(key.state == "captured" for key in self._keys.values())
        return self._options.max_bytes is None and captured + count <= self._options.most_graphs

    def evict(self, served: Key) -> None:
        """Let the graphs go that were not used for longest, as long as there are too many.

        Args:
            served: The key that is about to be used.
        """
        captured = [key for key in self._keys.values() if key.state == "captured"]
        if len(captured) <= self._options.most_graphs and not self._has_too_much():
            return
        # One that is replayed may have called the function in a break.
        captured = [key for key in captured if not key.is_running]
        captured.sort(key=lambda key: (key is served, key.last_use), reverse=True)
        while len(captured) > self._options.most_graphs:
            self._put_away(captured.pop())
        away = [key for key in self._away if key.away is not None]
        for key in (*away, *reversed(captured[1:])):
            if self._has_too_much():
                self.drop(key, "evicted")

    def hold_unless_gone(
        self, key: Key, recorded: Recorded | Trained, hold: Callable[[], None]
    ) -> None:
        """Let a key have a graph, unless hooks have captured it, or let it be forgotten.

        Args:
            key: The key.
            recorded: The graph.
            hold: Lets the key have it.
        """
        if key.recorded is None and self.knows(key):
            try:
                hold()
            except BaseException:
                self.drop(key, "eager")
                raise
        else:
            recorded.reset()

    def drop(self, key: Key, state: State) -> None:
        """Let the graph of a key go."""
        # First, so that no call finds a graph that is gone, whatever hooks of it raise.
        for entry in key.entries:
            self._dispatcher.remove(entry)
        key.drop(state)

    def clear(self) -> None:
        """Forget everything."""
        self._newest.clear()
        self._away.clear()

    def _has_too_much(self) -> bool:
        most = self._options.max_bytes
        if most is None:
            return False
        held = sum(key.memory_bytes for key in self._keys.values())
        return held + _bytes_of(one for key in self._keys.values() for one in key.inputs) > most

    def _put_away(self, key: Key) -> None:
        recorded = key.recorded
        if not isinstance(recorded, Recorded) or not recorded.is_kept:
            self.drop(key, "evicted")
            return
        key.put_away([entry for entry in key.entries if self._dispatcher.remove(entry)])
        self._away = [*(one for one in self._away if one.away is not None and one is not key), key]


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of their memory, which several may share."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values())
