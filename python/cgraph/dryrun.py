"""``dry_run``: the memory and time that a graph of a function would take, without side effects.

>>> import torch, cgraph
>>> with cgraph.sim.use():
...     x = torch.ones(1000)
...     found = cgraph.dry_run(lambda x: x.add_(1) * 2, x)
...     print(found.memory.nodes, "nodes,", found.memory.peak, "bytes at the peak, x is", x[0])
2 nodes, 4096 bytes at the peak, x is tensor(1.)
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from os import PathLike
from typing import Any, TextIO

import torch

from cgraph import _driver, _torch
from cgraph._captures.busy import busy
from cgraph._captures.footprint import record_memory
from cgraph._captures.pool_blocks import PoolBlocks
from cgraph._given import require_type
from cgraph._operators.rollback import Rollback
from cgraph._python.named_objects import named_by
from cgraph._text import in_units, print_fitted
from cgraph.cudagraph import CUDAGraph
from cgraph.errors import ArgumentError, CaptureError
from cgraph.graphs import graph
from cgraph.ledger import GraphMemory

__all__ = ["DryRun", "dry_run", "dry_run_shared"]


@dataclass(frozen=True)
class DryRun:
    """The findings of :func:`dry_run`.

    Attributes:
        memory: The bytes of the graph, and the seconds of its capture. ``memory.exec`` is in steps
            of 2 MiB: a small graph often finds room in what CUDA has taken for others.
        warmup_seconds: The seconds of all warm-up calls.
        instantiate_seconds: The seconds of the instantiation.
    """

    memory: GraphMemory
    warmup_seconds: float
    instantiate_seconds: float

    @property
    def device(self) -> int:
        """Bytes of the device that the graph would take: of its pool, and for its exec."""
        return self.memory.device

    def as_dict(self) -> dict[str, Any]:
        """Return all numbers by name."""
        seconds = {
            "warmup_seconds": self.warmup_seconds,
            "instantiate_seconds": self.instantiate_seconds,
        }
        return {**self.memory.as_dict(), **seconds, "device": self.device}

    def __str__(self) -> str:
        """Return the numbers in two lines."""
        memory, peak = self.memory, self.memory.peak or 0
        return (
            f"{in_units(self.device)} of the device: {in_units(memory.reserved)} in its pool (peak"
            f" {in_units(peak)}, held {in_units(memory.held)}, workspaces"
            f" {in_units(memory.workspace)}) and {in_units(memory.exec)} for its exec;"
            f" {memory.nodes} nodes\n"
            f"capture {memory.seconds * 1e3:.1f} ms, instantiate"
            f" {self.instantiate_seconds * 1e3:.1f} ms, warm-up {self.warmup_seconds * 1e3:.1f} ms"
        )

    def show(self, file: TextIO | None = None) -> None:
        """Print the numbers, to standard output unless a file is given."""
        print_fitted(self, file)

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw the blocks of the capture in their order; see :meth:`cgraph.ledger.Memory.plot`."""
        self.memory.plot(path)


def dry_run(function: Callable[..., object], *args: Any, warmup: int = 1, **kwargs: Any) -> DryRun:
    """Call a function, capture and instantiate it, and restore everything.

    Tensors that operators have written, gradients, the states of optimizers, random states and the
    device's memory are as before, also if the function raises. Changes of other Python objects
    stay, and so do effects of an operator that torch's dispatcher does not see. torch's cache of
    unused memory is emptied.

    Args:
        function: The function to capture.
        *args: Its arguments. The gradients of modules, tensors and optimizers among them are
            restored, and of those that the function or its object has, closes over or names.
        warmup: Number of calls before the capture. Zero is enough only if everything that it needs
            was loaded before.
        **kwargs: Its keyword arguments.

    Returns:
        Bytes and seconds.

    Raises:
        ArgumentError: ``warmup`` is not a count, or the function cannot be called.
        CaptureError: A capture is open, or the function cannot be captured.
        NotImplementedError: The function makes a higher-order operator, as a first import of
            torch's compiler does, and torch is too old to let others look at it (2.8).
    """
    require_type("function", function, Callable, "something that can be called")
    [found] = _run_all("dry_run()", [functools.partial(function, *args, **kwargs)], warmup)
    return found


