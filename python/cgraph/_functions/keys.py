"""``Key``: what became of the calls that share one graph."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, cast

import torch

from cgraph import _core
from cgraph._functions.failures import Failure
from cgraph._recording.calls import Call
from cgraph._recording.recorded import Recorded
from cgraph._recording.refusals import OF_SHARING
from cgraph._recording.training import Trained
from cgraph._source import levels_to_user
from cgraph._state.holders import Holder
from cgraph._state.reach import Surroundings
from cgraph._text import plural, short_place, shown
from cgraph.errors import StateError
from cgraph.reports import KeyReport, Rerecording, State

__all__ = ["Identity", "Key", "Tried", "modules_in_words", "text_of", "values_in_words"]


# So many replays are worth a capture, whatever has to be captured anew then.
_WORTH_CAPTURE = 64
# So many names of what moves count as one.
_MOST_NAMES = 4

Tried = tuple[list[int | None] | None, str | None]
"""For each leaf of the result the dimension of the rows, or None; or how padding rows show."""


class Identity(NamedTuple):
    """What tells a key from others.

    Attributes:
        call: What calls have in common by their arguments and torch's modes.
        training: Which modules train.
        requires_grad: Which of their tensors require gradients.
        driver: The number of the driver.
        gradients: The leaves that have one, of those to whose gradients calls may add.
        values: Numbers and texts that the function reads, and that are others than they were first.
        beside: How many keys for the same calls come before, each with an open call.
    """

    call: Hashable
    training: tuple[bool, ...]
    requires_grad: tuple[bool, ...]
    driver: int
    gradients: frozenset[int]
    values: frozenset[Hashable] = frozenset()
    beside: int = 0


class Key:
    """One key of a graphed function.

    Args:
        text: What its calls have in common.
        words: The same in parts, each argument one, in an order of their own.
        is_beside: Whether another key serves such calls, but for those beside an open one.

    Attributes:
        words: The same.
        is_beside: The same.
        has_sizes: Whether the function has ``sizes``.
        state: What calls of it do.
        reason: Why they run eagerly.
        where: The line that is the reason.
        fix: What to do about it, where that is known.
        failure: Why its last capture failed, if calls of it are to be captured all the same.
        recorded: The capture; None without one.
        entry: What replays it, or hands a call on.
        padded: The entries of calls that are padded to it, by what such calls have in common.
        away: While the graph is put away, of which only the template is left: the entries that the
            dispatcher had. None otherwise.
        tried: What trials of padding have shown, by the dimensions of the rows.
        is_awaited: Whether a graph of it was captured, and is to be instantiated and held.
        waits: How many captures in a row have waited for what a call makes.
        waits_for: Why the last one has.
        once: Why the last call ran eagerly that could have been a replay; None if none did.
        surroundings: What its graph reads besides the arguments; None without one.
    """

    def __init__(self, text: str, words: Sequence[str] = (), *, is_beside: bool = False) -> None:
        self.text = text
        self.words = words
        self.is_beside = is_beside
        self.has_sizes = False
        self.state: State = "eager"
        self.reason: str | None = None
        self.where: str | None = None
        self.fix: str | None = None
        self.failure: Failure | None = None
        self.recorded: Recorded | Trained | None = None
        self.waits = 0
        self.waits_for: str | None = None
        self.once: str | None = None
        self.is_awaited = False
        self.entry: _core.Entry | None = None
        self.padded: dict[Hashable, _core.Entry] = {}
        self.away: list[_core.Entry] | None = None
        self.tried: dict[Hashable, Tried] = {}
        self.eager_calls = 0
        self.capture_seconds = 0.0
        self._past_replays = 0
        self._addresses: list[tuple[str, int]] = []
        self.surroundings: Surroundings | None = None
        self._again: Counter[tuple[str, str | None, str | None]] = Counter()
        self._moves: Counter[str] = Counter()
        self._replays_at_capture = 0

    @property
    def replays(self) -> int:
        """How many calls were replays of its graphs."""
        if self.state == "eager":
            return self._past_replays
        return self._past_replays + sum(one.replays for one in self.entries)

    @property
    def entries(self) -> list[_core.Entry]:
        """Those of its own rows and of fewer."""
        # Read once: another thread may let it go.
        entry = self.entry
        return [*([] if entry is None else [entry]), *self.padded.values()]

    @property
    def is_open(self) -> bool:
        """Whether a backward pass may still read what its graph's last call left."""
        return isinstance(self.recorded, Trained) and self.recorded.is_open()

    @property
    def last_use(self) -> int:
        """When it was captured or replayed last; the later, the larger."""
        return max((one.last_use for one in self.entries), default=0)

    @property
    def is_running(self) -> bool:
        """Whether a replay of it is under way, of which this may be part."""
        return self.recorded is not None and self.recorded.is_running

    @property
    def inputs(self) -> list[torch.Tensor]:
        """The tensors that its calls are copied to, in memory that other keys may share."""
        return [] if self.recorded is None else self.recorded.statics

    @property
    def memory_bytes(self) -> int:
        """Bytes of the device that its graph holds."""
        return 0 if self.recorded is None else self.recorded.memory_bytes

    def has_exec_of(self, recorded: Recorded) -> bool:
        """Whether its graph is this one, and was not put away."""
        return self.recorded is recorded and self.away is None

    def release(self) -> None:
        """Tell of results that a caller still has, which a replay is about to overwrite."""
        if isinstance(self.recorded, Trained) and self.recorded.lent is not None:
            self.recorded.lent.release(())
        elif self.entry is not None:
            self.entry.release()

    def moved(self, call: Call) -> str | None:
        """The first tensor that is not where the graph reads it, if there is one."""
        if self.surroundings is not None and (moved := self.surroundings.moved) is not None:
            return moved
        pairs = zip(_addresses(call), self._addresses, strict=True)
        return next((name for (name, at), (_, before) in pairs if at != before), None)

    def hold(
        self,
        recorded: Recorded | Trained,
        entry: _core.Entry,
        call: Call,
        surroundings: Surroundings,
    ) -> None:
        """Calls are replays of this from now on."""
        # First: who lets the graph go, as after an interrupt, is to find it.
        self.recorded, self.entry = recorded, entry
        self.surroundings = surroundings
        self.state, self.waits = "captured", 0
        self.waits_for = self.once = self.failure = None
        self.reason = self.where = self.fix = None
        self._addresses = _addresses(call)
        self.capture_seconds += recorded.seconds
        self._replays_at_capture = self.replays

    def run_eagerly(
        self, reason: str, where: str | None, entry: _core.Entry | None, fix: str | None
    ) -> None:
        """Calls run eagerly from now on; the graph was dropped."""
        self.reason, self.where, self.fix, self.entry = reason, short_place(where), fix, entry

    def has_failed(self, failure: Failure) -> None:
        """Its capture has failed, and the error comes out: its next call is to be captured."""
        self.failure, self.waits_for = failure._replace(where=short_place(failure.where)), None

    def wait(self, why: str) -> None:
        """A call runs eagerly, so that the next one may be captured."""
        self.failure, self.waits_for = None, why

    def warn(self, name: str) -> None:
        """Say that calls run eagerly, and what to do; ``name`` is the function's."""
        at = "" if self.where is None else f" ({self.where})"
        warnings.warn(
            f"{name} runs eagerly for ({self.text}): {self.reason}{at}. What to do:"
            f" {self.report().advice}",
            stacklevel=levels_to_user(),
        )

    def again(self, reason: str, argument: str | None, where: str | None) -> None:
        """Count a new capture."""
        self._again[reason, argument, short_place(where)] += 1

    def moves(self, what: str) -> int:
        """How often this has moved soon after a capture before now; 0 if it was no soon move."""
        if self.replays - self._replays_at_capture >= _WORTH_CAPTURE:
            return 0
        self._moves[what] += 1
        # It may have another name each time.
        return max(self._moves[what] - 1, self._moves.total() // _MOST_NAMES)

    def put_away(self, known: list[_core.Entry]) -> None:
        """Let the exec go; ``known`` are the entries that the dispatcher had."""
        assert isinstance(self.recorded, Recorded)
        self.state, self.away = "evicted", known
        self.recorded.drop_exec()

    def bring_back(self) -> list[_core.Entry]:
        """Instantiate the template that was put away; the entries that the dispatcher is to have.

        Raises:
            InstantiateError: The driver refuses; it is still away then.
        """
        assert isinstance(self.recorded, Recorded) and self.away is not None
        self.capture_seconds += self.recorded.instantiate()
        known, self.state, self.away = self.away, "captured", None
        return known

    def drop(self, state: State) -> None:
        """Let the graph go. The caller has taken its entries out of the dispatcher."""
        entries = self.entries
        self.eager_calls += sum(one.eager_calls for one in entries)
        if self.state == "eager":
            self.eager_calls += sum(one.replays for one in entries)
        else:
            self._past_replays += sum(one.replays for one in entries)
        self.state, self.entry, self.padded, self.away = state, None, {}, None
        self.surroundings, self._addresses, self.tried = None, [], {}
        recorded, self.recorded = self.recorded, None
        if recorded is not None:
            recorded.reset()

    def report(self) -> KeyReport:
        """All of it in numbers and words."""
        recorded = self.recorded
        of_entries = sum(one.eager_calls for one in self.entries)
        eager_calls = self.eager_calls + of_entries
        if self.state == "eager":
            eager_calls += sum(one.replays for one in self.entries)
        said = Failure(self.reason or "", self.where, self.fix)
        if self.reason is None and self.failure is not None:
            said = self.failure
        once = self.once or (OF_SHARING if of_entries else None)
        again = [
            Rerecording(reason, argument, where, count)
            for (reason, argument, where), count in list(self._again.items())
        ]
        facts: dict[str, Any] = {
            "nodes": None,
            "memory_bytes": None,
            "breaks": (),
            "graph_seconds": None,
            "eager_seconds": None,
        }
        if recorded is not None:
            # Another thread may let it go meanwhile.
            with suppress(StateError):
                facts = {name: getattr(recorded, name) for name in facts}
        return KeyReport(
            key=self.text,
            state=self.state,
            reason=said.reason or self.waits_for or once,
            where=said.where,
            rerecorded=tuple(again),
            replays=self.replays,
            eager_calls=eager_calls,
            capture_seconds=self.capture_seconds,
            fix=said.fix,
            has_sizes=self.has_sizes,
            **facts,
        )


def text_of(words: Sequence[str], identity: Identity, keys: Mapping[Any, Key]) -> str:
    """What calls of a new key have in common, which is told from equal arguments given otherwise.

    Args:
        words: It, in parts.
        identity: What tells the key from others.
        keys: The others, by the same.
    """
    text = ", ".join(words)
    structure, *values = cast(tuple[Any, ...], identity.call)
    ways = 1
    for other, key in keys.items():
        if key.text == text or key.text.startswith(f"{text}, given in way "):
            its_structure, *its_values = other.call
            ways += its_values == values and its_structure != structure
    return text if ways == 1 else f"{text}, given in way {ways}"


def modules_in_words(training: tuple[bool, ...], requires_grad: tuple[bool, ...]) -> str:
    """What calls of a key have in common of modules; nothing if there are none."""
    words = []
    if training:
        count = sum(training)
        some = f"training: {count} of {len(training)} modules"
        words.append("training" if all(training) else some if count else "eval")
    if requires_grad:
        words.append(f"{plural(sum(requires_grad), 'weight')} with grad")
    return ", ".join(words)


def values_in_words(changed: Iterable[tuple[Holder, Any]]) -> list[str]:
    """Values that have changed, each once: a class has what its objects have.

    Args:
        changed: Where they are, and what is there.
    """
    return [*dict.fromkeys(f"{one.dotted} = {shown(now):.40}" for one, now in changed)]


def _addresses(call: Call) -> list[tuple[str, int]]:
    """Where the tensors of a call lie that are not copied."""
    return [(leaf.name, leaf.value.data_ptr()) for leaf in call.leaves if leaf.kind == "fixed"]
