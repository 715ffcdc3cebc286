"""The pieces of a model, and the programs that run them in order."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cgraph import _torch
from cgraph._piecewise.config import PiecewiseConfig
from cgraph._piecewise.counters import Counters
from cgraph._piecewise.split import SplitItem
from cgraph.breaks import eager_break

__all__ = ["Compiler", "Part", "program_of"]


@dataclass
class Part:
    """A part of a split graph.

    Attributes:
        item: The part.
        run: The function that runs it for any size.
        seconds: The time of its compilation for any size.
        sizes: The sizes that it has been compiled for, with the seconds of each.
    """

    item: SplitItem
    run: Callable[..., Any]
    seconds: float
    sizes: dict[int, float]


class Compiler:
    """A compiler of pieces.

    Args:
        config: The configuration.
        counters: Counts compilations.
        compiles: False if operators run as they are.
    """

    def __init__(self, config: PiecewiseConfig, counters: Counters, *, compiles: bool) -> None:
        self._options: dict[str, Any] = dict(config.inductor_options)
        self._counters = counters
        self._compiles = compiles

    def part(self, item: SplitItem) -> Part:
        """Make a part that runs for any size; called inside a compilation of Dynamo's."""
        if item.is_splitting_graph:
            return Part(item, _broken(item.graph), 0.0, {})
        began = time.perf_counter()
        nodes = item.graph.graph.nodes
        inputs = [_torch.example_of(one) for one in nodes if one.op == "placeholder"]
        run = self._compiled(item.graph, inputs, self._options)
        return Part(item, run, time.perf_counter() - began, {})

    def sized(self, part: Part, size: int) -> Callable[..., Any]:
        """Return a function that compiles a part for a size in its first call, and runs it."""
        made: Callable[..., Any] | None = None

        def run(*args: Any) -> Any:
            nonlocal made
            if made is None:
                began = time.perf_counter()
                options = {**_OF_SIZE, **self._options}
                made = self._compiled(part.item.graph, args, options)
                part.sizes[size] = time.perf_counter() - began
            return made(*args)

        return run

    def _compiled(
        self,
        graph: torch.fx.GraphModule,
        inputs: Sequence[Any],
        options: Mapping[str, Any],
    ) -> Callable[..., Any]:
        if not self._compiles or not _has_tensors(graph):
            return graph.forward
        self._counters.inductor_compilations += 1
        return _torch.compile_standalone(graph, inputs, options)


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
    target = _overload(calls[0].target) if len(calls) == 1 else None
    (output,) = (one.args[0] for one in graph.graph.nodes if one.op == "output")
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


def _overload(target: Any) -> Any:
    """Return the only overload of an operator, which takes less time to call; None if none."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        overloads = target.overloads()
        return getattr(target, overloads[0]) if len(overloads) == 1 else None
    return target if isinstance(target, torch._ops.OpOverload) else None


def _are_plain(args: Sequence[Any], given: Mapping[Any, int]) -> bool:
    """Return whether arguments are inputs of the part, or numbers, words and None."""
    plain = (int, float, bool, str, type(None))
    return all(
        one in given if isinstance(one, torch.fx.Node) else isinstance(one, plain) for one in args
    )


def _has_tensors(graph: torch.fx.GraphModule) -> bool:
    """Return whether a graph works on tensors; others compute sizes."""
    nodes = graph.graph.nodes
    values = (_torch.example_of(one) for one in nodes if one.op == "placeholder")
    return any(isinstance(one, torch.Tensor) for one in values)
