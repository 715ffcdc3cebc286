"""Calls of a split model: uncaptured, warm-ups, captures and replays of sizes."""

from __future__ import annotations

import logging
import operator
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from cgraph import _core, _driver, _torch
from cgraph._driver import Pool
from cgraph._piecewise.config import PiecewiseConfig
from cgraph._piecewise.counters import Counters
from cgraph._piecewise.open_size import OpenSize
from cgraph._reason import Reason
from cgraph._saved.reads import Reads
from cgraph.causes import Cause
from cgraph.graph_ladder import GraphLadder, LadderFile
from cgraph.segments import SegmentedGraph

__all__ = ["Size", "SizedCalls"]

_log = logging.getLogger("cgraph.piecewise")
Program = Callable[..., Any]


@dataclass
class Size:
    """A size whose calls are captured, or compiled for.

    Attributes:
        size: The size.
        program: The function that runs all parts.
        is_captured: True if its calls are to be captured.
        warmups: The calls that have run before the capture.
        replays: The calls that were replayed.
        refused: The reason why it is not captured; None if there is none.
        graph: The graphs of all pieces, once it is captured.
        others: The tensors without the open size that the capture has read, where they lay.
    """

    size: int
    program: Program
    is_captured: bool
    warmups: int = 0
    replays: int = 0
    refused: Reason | None = None
    graph: SegmentedGraph | None = None
    others: _core.SamePlaces | None = field(default=None, repr=False)


