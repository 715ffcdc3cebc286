"""Calls with numbers of rows that are not captured: padded to the next size, and cut."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch

from cgraph import _core, _torch
from cgraph._explanation.findings import failed_by
from cgraph._graphed.call import Call
from cgraph._graphed.capture_ahead import capture_ahead
from cgraph._graphed.entry import entry_of, returned
from cgraph._graphed.key import Key
from cgraph._graphed.miss import Answer, Answers, Replay
from cgraph._graphed.observation import Observation
from cgraph._graphed.options import OnePad
from cgraph._graphed.recorded import Recorded
from cgraph._graphed.results import Result
from cgraph._graphed.size_capture import can_be_like, for_sizes
from cgraph._graphed.train import Trained
from cgraph._graphed.writeback import reason_beside
from cgraph._padding.comparison import compared, rows_in
from cgraph._padding.padded_replays import Padded, PaddedPasses, cut_leaves
from cgraph._padding.resize import like_resized, resized
from cgraph._padding.rows import Fit, Rows
from cgraph._python.assignments import returning_assigned
from cgraph._python.names import names_in
from cgraph._reason import Reason
from cgraph._source import user_line
from cgraph._text import first_line
from cgraph._torch import tree_flatten
from cgraph.causes import Cause
from cgraph.errors import CgraphWarning, CompareError

if TYPE_CHECKING:
    from cgraph._graphed.cache import Family

__all__ = ["PaddedSizes"]


class PaddedSizes:
    """Calls that are padded to a size.

    Attributes:
        rows: The rows of calls.
    """

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._options = answers.options
        self.rows = Rows(answers.options)
        # True once a warning said that sizes have no effect.
        self._has_told = False
        # The reason why no call is padded to the size of a key.
        self._unsafe: weakref.WeakKeyDictionary[Key, Reason] = weakref.WeakKeyDictionary()
        # Number of padded calls, where some are compared.
        self._calls: weakref.WeakKeyDictionary[Key, int] = weakref.WeakKeyDictionary()

    def answer(self, call: Call, eager: Callable[[], Any], frozen: bool) -> Answer | None:
        """Find the answer to a call with the rows of no size; None for any other call."""
        options = self._options
        if options.sizes is None:
            return None
        found = self.rows.fit(call, options.sizes)
        if found is None:
            self._tell_of_no_effect(call)
            return None
        if found.rows == found.size:
            return None
        if found.rows == 0:
            return self._answers.never(call, eager, Reason(Cause.EMPTY, "no rows"))
        if found.size is None:
            text = f"larger than all sizes: the largest one is {options.sizes[-1]}"
            return self._answers.never(call, eager, Reason(Cause.TOO_LARGE, text))
        try:
            like = call.replaced(like_resized(call.tensors, found, found.size))
            family, large, like = self._answers.key_of(like)
            # Before anything is padded.
            if large in self._unsafe:
                return self._answers.never(call, eager, self._unsafe[large])
            if large.is_eager():
                self._answers.warnings.of_eager(large, large.reason)
                return eager
            pads = options.pads(call.names)
            tensors = resized(call.tensors, found, found.size, pads)
        except (RuntimeError, TypeError) as error:
            if any(map(callable, options.pads(call.names))):
                raise
            text = f"padding to {found.size} rows failed: {first_line(error)}"
            return self._answers.never(call, eager, Reason(Cause.PADDING_FAILS, text))
        whole = like.replaced(tensors)
        if large.recorded is not None and large.shown is not None:
            if not large.shown.guards.fit(whole.objects):
                self._answers.require_thawed(large, frozen)
                self._answers.keys.drop(large)
        if large.recorded is None:
            self._answers.require_thawed(large, frozen)
            if large.shown is None or large.observed < options.warmup:
                # Its set-up is done before its size is captured.
                return lambda: self._observed(family, large, call)
            try:
                self._capture(family, large, whole)
            except Exception as error:
                large.miss(failed_by(error).at(user_line()))
                return self._answers.eagerly(large, eager)
        return self._padded(large, call, whole, found, eager)

    def _capture(self, family: Family, large: Key, whole: Call) -> None:
        """Capture a size, and restore the memory that this writes."""
        # A call that changes state may find other state now than when it was observed.
        answers, shown, like = self._answers, large.shown, None
        if shown is not None and can_be_like(shown) and not shown.trace.written():
            like = for_sizes(shown, answers.reads, whole)
        capture_ahead(answers, family, large, whole, like=like)

    def _observed(self, family: Family, large: Key, call: Call) -> Any:
        """Run a call eagerly, for real, as the first one of its size."""
        result = self._answers.observed(family, large, call)
        if large.shown is not None:
            large.shown.is_of_size = False
        return result

    def clear(self) -> None:
        """Forget what calls have shown."""
        self.rows.clear()
        self._unsafe.clear()
        self._has_told = False

    def _padded(
        self,
        large: Key,
        call: Call,
        whole: Call,
        found: Fit,
        eager: Callable[[], Any],
    ) -> Answer:
        """Find the answer to a call whose size has a graph."""
        recorded, shown = large.recorded, large.shown
        assert recorded is not None and shown is not None
        if (against := _against(recorded, shown)) is not None:
            return self._answers.never(call, eager, against)
        reason = reason_beside(call, recorded.mutated, recorded.writes, recorded.takes)
        if reason is not None or large.is_open:
            text = "an earlier call waits for its backward pass"
            waits = Reason(Cause.OPEN_CALLS, text)
            return self._answers.once(large, reason or waits, eager)
        # One repeated row may hide an effect of padding that several rows would show.
        place = found.dims, found.rows == 1
        batched = large.checked.get(place)
        is_due = self._is_due(large)
        if batched is not None and not is_due:
            return Replay(self._entry(large, call, found, batched), call)
        if not self._options.check_padding and not is_due:
            batched = large.checked[place] = self._assumed(recorded, whole, found)
            return Replay(self._entry(large, call, found, batched), call)
        run = eager
        if isinstance(recorded, Recorded) and recorded.assign.targets:
            function, names = self._answers.reads.function, names_in(shown.codes)
            places = recorded.assign.targets, call.objects, call.places
            collected = returning_assigned(function, shown.guards, names, *places)
            run = functools.partial(collected, (), *call.args, **call.kwargs)
        # Copies of the first row show what copies of the last one may hide.
        pads = self._options.pads(call.names)
        first: list[OnePad] = ["first" if one == "repeat" else one for one in pads]
        done = compared(
            run,
            [
                functools.partial(self._replayed, recorded, call, whole, found, one)
                for one in ([pads] if first == pads else [first, pads])
            ],
            shown.trace.written(),
            shown.guards.leaves if shown.uses_gradients else (),
            found,
            lambda memory: shown.guards.addresses.get(memory.data_ptr(), "a tensor"),
        )
        if done is None:
            text = "padding is not compared: there is no memory for copies"
            self._unsafe[large] = Reason(Cause.PADDING_UNCOMPARED, text)
            return self._answers.never(call, eager, self._unsafe[large])
        if done.shows is not None and batched is not None:
            # It was trusted before, and a check is due.
            raise CompareError(
                f"a replay of {self._answers.name} ({large.text}) padded from {found.rows} rows"
                f" differs from eager: {done.shows}"
            )
        if done.shows is not None:
            self._unsafe[large] = Reason(Cause.PADDING_SHOWS, f"padding shows: {done.shows}")
            self._answers.never(call, eager, self._unsafe[large])
        else:
            large.checked[place] = done.batched
            large.was_replayed()
        result = done.result
        if isinstance(recorded, Recorded):
            result = recorded.assign(result, call.objects, call.args, call.kwargs)
        return lambda: result

    def _is_due(self, large: Key) -> bool:
        """Return whether a padded call is compared, as ``debug`` or ``check_every`` asks for."""
        options = self._options
        if not options.check_every and "compare" not in options.debug:
            return False
        self._calls[large] = self._calls.get(large, 0) + 1
        return self._calls[large] % max(options.check_every, 1) == 0

    def _replayed(
        self,
        recorded: Recorded | Trained,
        call: Call,
        whole: Call,
        found: Fit,
        pads: Sequence[OnePad],
    ) -> tuple[Sequence[Any], Any]:
        """Replay with padding; return the leaves of the result and its specification."""
        if isinstance(recorded, Trained):
            assert found.size is not None
            args, kwargs = whole.arguments(resized(call.tensors, found, found.size, pads))
            leaves, spec = tree_flatten(recorded.replay(*args, **kwargs))
            return leaves, spec
        lent, is_fresh = self._answers.captures.pool_use.lent, self._options.outputs == "fresh"
        lent.overwrite()
        Padded(recorded, found, pads)(tuple(call.tensors))
        if not is_fresh:
            recorded.result.lend(lent)
        # The comparison cuts the other leaves, which may share memory.
        result = _cut(recorded, found, ["input"])
        return tree_flatten(result.returned(call.tensors, is_fresh=is_fresh))

    def _entry(
        self, large: Key, call: Call, found: Fit, batched: Sequence[int | None]
    ) -> _core.Entry:
        """Return the entry of calls of this number of rows."""
        identity = call.key()
        if identity in large.padded:
            return large.padded[identity]
        recorded, answers = large.recorded, self._answers
        assert recorded is not None and large.shown is not None
        use, pads = answers.captures.pool_use, self._options.pads(call.names)
        like: Sequence[torch.Tensor] = call.tensors
        if isinstance(recorded, Trained):
            run = PaddedPasses(recorded, found, pads, batched, answers.arguments)
            more: dict[str, Any] = {"work": run}
        else:
            work: Any = Padded(recorded, found, pads)
            if (native := work.native()) is not None:
                work, like = native
            else:
                # Calls are compared with dense tensors; the destinations of copies may have gaps.
                like = [torch.empty_like(one, requires_grad=False) for one in call.tensors]
            result = _cut(recorded, found, ["input", "own", "constant"])
            is_fresh, warn = self._options.outputs == "fresh", answers.warnings.of_held
            more = {
                "work": work,
                "outputs": returned(recorded, result, is_fresh=is_fresh, warn=warn),
                "lent": use.lent,
                "assigns": recorded.assign if recorded.assign.targets else None,
            }
        signatures = [_torch.signature(one) for one in like]
        guards = large.shown.guards
        entry = entry_of(recorded, call, signatures, guards, answers.lock, use, **more)
        large.padded[identity] = entry
        if not self._options.check_every and "compare" not in self._options.debug:
            answers.add(call, entry, recorded)
        return entry

    def _assumed(self, recorded: Recorded | Trained, whole: Call, found: Fit) -> list[int | None]:
        """Return the dimensions of rows in the leaves of a result, judged by shape alone."""
        if not isinstance(recorded, Trained):
            return rows_in(recorded.outputs, found)
        with torch.random.fork_rng(_torch.random_devices()), torch.no_grad():
            args, kwargs = whole.arguments(whole.tensors)
            leaves = tree_flatten(recorded.replay(*args, **kwargs))[0]
        return rows_in(leaves, found)

    def _tell_of_no_effect(self, call: Call) -> None:
        """Warn once that no tensor has rows; scalars need not have any."""
        if self._has_told or not any(tensor.dim() for tensor in call.tensors):
            return
        self._has_told = True
        text = (
            f"sizes= has no effect on ({call}): none of its tensors has the dimension"
            f" dim={self._options.dim!r}, along which rows are counted"
        )
        Reason(Cause.SIZES_UNUSED, text).warn(kind=CgraphWarning)


def _cut(recorded: Recorded, found: Fit, kinds: Collection[str]) -> Result:
    """Cut the leaves of these kinds in a graph's result to the rows of a call."""
    result = recorded.result
    dims = rows_in(recorded.outputs, found)
    dims = [dim if kind in kinds else None for dim, kind in zip(dims, result.kinds, strict=True)]
    leaves = cut_leaves(result.leaves, dims, found.rows)
    statics = cut_leaves(recorded.statics, found.dims, found.rows)
    return Result(leaves, result.spec, result.kinds, statics, result.lasting)


def _against(recorded: Recorded | Trained, shown: Observation) -> Reason | None:
    """Return why no call is padded to a size; None if calls can be."""
    plain = [name for name, (_, parts) in (shown.assigned or {}).items() if any(parts)]
    if shown.guards.inputs():
        text = "it reads and assigns tensors whose rows may be those of calls"
    elif plain:
        text = f"the function assigns {plain[0]}"
    else:
        return None
    fix = "return the new value instead of assigning it, or call with the sizes themselves"
    return Reason(Cause.PADDING_UNCOMPARED, f"padding is not compared: {text}", None, fix)
