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
            # Its forward has nothing of a module's around it.
            run = eager_break(item.graph.forward, name=_operators(item.graph))
            return Part(item, run, 0.0, {})
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


def _operators(graph: torch.fx.GraphModule) -> str:
    """Return the names of what a splitting part calls."""
    targets = [one.target for one in graph.graph.nodes if one.op == "call_function"]
    return ", ".join(dict.fromkeys(getattr(one, "__name__", str(one)) for one in targets))


def _has_tensors(graph: torch.fx.GraphModule) -> bool:
    """Return whether a graph works on tensors; others compute sizes."""
    nodes = graph.graph.nodes
    values = (_torch.example_of(one) for one in nodes if one.op == "placeholder")
    return any(isinstance(one, torch.Tensor) for one in values)
