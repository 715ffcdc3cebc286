"""The pieces of a model, and the programs that run them in order."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cgraph import _torch
from cgraph._piecewise.compile_cache import CompileCache, StoredPiece
from cgraph._piecewise.config import PiecewiseConfig
from cgraph._piecewise.counters import Counters
from cgraph._piecewise.size_guards import Guard
from cgraph._piecewise.split import SplitItem
from cgraph.breaks import eager_break
from cgraph.errors import CaptureError

__all__ = ["Compiler", "Part", "program_of"]

_log = logging.getLogger("cgraph.piecewise")


@dataclass
class Part:
    """A part of a split graph.

    Attributes:
        item: The part.
        run: The function that runs it for any size, but for none of it.
        form: What it computes of its inputs; None if its graph does not tell all of that, so that
            neither another part nor another start has the same.
        seconds: The time of its compilation for any size.
        sizes: The sizes that it has been compiled for, with the seconds of each.
        runs: The functions that run it for these sizes.
        like: The first part of this form; itself if it is the first. Only that is compiled.
    """

    item: SplitItem
    run: Callable[..., Any]
    form: str | None = None
    seconds: float = 0.0
    sizes: dict[int, float] = field(default_factory=dict)
    runs: dict[int, Callable[..., Any]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.like = self


class Compiler:
    """A compiler of pieces.

    Args:
        config: The configuration.
        counters: Counts compilations.
        cache: The pieces that an earlier start has compiled.
        compiles: False if operators run as they are.
    """

    def __init__(
        self,
        config: PiecewiseConfig,
        counters: Counters,
        cache: CompileCache,
        *,
        compiles: bool,
    ) -> None:
        self._options: dict[str, Any] = dict(config.inductor_options)
        self._counters = counters
        self._cache = cache
        self._first: dict[str, Part] = {}
        self._compiles = compiles

    def part(self, item: SplitItem) -> Part:
        """Make a part that runs for any size; called inside a compilation of Dynamo's."""
        if item.is_splitting_graph:
            return Part(item, _broken(item.graph))
        part = Part(item, item.graph.forward)
        inputs = _torch.example_inputs(item.graph.graph)
        if not (self._compiles and _has_tensors(inputs)):
            return part
        part.form = _torch.form_of_graph(item.graph)
        if part.form is not None:
            part.like = self._first.setdefault(part.form, part)
        if part.like is not part:
            # As most layers of a model: one compilation serves all.
            part.run = part.like.run
            return part
        part.run, part.seconds = self._made(part, inputs, None)
        return part

    def sized(self, part: Part, size: int) -> Callable[..., Any]:
        """Return a function that compiles a part for a size in its first call, and runs it."""
        part = part.like

        def run(*args: Any) -> Any:
            made = part.runs.get(size)
            if made is None:
                made, part.sizes[size] = self._made(part, args, size)
                part.runs[size] = made
            return made(*args)

        inputs = _torch.example_inputs(part.item.graph.graph)
        return run if self._compiles and _has_tensors(inputs) else part.run

    def _made(
        self, part: Part, inputs: Sequence[Any], size: int | None
    ) -> tuple[Callable[..., Any], float]:
        """Return a part for a size, from the cache or compiled, and the seconds that it took."""
        began = time.perf_counter()
        stored = self._stored(part, size)
        made = stored or self._compiled(part, inputs, size)
        seconds = time.perf_counter() - began
        # One line on a large model, all of them for who looks for something.
        level = logging.DEBUG if part.item.graph_id else logging.INFO
        what = "compiled" if stored is None else "loaded from the cache"
        sizes = "any size" if size is None else f"size {size}"
        _log.log(level, "piece %d for %s: %s, %.2f s", part.item.graph_id, sizes, what, seconds)
        return made, seconds

    def _compiled(self, part: Part, inputs: Sequence[Any], size: int | None) -> Callable[..., Any]:
        """Compile a part, and store it."""
        graph = part.item.graph
        options = self._options if size is None else {**_OF_SIZE, **self._options}
        before = len(_torch.size_guards(inputs))
        self._counters.inductor_compilations += 1
        try:
            compiled = _torch.compile_standalone(graph, inputs, options)
        except _torch.compiler_errors() as error:
            line = _torch.first_line_of(graph) or "the model"
            raise CaptureError(
                f"torch's compiler fails at piece {part.item.graph_id}, at {line}: {error}. Fix:"
                " write that another way, let an operator of it be one of splitting_ops, or set"
                " compiler='eager'"
            ) from error
        if part.form is None or self._cache.folder is None:
            return compiled
        try:
            guards = tuple(map(Guard.of, _torch.size_guards(inputs)[before:]))
        except ValueError:
            return compiled
        if (code := _torch.stored_bytes(compiled)) is not None:
            self._cache.put(part.item.graph_id, size, StoredPiece(code, guards))
            _log.debug("piece %d for size %s: stored", part.item.graph_id, size or "any")
        return compiled

    def _stored(self, part: Part, size: int | None) -> Callable[..., Any] | None:
        """Return a part from the cache; None if it is not there."""
        number = part.item.graph_id
        stored = None if part.form is None else self._cache.get(number, size)
        if stored is None:
            return None
        try:
            loaded = _torch.compiled_of(stored.code)
        except Exception as error:  # torch's own formats fail in many ways
            self._cache.refuse(number, size, error)
            return None
        self._counters.loaded += 1
        output = part.item.graph.graph.output_node().args[0]
        run = loaded if isinstance(output, (tuple, list)) else lambda *args: loaded(*args)[0]
        return self._guarded(part, run, stored.guards) if stored.guards else run

    def _guarded(
        self, part: Part, run: Callable[..., Any], guards: Sequence[Guard]
    ) -> Callable[..., Any]:
        """Return a part that is compiled alone for sizes which break a guard.

        Dynamo does not know these guards, so each size is asked once.
        """
        inputs = enumerate(_torch.example_inputs(part.item.graph.graph))
        symbols = {str(one): place for place, one in inputs if isinstance(one, torch.SymInt)}
        known: dict[tuple[int, ...], Callable[..., Any]] = {}

        def guarded(*args: Any) -> Any:
            named = {name: args[place] for name, place in symbols.items()}
            sizes = tuple(named.values())
            if sizes not in known:
                holds = all(one.holds(named) for one in guards)
                known[sizes] = run if holds else self._compiled(part, args, sizes[0])
            return known[sizes](*args)

        return guarded