class SizedCalls:
    """The calls of one split model.

    Args:
        config: The configuration.
        open_size: The size that the graph leaves open.
        program: Returns the function that runs all parts, for a size or, for None, for any. That
            for no rows is not compiled: kernels have at least one block.
        ladder: The graphs.
        counters: Counts calls.
        key: What the model does, in a digest; None if its graphs are kept nowhere.

    Attributes:
        pool: A pool of the captures to come, in place of the ladder's.
    """

    pool: Pool | None = None

    def __init__(
        self,
        config: PiecewiseConfig,
        open_size: OpenSize,
        program: Callable[[int | None], Program],
        ladder: GraphLadder,
        counters: Counters,
        key: str | None = None,
    ) -> None:
        self._config, self._open, self._counters = config, open_size, counters
        self._ladder, self._lock = ladder, threading.RLock()
        self._general, self._of_none = program(None), program(0)
        self._has_run = False
        self._sizes = {
            one: Size(
                one,
                program(one) if one in config.compile_sizes else self._general,
                one in config.capture_sizes,
            )
            for one in (*config.capture_sizes, *config.compile_sizes)
        }
        self._captured: dict[int, Size] = {}
        self._buffers: dict[int, torch.Tensor] = {}
        self._sized = _getter(open_size.sized)
        self._key = key
        self._reads: Reads | None = None

    @property
    def sizes(self) -> tuple[Size, ...]:
        """The sizes that are captured or compiled for, ascending."""
        return tuple(self._sizes[one] for one in sorted(self._sizes))

    def run(self, *args: Any) -> Any:
        """Run a call."""
        size = args[self._open.place]
        found = self._captured.get(size)
        if found is not None:
            assert found.others is not None
            if (moved := found.others.moved(args)) is None:
                result = self._ladder(size, *self._sized(args))
                found.replays += 1
                self._counters.replays += 1
                return result
            self._note_moved(found, moved)
        return self._uncaptured(size, args)

    def file(self) -> LadderFile | None:
        """Return the file that keeps the graphs; None if there is none."""
        if (path := self._config.graph_file) is None:
            return None

        def reads(_: object) -> Reads:
            assert self._reads is not None
            return self._reads

        return LadderFile(path, check=False, lazy=False, describe=reads)

    def clear(self) -> None:
        """Drop all graphs."""
        with self._lock:
            self._captured.clear()
            self._buffers.clear()
            self._reads = None
            self._ladder.clear()
            for one in self._sizes.values():
                one.warmups, one.graph, one.refused, one.others = 0, None, None, None

    def retire(self) -> None:
        """Capture no more: another compilation of the model has taken its place."""
        self.clear()
        for one in self._sizes.values():
            text = "the model was compiled again after a dry run"
            one.refused = Reason(Cause.CAPTURE_FAILED, text)

    def _uncaptured(self, size: int, args: tuple[Any, ...]) -> Any:
        with self._lock:
            if size == 0:
                self._counters.uncaptured += 1
                return self._of_none(*args)
            found = self._sizes.get(size)
            if not self._has_run or found is None:
                self._has_run = True
                self._counters.uncaptured += 1
                return self._general(*args)
            wants = found.is_captured and found.refused is None and size not in self._captured
            is_warm = found.warmups >= self._config.warmups_of(size)
            if wants and (is_warm or self._ladder._is_kept(size)):
                return self._capture(found, args)
            self._counters.uncaptured += 1
            found.warmups += wants
            return found.program(*args)

    def _capture(self, found: Size, args: tuple[Any, ...]) -> Any:
        """Capture a size; return the result of the call, which has run."""
        if (reason := self._reason_against(args)) is not None:
            self._refuse(reason)
            self._counters.uncaptured += 1
            return found.program(*args)
        places, given = self._open.sized, list(args)
        copied: list[tuple[torch.Tensor, torch.Tensor]] = []
        if self._config.copy_inputs:
            copied = [(self._buffer(place, args[place]), args[place]) for place in places]
        inputs = [one for one, _ in copied] or self._sized(args)

        def run(*sized: torch.Tensor) -> Any:
            for place, one in zip(places, sized, strict=True):
                given[place] = one
            return found.program(*given)

        with torch.no_grad():
            for one, source in copied:
                one.copy_(source)
        before = [one._version for one, _ in copied]
        if self._key is not None and self._reads is None:
            self._reads = self._read(self._key, args)

        def warm_up() -> None:
            """Make the calls that must come first, where a file was to have the graph."""
            for _ in range(self._config.warmups_of(found.size) - found.warmups):
                found.program(*args)

        result = self._ladder.capture(found.size, run, *inputs, pool=self.pool, before=warm_up)
        written = next(
            (
                number
                for number, (one, source) in enumerate(copied)
                if one._version != before[number] or not _equal(one, source)
            ),
            None,
        )
        if written is not None:
            return self._refused(found, places[written], copied, result)
        found.graph = self._ladder.graph(found.size)
        if self._ladder._was_kept(found.size):
            self._counters.loaded_sizes += 1
            _log.info("size %d is loaded", found.size)
        else:
            self._counters.captures += 1
            self._counters.piece_captures += len(found.graph.segments)
            _log.info("size %d is captured: %d pieces", found.size, len(found.graph.segments))
        reader = _torch.tensor_reader()
        found.others = _core.SamePlaces(reader, args, self._open.others)
        self._captured[found.size] = found
        return result

    def _read(self, key: str, args: tuple[Any, ...]) -> Reads:
        """Return what the model reads: its tensors without the open size, by their names."""
        found = {self._open.names[place]: args[place] for place in self._open.others}
        forms = {name: one for name, one in found.items() if isinstance(one, torch.Tensor)}
        sizes = str(self._config.compile_sizes)
        words = [("the model", key, -1), ("the sizes compiled for", sizes, -1)]
        return Reads(words, forms, {})

    def _reason_against(self, args: tuple[Any, ...]) -> Reason | None:
        """Return why no graph can have such inputs; None if one can."""
        device_type = _driver.current().device_type
        for place in (*self._open.sized, *self._open.others):
            one, name = args[place], self._open.names[place]
            if one.device.type != device_type:
                text = f"its input {name} is on {one.device}, and a graph would keep what is read"
                fix = f"give it on {device_type}, or as a number"
                return Reason(Cause.OTHER_DEVICE, f"{text} there", None, fix)
        for place in self._open.sized:
            if self._config.copy_inputs and _torch.overlaps_itself(args[place]):
                text = f"its input {self._open.names[place]} is expanded, and cannot be copied to"
                return Reason(Cause.OVERLAP, text, None, "give it as contiguous()")
        return None

    def _refuse(self, reason: Reason) -> None:
        """Capture no size of the model any more."""
        for size in self._sizes.values():
            size.refused = reason
        _log.info("calls run without a graph: %s", reason)
        reason.warn("Calls run without a graph")

    def _refused(
        self,
        found: Size,
        place: int,
        copied: list[tuple[torch.Tensor, torch.Tensor]],
        result: Any,
    ) -> Any:
        """Refuse the capture of a model that writes its copied inputs; the call has run."""
        with torch.no_grad():
            for one, source in copied:
                source.copy_(one)
        text = f"the model writes its input {self._open.names[place]}, which is copied"
        fix = "return the new value, or set copy_inputs=False and keep the input where it is"
        self._refuse(Reason(Cause.MUTATED_INPUT, text, None, fix))
        self._counters.uncaptured += 1
        if self._config.outputs == "static":
            # The graph goes, and its memory with it.
            result = type(result)(_torch.clone_together(result))
        self._ladder.clear(found.size)
        return result

    def _buffer(self, place: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return memory that stays, like an input; sizes share that of the largest so far."""
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        # Only as_strided takes notice of the offset.
        offset = tensor.storage_offset() if self._open.keeps_offsets else 0
        length = offset
        if tensor.numel():
            length += 1 + sum((size - 1) * step for size, step in steps)
        # Writes to it are to count.
        with torch.inference_mode(False), torch.no_grad():
            known = self._buffers.get(place)
            if known is None or known.numel() < length:
                known = torch.empty(length, dtype=tensor.dtype, device=tensor.device)
                self._buffers[place] = known
            return known.as_strided(tensor.shape, tensor.stride(), offset)

    def _note_moved(self, found: Size, place: int) -> None:
        """Tell once which tensor is another one than at the capture, or lies elsewhere."""
        if found.refused is not None:
            return
        name = self._open.names[place]
        text = f"{name} is another tensor than at the capture, or has other memory"
        fix = "write into that one, or call clear() to capture anew"
        found.refused = Reason(Cause.MOVING_WEIGHTS, text, None, fix)
        _log.info("a call of size %d runs without a graph: %s", found.size, found.refused)
        found.refused.warn(f"A call of size {found.size} runs without a graph")


def _getter(places: tuple[int, ...]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Return a function that takes the items at some places of a tuple."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda args: tuple(args[place] for place in places)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same values, NaN among them."""
    return bool(((one == other) | ((one != one) & (other != other))).all())
