"""``Key``: the state and the counts of the calls that share one graph."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Hashable, Sequence
from contextlib import suppress
from typing import Any

from cgraph import _core, _driver
from cgraph._autograd.pinned import Pinned
from cgraph._graphed.observation import Observation
from cgraph._graphed.recorded import Recorded
from cgraph._graphed.train import Trained
from cgraph._reason import Reason
from cgraph._text import plural, short_place
from cgraph.causes import Cause
from cgraph.errors import StateError
from cgraph.reports import KeyReport, Rerecording, State

__all__ = ["Key"]

# Number of misses in a row after which a key is eager.
_MISSES = 3
# Number of captures in a row, each with few replays, after which a key is eager.
_FRUITLESS = 5
_FEW_REPLAYS = 8
# Numbers of calls for which a key is eager the first time, and at most; then it is tried again.
_PAUSE = 8
_LONGEST_PAUSE = 256


class Key:
    """One key of a graphed function.

    Args:
        text: The arguments and values that its calls have in common, as text.

    Attributes:
        state: The state of its calls: they run eagerly until they are captured (``"observed"``),
            are replays (``"captured"``), or run eagerly (``"eager"``).
        reason: The reason why they run eagerly, or why the last one did.
        shown: The observation of the previous call; None before the first one.
        observed: Number of calls observed since the key began, or was tried again.
        recorded: The capture; None without one.
        entry: The entry that replays it natively.
        padded: The entries of calls that are padded to it, by the keys of such calls.
        told: The reason that the log has for its calls, as text.
        captures: Number of times that it has got a graph.
        checked: The dimensions of rows in results, by the rows of calls with compared padding.
        beside: Keys for the same calls while the backward pass of a call of this key is to come.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.state: State = "observed"
        self.reason: Reason | None = None
        self.shown: Observation | None = None
        self.observed = 0
        self.recorded: Recorded | Trained | None = None
        self.entry: _core.Entry | None = None
        self.padded: dict[Hashable, _core.Entry] = {}
        self.checked: dict[Hashable, Sequence[int | None]] = {}
        self.beside: list[Key] = []
        self.has_sizes = self.is_simulated = False
        self.misses = 0
        self.told: str | None = None
        self.eager_calls = 0
        self.captures = 0
        self.capture_seconds = 0.0
        self._past_replays = 0
        # Replays that no native entry counts, and calls whose work captures did.
        self._own_replays = 0
        self._fruitless = 0
        self._replays_at_capture = 0
        self._pause = 0
        self._next_pause = _PAUSE
        self._replays_at_pause = 0
        self._pinned: Pinned | None = None
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._again: Counter[tuple[str, str | None, str | None]] = Counter()

    @property
    def replays(self) -> int:
        """Number of calls that were replays of its graphs, captures included."""
        found = self._past_replays + self._own_replays
        return found + sum(one.replays for one in self.entries)

    @property
    def all_eager_calls(self) -> int:
        """Number of calls that ran eagerly, also where a native entry let them."""
        return self.eager_calls + sum(one.eager_calls for one in self.entries)

    @property
    def has_served(self) -> bool:
        """True if its graph has served calls besides the one that it was captured for."""
        return self.replays > self._replays_at_capture + 1

    @property
    def entries(self) -> list[_core.Entry]:
        """The entries for its own rows and for fewer."""
        entry = self.entry
        return [*([] if entry is None else [entry]), *self.padded.values()]

    @property
    def last_use(self) -> int:
        """The time of its last capture or replay: the later, the larger."""
        return max((one.last_use for one in self.entries), default=0)

    @property
    def is_open(self) -> bool:
        """True if a backward pass may still read what its graph's last call left."""
        return isinstance(self.recorded, Trained) and self.recorded.is_open()

    @property
    def is_running(self) -> bool:
        """True if a replay of it is under way, of which the caller may be part."""
        return self.recorded is not None and self.recorded.is_running

    @property
    def memory_bytes(self) -> int:
        """Bytes of the device that its graph holds."""
        return 0 if self.recorded is None else self.recorded.memory_bytes

    def is_eager(self) -> bool:
        """Return whether this call runs eagerly, unobserved; count it if so."""
        if self.state != "eager":
            return False
        if self._pinned is not None:
            waits = self._pinned.are_held
        else:
            waits = self._pause > 0
            self._pause -= 1
        if waits:
            self.eager_calls += 1
            return True
        # It is tried again from the beginning.
        self.state, self.shown, self.observed, self.misses = "observed", None, 0, 0
        # One capture more shows whether they are of use now.
        self._fruitless = min(self._fruitless, _FRUITLESS - 1)
        return False

    def was_replayed(self) -> None:
        """Count a call that was a replay, or whose work the capture itself did."""
        self._own_replays += 1

    def miss(self, reason: Reason) -> bool:
        """Count a call that could not be captured; return whether calls run eagerly from now on."""
        self.misses += 1
        self.reason = reason
        if self.misses < _MISSES:
            return False
        self.pause(reason)
        return True

    def is_first_in_thread(self) -> bool:
        """Return whether no earlier capture on this thread failed at a library's first use."""
        thread = threading.current_thread()
        is_first = thread not in self._threads
        self._threads.add(thread)
        return is_first

    def pause(self, reason: Reason, pinned: Pinned | None = None) -> None:
        """Let calls run eagerly from now on, until the key is tried again.

        Args:
            reason: The reason.
            pinned: The leaves whose history must go first; None if only calls count.
        """
        if self.replays - self._replays_at_pause >= _FEW_REPLAYS:
            self._next_pause = _PAUSE
        self.state, self.reason, self._pause = "eager", reason, self._next_pause
        self._next_pause = min(2 * self._next_pause, _LONGEST_PAUSE)
        self._replays_at_pause = self.replays
        self._pinned = pinned
        self.shown = None

    def hold(self, recorded: Recorded | Trained, entry: _core.Entry | None) -> None:
        """Let calls be replays of a capture from now on."""
        self.recorded, self.entry = recorded, entry
        self.is_simulated = _driver.current().device_type == "cpu"
        self.state, self.reason, self.misses = "captured", None, 0
        self.capture_seconds += recorded.seconds
        self.captures += 1
        self._replays_at_capture = self.replays

    def let_go(self, why: str, name: str | None, where: str | None) -> bool:
        """Note that the graph goes, as something changed; return whether calls run eagerly now."""
        few = self.replays - self._replays_at_capture < _FEW_REPLAYS
        self._fruitless = self._fruitless + 1 if few else 0
        self._again[why, name, short_place(where)] += 1
        if self._fruitless < _FRUITLESS:
            return False
        self.pause(
            Reason(
                Cause.MOVING_TENSOR,
                f"{name or why} {why} {plural(self._fruitless, 'time')} within"
                f" {_FEW_REPLAYS} replays each",
                where,
            )
        )
        return True

    def drop(self) -> None:
        """Drop the graph. The caller has taken its entries out of the dispatcher."""
        self._past_replays += sum(one.replays for one in self.entries)
        self.eager_calls += sum(one.eager_calls for one in self.entries)
        if self.state == "captured":
            self.state = "observed"
        self.entry, self.padded, self.checked = None, {}, {}
        recorded, self.recorded = self.recorded, None
        if recorded is not None:
            recorded.reset()

    def report(self) -> KeyReport:
        """Return the report of this key."""
        recorded = self.recorded
        again = [
            Rerecording(reason, argument, where, count)
            for (reason, argument, where), count in list(self._again.items())
        ]
        facts: dict[str, Any] = {"nodes": None, "memory_bytes": None, "breaks": (), "frozen": ()}
        copied = None
        if recorded is not None:
            copied = sum(one.nbytes for one in recorded.statics)
            # Another thread may drop it meanwhile.
            with suppress(StateError):
                facts = {name: getattr(recorded, name) for name in facts}
        reason = self.reason
        return KeyReport(
            key=self.text,
            state=self.state,
            reason=None if reason is None else reason.text,
            where=None if reason is None else reason.where,
            rerecorded=tuple(again),
            replays=self.replays,
            eager_calls=self.all_eager_calls,
            captures=self.captures,
            capture_seconds=self.capture_seconds,
            fix=None if reason is None else reason.fix,
            code=None if reason is None else reason.cause.code,
            has_sizes=self.has_sizes,
            copied_bytes=copied,
            is_simulated=self.is_simulated,
            **facts,
        )
