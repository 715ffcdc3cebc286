"""Whether keys have graphs that calls can be replays of."""

from __future__ import annotations

from cgraph import _core
from cgraph._functions.keys import Key
from cgraph._functions.limits import Limits
from cgraph._recording.calls import Call
from cgraph._source import user_line
from cgraph._text import plural
from cgraph.errors import InstantiateError, StateError

__all__ = ["Ready"]


class Ready:
    """Looks whether keys of one function have graphs for calls.

    Args:
        name: The function's.
        limits: What lets graphs go.
        dispatcher: Finds native entries.
        max_recording: How often a key is captured anew because something has moved.
    """

    def __init__(
        self, name: str, limits: Limits, dispatcher: _core.Dispatcher, max_recording: int
    ) -> None:
        self._name = name
        self._limits = limits
        self._dispatcher = dispatcher
        self._max_recording = max_recording

    def has_graph(self, key: Key, call: Call, is_frozen: bool) -> bool:
        """Whether a key has a graph for a call; one that was put away is brought back.

        Args:
            key: The key.
            call: A call of it.
            is_frozen: Whether captures are forbidden.

        Raises:
            StateError: They are, and what the graph reads where it lies has moved.
        """
        if key.away is not None:
            if (moved := key.moved(call)) is not None:
                self._require_unmoved(key, moved, is_frozen)
                self._limits.drop(key, "evicted")
                return False
            try:
                known = key.bring_back()
            except InstantiateError:
                if is_frozen:
                    raise
                # There may be memory for a new one once this is gone.
                self._limits.drop(key, "evicted")
                return False
            for entry in known:
                self._dispatcher.add(entry)
            self._limits.evict(key)
        return key.state == "captured" and self._is_in_place(key, call, is_frozen)

    def require_thawed(self, key: Key, is_frozen: bool) -> None:
        """Refuse the capture of a key where captures are forbidden.

        Raises:
            StateError: They are.
        """
        if is_frozen:
            self._limits.forget_unused(key)
            if key.state == "evicted":
                raise StateError(
                    f"{self._name} was frozen, and the graph of the key ({key.text}) had to go for"
                    " others: give max_graphs= or max_bytes= more room, or keep_templates=True, or"
                    " call reset()"
                )
            instead = "capture it before freeze(), or call reset()"
            if self._limits.knows_same_arguments(key):
                instead = (
                    "it was captured with the same arguments given in another way (by place or by"
                    f" name, or in another order): give them so, {instead}"
                )
            raise StateError(
                f"{self._name} was frozen, and a call needs a capture, of the key ({key.text}):"
                f" {instead}"
            )

    def _is_in_place(self, key: Key, call: Call, is_frozen: bool) -> bool:
        """Whether all is there that a graph reads where it lies; else its key is captured anew."""
        moved = key.moved(call)
        if moved is None:
            return True
        self._require_unmoved(key, moved, is_frozen)
        count = key.moves(moved)
        self._limits.drop(key, "eager")
        if count < self._max_recording:
            key.again("moved", moved, user_line())
        else:
            key.reason = f"moved too often: {moved}, {plural(count + 1, 'time')}"
            key.warn(self._name)
        return False

    def _require_unmoved(self, key: Key, moved: str, is_frozen: bool) -> None:
        if is_frozen:
            raise StateError(
                f"{self._name} was frozen, and {moved} is another one or lies elsewhere than at the"
                f" capture of the key ({key.text}): put it back, write to it in place, or call"
                " reset()"
            )