def dry_run_shared(
    functions: Iterable[Callable[[], object]], *, warmup: int = 1
) -> tuple[DryRun, ...]:
    """As :func:`dry_run`, for graphs that share a pool: those of a ladder, the largest first.

    The functions are captured one after another. A later graph takes the memory of earlier results,
    as in a :class:`cgraph.GraphLadder`, so its own numbers are what it adds.

    Args:
        functions: The functions to capture, in the order of the captures to come.
        warmup: Number of calls before each capture.

    Returns:
        Bytes and seconds of each; all graphs take ``sum(one.device for one in found)``.

    Raises:
        ArgumentError: ``warmup`` is not a count, or a function cannot be called.
        CaptureError: A capture is open, or a function cannot be captured.

    >>> import torch, cgraph
    >>> with cgraph.sim.use():
    ...     x = torch.ones(1024, 1024)
    ...     steps = [lambda n=n: (x[:n] * 2).sum() for n in (1024, 512, 256)]
    ...     print([one.memory.reserved >> 20 for one in cgraph.dry_run_shared(steps)])
    [6, 0, 0]
    """
    require_type("functions", functions, Iterable, "functions to capture")
    steps = list(functions)
    for number, step in enumerate(steps):
        require_type(f"functions[{number}]", step, Callable, "something that can be called")
    return _run_all("dry_run_shared()", [functools.partial(step) for step in steps], warmup)


def _run_all(
    caller: str, functions: Sequence[functools.partial[object]], warmup: int
) -> tuple[DryRun, ...]:
    if not isinstance(warmup, int) or isinstance(warmup, bool) or warmup < 0:
        raise ArgumentError(f"warmup is {warmup!r}, expected a number of calls, at least 0")
    driver = _driver.current()
    if driver.is_capturing():
        raise CaptureError(f"{caller} inside a capture: end the capture first")
    try:
        return _run_in_one_pool(driver, functions, warmup)
    finally:
        # Only here all resources of the run are gone.
        driver.empty_cache()


def _run_in_one_pool(
    driver: _driver.Driver, functions: Sequence[functools.partial[object]], warmup: int
) -> tuple[DryRun, ...]:
    pool, found = driver.pool_handle(), []
    # Graphed functions are part of the capture: their replays could not be undone.
    with busy(), ExitStack() as graphs:
        for function in functions:
            blocks = PoolBlocks(driver, pool)
            found.append(_run(driver, function, warmup, pool, graphs))
            # As in a ladder, garbage gives its blocks to the next capture.
            blocks.are_left()
    return tuple(found)


def _run(
    driver: _driver.Driver,
    function: functools.partial[object],
    warmup: int,
    pool: _driver.Handle,
    graphs: ExitStack,
) -> DryRun:
    captured = CUDAGraph(keep_graph=True)
    graphs.callback(captured.reset)
    given = [("args", function.args), ("kwargs", function.keywords)]
    found = named_by(function.func, given)
    rollback = Rollback(leaves=found.leaves, is_capturing=driver.is_capturing)
    # The state to restore is copied on another stream than the one that may still write it.
    driver.synchronize()
    with ExitStack() as last:
        last.callback(rollback.undo)
        last.enter_context(_optimizers_kept())
        with rollback, record_memory():
            warm = time.perf_counter()
            with driver.stream(driver.new_stream()):
                for _ in range(warmup):
                    function()
                driver.synchronize()
            warm = time.perf_counter() - warm
            gradients = [(leaf, leaf.grad) for leaf in found.leaves]
            # Compiled functions are captured compiled; previous calls have shown their writes.
            is_compiled = warmup and driver.captures_compiled and rollback.has_uncompiled
            with rollback.aside() if is_compiled else nullcontext():
                if is_compiled:
                    rollback.rewind()
                    with driver.stream(driver.new_stream()):
                        function()
                        driver.synchronize()
                with graph(captured, pool=pool):
                    # Alive until the end of the capture: results that a caller would keep count as
                    # held.
                    _result = function()
            for leaf, gradient in gradients:
                leaf.grad = gradient
        began = time.perf_counter()
        captured.instantiate()
        instantiated = time.perf_counter() - began
        return DryRun(captured.memory(), warm, instantiated)


@contextmanager
def _optimizers_kept() -> Iterator[None]:
    """Restore the states and settings of optimizers that step in the ``with`` block."""
    before: dict[int, tuple[torch.optim.Optimizer, dict[Any, Any], list[dict[str, Any]]]] = {}

    def note(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if id(optimizer) not in before:
            state = {key: dict(value) for key, value in optimizer.state.items()}
            before[id(optimizer)] = optimizer, state, [dict(g) for g in optimizer.param_groups]

    try:
        with _torch.steps_noted(note):
            yield
    finally:
        for optimizer, state, groups in before.values():
            optimizer.state.clear()
            optimizer.state.update(state)
            for group, known in zip(optimizer.param_groups, groups, strict=True):
                group.clear()
                group.update(known)