_OF_SIZE = {"max_autotune": True, "coordinate_descent_tuning": True}


def program_of(
    whole: torch.fx.GraphModule, parts: Mapping[str, Callable[..., Any]]
) -> Callable[..., Any]:
    """Return a function that calls parts in the order of the split graph.

    Args:
        whole: The graph of calls of the parts.
        parts: What is called for each of them, by its name.
    """
    program = torch.fx.GraphModule(whole, whole.graph)
    for name, run in parts.items():
        # What is called is no module, around whose calls torch would do more.
        del program._modules[name]
        program.__dict__[name] = run
    return program.forward


def _broken(graph: torch.fx.GraphModule) -> Callable[..., Any]:
    """Return a splitting part as a break: if it is one call, a break of what is called."""
    calls = [one for one in graph.graph.nodes if one.op not in ("placeholder", "output")]
    names = dict.fromkeys(getattr(one.target, "__name__", str(one.target)) for one in calls)
    name = ", ".join(names)
    target = _torch.only_overload(calls[0].target) if len(calls) == 1 else None
    output = graph.graph.output_node().args[0]
    is_whole = target is not None and (output is calls[0] or not target._schema.returns)
    given = {one: place for place, one in enumerate(graph.graph.find_nodes(op="placeholder"))}
    args, kwargs = (calls[0].args, calls[0].kwargs) if is_whole else ((), {})
    if not is_whole or not _are_plain([*args, *kwargs.values()], given):
        # Its forward has nothing of a module's around it.
        return eager_break(graph.forward, name=name)
    broken = eager_break(target, name=name)

    def run(*values: Any) -> Any:
        def value(one: Any) -> Any:
            return values[given[one]] if one in given else one

        return broken(*map(value, args), **{key: value(one) for key, one in kwargs.items()})

    return run


def _are_plain(args: Sequence[Any], given: Mapping[Any, int]) -> bool:
    """Return whether arguments are inputs of the part, or numbers, words and None."""
    plain = (int, float, bool, str, type(None))
    return all(
        one in given if isinstance(one, torch.fx.Node) else isinstance(one, plain) for one in args
    )


def _has_tensors(inputs: Sequence[Any]) -> bool:
    """Return whether a graph with these inputs works on tensors; others compute sizes."""
    return any(isinstance(one, torch.Tensor) for one in inputs)
