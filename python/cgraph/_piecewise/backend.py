"""``PiecewiseBackend``: a backend of ``torch.compile`` that captures a model in pieces."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from cgraph import _driver, _torch
from cgraph._captures.capture_order import largest_first
from cgraph._driver import Pool
from cgraph._piecewise.compile_cache import CompileCache, key_of
from cgraph._piecewise.config import PiecewiseConfig
from cgraph._piecewise.counters import Counters
from cgraph._piecewise.open_size import OpenSize
from cgraph._piecewise.own_files import write_file
from cgraph._piecewise.pieces import Compiler, Part, program_of
from cgraph._piecewise.report import PiecewiseReport, report_of
from cgraph._piecewise.sized_calls import SizedCalls
from cgraph._piecewise.split import split_graph
from cgraph._reason import Reason
from cgraph._text import plural
from cgraph.causes import Cause
from cgraph.errors import ArgumentError, CaptureError, CgraphWarning, StateError
from cgraph.graph_ladder import GraphLadder
from cgraph.graphs import capture_scope

__all__ = ["PiecewiseBackend"]

_log = logging.getLogger("cgraph.piecewise")


class PiecewiseBackend:
    """A backend of ``torch.compile`` for a server's model, split at operators that stay eager.

    The pieces between these operators are compiled once for any size, and for some sizes by
    themselves. Calls of the sizes to capture are replayed, all pieces by one native call, with the
    operators between them; the graphs of all sizes share the memory of the largest.

    Args:
        config: The configuration.
        pool: The pool of the captures, as for :class:`cgraph.graph`; by default a new one. Backends
            may share a pool if their calls never run at the same time.
        **fields: Fields of a configuration, if none is given.

    One backend serves one model: Dynamo must not compile it again. So exactly one size of its
    inputs is open, which :func:`cgraph.piecewise.mark_size` says, and calls run without gradients.
    Inputs with the open size are copied to memory that stays. Other tensors, such as weights and
    caches, stay where they are: a call with another object in place of one, or with new memory of
    the same (``weight.data = ...``), runs without a graph until :meth:`clear`. Their contents may
    change.

    Attributes:
        config: The configuration.
        counters: The counts of what it has done.
        cache_folder: The folder of the compiled pieces that are kept, once there are some.

    >>> import torch, cgraph
    >>> from cgraph.piecewise import PiecewiseBackend, mark_size
    >>> backend = PiecewiseBackend(splitting_ops=["torch.cumsum"], capture_sizes=[1, 2, 4])
    >>> model = torch.compile(lambda x: torch.cumsum(x * 2, 0).cos(), backend=backend)
    """

    def __init__(
        self, config: PiecewiseConfig | None = None, *, pool: Pool | None = None, **fields: Any
    ) -> None:
        if config is None:
            config = PiecewiseConfig.of(fields)
        elif fields or not isinstance(config, PiecewiseConfig):
            given = f"{config!r:.80} and {fields!r:.80}" if fields else f"{config!r:.80}"
            raise ArgumentError(f"config is {given}, expected a PiecewiseConfig, or its fields")
        self.config = config
        self.counters = Counters()
        self.cache_folder: Path | None = None
        self._parts: list[Part] = []
        self._calls: SizedCalls | None = None
        # Nothing has come after a dry run.
        self._was_dry = False
        self._ladder = GraphLadder(
            pool, check_addresses=not config.copy_inputs, fresh_outputs=config.outputs == "fresh"
        )

    def __repr__(self) -> str:
        """Return what is split, and the sizes that are captured."""
        pieces = plural(len(self._parts), "piece") if self._parts else "nothing compiled"
        captured = [one for one in self.config.capture_sizes if one in self._ladder]
        return f"<cgraph.PiecewiseBackend: {pieces}, captured sizes {captured}>"

    def __call__(
        self, graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any
    ) -> Callable[..., Any]:
        """Compile a graph of Dynamo's; return what runs it.

        Raises:
            StateError: It was called before.
            ArgumentError: Not exactly one size is open, or options are given.
            CaptureError: Gradients are recorded.
        """
        if options:
            raise ArgumentError(
                f"options of torch.compile are {options!r:.80}, expected none: give them to"
                " PiecewiseBackend"
            )
        if self._calls is not None:
            if not self._was_dry:
                raise StateError(_once(_torch.recompile_reason()))
            # The cache is there now: the graphs of the rehearsal are gone.
            self._calls.retire()
            self._was_dry = False
        values = _torch.example_inputs(graph.graph)
        if torch.is_grad_enabled() and any(
            isinstance(one, torch.Tensor) and one.requires_grad for one in values
        ):
            raise CaptureError(
                "a model in pieces whose gradients are recorded: call it under torch.no_grad() or"
                " torch.inference_mode(); cgraph.graphed and backend='cgraph' have gradients"
            )
        open_size = OpenSize.of(graph.graph)
        driver = _driver.current()
        compiles = self.config.compiler == "inductor" and driver.captures_compiled
        config = self.config
        cache = CompileCache.of(config, graph) if compiles else CompileCache(None, "")
        compiler = Compiler(config, self.counters, cache, compiles=compiles)
        whole, items = split_graph(graph, config.splitting_ops, merge=config.merge_splits)
        self.cache_folder = cache.folder
        if (folder := config.dump or cache.folder) is not None:
            _dump(Path(folder), traced=graph, split=whole)
        traced_seconds = _torch.seconds_of_tracing()
        self._parts = [compiler.part(item) for item in items]
        _log.info(
            "%d pieces in %.2f s, after %s of Dynamo",
            len(self._parts),
            sum(one.seconds for one in self._parts),
            "an unknown time" if traced_seconds is None else f"{traced_seconds:.2f} s",
        )
        self.counters.graphs += 1
        self.counters.parts += len(items)
        self.counters.pieces += sum(not item.is_splitting_graph for item in items)

        def program(size: int | None) -> Callable[..., Any]:
            """Return what runs all parts: for any size, compiled for one, or as they are for 0."""
            found = {}
            for one in self._parts:
                if size is None or one.item.is_splitting_graph:
                    found[one.item.submod_name] = one.run
                elif size == 0:
                    found[one.item.submod_name] = one.item.graph.forward
                else:
                    found[one.item.submod_name] = compiler.sized(one, size)
            made = program_of(whole, found)
            return made if size else _explained(made, graph)

        key = None if config.graph_file is None else key_of(config, graph)
        self._calls = SizedCalls(config, open_size, program, self._ladder, self.counters, key)
        return self._calls.run

    def warm_up(
        self, call: Callable[[int], object], *, progress: bool = True, freeze: bool = False
    ) -> None:
        """Compile and capture all sizes, the largest first.

        Args:
            call: Calls the model with a batch of a size.
            progress: Show a progress bar.
            freeze: Refuse captures from then on: a size that was not captured here raises.
        """
        if self._sizes:
            file = self._compile(call).file()
            self._was_dry = False
            with nullcontext() if file is None else self._ladder._keeping(file):
                self._capture_all(call, self._ladder.pool, progress=progress, freeze=freeze)

    def dry_run(self, call: Callable[[int], object], *, progress: bool = True) -> PiecewiseReport:
        """Capture all sizes as :meth:`warm_up` does, into a pool that goes, and drop the graphs.

        A server so learns what its graphs will take before it gives the rest of the device to a
        cache. The compiled code stays. The model has run, and written what it writes.

        Args:
            call: As for :meth:`warm_up`.
            progress: Show a progress bar.

        Returns:
            The bytes, nodes and seconds of all sizes.

        Raises:
            StateError: A size is captured, whose graphs would have to go.
        """
        if any(one.is_captured for one in self.report().sizes):
            raise StateError("dry_run() after a capture: call it before, or clear() first")
        if not self._sizes:
            return self.report()
        calls, driver = self._compile(call), _driver.current()
        calls.pool = driver.pool_handle()
        try:
            self._capture_all(call, calls.pool, progress=progress)
            return self.report()
        finally:
            calls.pool = None
            self.clear()
            self._was_dry = True
            # Replays in flight keep what their breaks read.
            driver.synchronize()
            driver.settle()
            driver.empty_cache()

    def report(self) -> PiecewiseReport:
        """Return the parts, the sizes with their bytes and seconds, and the counts."""
        sizes = () if self._calls is None else self._calls.sizes
        return report_of(self._parts, sizes, self.counters, self.cache_folder)

    def clear(self) -> None:
        """Drop all graphs: sizes are captured anew, as after weights have moved."""
        if self._calls is not None:
            self._calls.clear()

    @property
    def _sizes(self) -> set[int]:
        """The sizes that are captured or compiled for."""
        return {*self.config.capture_sizes, *self.config.compile_sizes}

    def _compile(self, call: Callable[[int], object]) -> SizedCalls:
        """Let a first call of the largest size compile the model, after a dry run once more."""
        if self._calls is None or self._was_dry:
            call(max(self._sizes))
        if self._calls is None:
            raise StateError("the call of a size has not called the model of this backend")
        return self._calls

    def _capture_all(
        self, call: Callable[[int], object], pool: Pool, *, progress: bool, freeze: bool = False
    ) -> None:
        with capture_scope(pool, freeze=freeze):
            for size in largest_first(self._sizes, "capture pieces", shows=progress):
                for _ in range(self.config.warmups_of(size) + 1):
                    call(size)
                    if size in self._ladder:
                        break


def _dump(folder: Path, *, traced: torch.fx.GraphModule, split: torch.fx.GraphModule) -> None:
    """Write the code of a graph before and after its split, unless it is there."""
    for name, graph in (("traced_graph.py", traced), ("computation_graph.py", split)):
        path = folder / name
        if path.exists():
            continue
        source = graph.print_readable(print_output=False).replace("<lambda>", "GraphModule")
        text = f"from __future__ import annotations\nimport torch\n\n{source}\n"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, text.encode())
        except OSError as error:
            fix = "give dump= a folder that can be written"
            reason = Reason(Cause.COMPILE_CACHE, f"{path} cannot be written: {error}", None, fix)
            reason.warn(kind=CgraphWarning)
        else:
            _log.info("%s has the code of the graph", path)


def _once(reason: str | None) -> str:
    if reason and "dispatch key set mismatch" in reason:
        return (
            "PiecewiseBackend can only be called once, and Dynamo compiles the code again, as"
            f" {reason}. Fix: call the model in the mode in which it was compiled, torch.no_grad()"
            " or torch.inference_mode(), with inputs that were made in it"
        )
    if reason:
        why = f"Dynamo compiles the code again, as {reason}"
    elif (broken := _torch.last_graph_break()) is not None:
        why = f"the model has a graph break: {broken}. torch.compile(fullgraph=True) names each"
    else:
        why = "the backend has another model already"
    return (
        f"PiecewiseBackend can only be called once, and {why}. Fix: mark the size of a batch in"
        " every input that has it, with cgraph.piecewise.mark_size(x, 0) before the first call,"
        " keep everything else equal between calls, and make one backend for each model"
    )


# As operators say it, and as Inductor's code does: Eq(u0, u1).
_ASSERTED = re.compile(r"Runtime assertion failed|^(Eq|Ne|L[te]|G[te])\(.*\b[su]\d")


def _explained(run: Callable[..., Any], graph: torch.fx.GraphModule) -> Callable[..., Any]:
    """Return a function that says what a failed assertion of torch's about the open size means."""

    def explained(*args: Any) -> Any:
        try:
            return run(*args)
        except RuntimeError as error:
            text = str(error)
            if not _ASSERTED.search(text):
                raise
            line = _torch.first_line_of(graph) or "the model"
            raise CaptureError(
                f"in {line} torch has assumed a relation of sizes that does not hold: {text}. Fix:"
                " take a part of fixed size in a way that does not depend on the open one, as"
                " x.narrow(0, 0, 1) in place of x[:1]"
            ) from error

    return explained
