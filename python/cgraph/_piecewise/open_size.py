"""The size that a graph leaves open, and the inputs that have it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from cgraph import _torch
from cgraph.errors import ArgumentError

__all__ = ["OpenSize"]


@dataclass(frozen=True)
class OpenSize:
    """The size that a graph of Dynamo's leaves open.

    Attributes:
        place: The place of the input that is the size.
        sized: The places of tensors whose shape has it.
        others: The places of all other tensors.
        names: The names of all inputs.
        keeps_offsets: True if calls take notice of where an input begins in its storage.
    """

    place: int
    sized: tuple[int, ...]
    others: tuple[int, ...]
    names: tuple[str, ...]
    keeps_offsets: bool

    @classmethod
    def of(cls, graph: torch.fx.Graph) -> OpenSize:
        """Find the size.

        Raises:
            ArgumentError: There is none, or there are several.
        """
        nodes = [one for one in graph.nodes if one.op == "placeholder"]
        values = _torch.example_inputs(graph)
        # Dynamo has opened others by itself, as a cache had another size in a dry run.
        _torch.fix_unmarked_sizes(values)
        names = tuple(str(one.target) for one in nodes)
        tensors = [place for place, one in enumerate(values) if isinstance(one, torch.Tensor)]
        sized = [place for place in tensors if _symbols(*values[place].shape)]
        # A copy has the strides and the offset of its source.
        layouts = [(*values[place].stride(), values[place].storage_offset()) for place in sized]
        of_layouts = {one for layout in layouts for one in _symbols(*layout)}
        of_layouts -= {one for place in sized for one in _symbols(*values[place].shape)}
        symbols = {
            str(one): place
            for place, one in enumerate(values)
            if isinstance(one, torch.SymInt) and _symbols(one) and str(one) not in of_layouts
        }
        if not symbols and any(isinstance(one, torch.SymInt) for one in values):
            shapes = (f"{names[place]} of shape {tuple(values[place].shape)}" for place in tensors)
            raise ArgumentError(f"{_FIXED} ({', '.join(shapes)})")
        if len(symbols) != 1:
            raise ArgumentError(_several(symbols, values, names) if symbols else _NONE)
        if not tensors and (broken := _torch.last_graph_break()) is not None:
            raise ArgumentError(f"a model in pieces with a graph break: {broken}. {_BRANCH}")
        others = tuple(place for place in tensors if place not in sized)
        keeps_offsets = any("as_strided" in str(node.target) for node in graph.nodes)
        return cls(next(iter(symbols.values())), tuple(sized), others, names, keeps_offsets)


_NONE = (
    "a model in pieces without a symbolic size: all sizes of its inputs are constants of its graph,"
    " so that each size would be compiled by itself. Call cgraph.piecewise.mark_size(x, 0) for its"
    " input of a batch before the first call of the model"
)


_BRANCH = (
    "A branch on the size of a batch is one: write it with torch.where, or leave it out."
    " torch.compile(fullgraph=True) names each"
)
_FIXED = (
    "a model in pieces fixes the size that is marked, as by adding a tensor of just so many rows:"
    " no input has an open size any more. Let what it adds depend on x.shape[0]. Its inputs"
)


def _several(symbols: dict[str, int], values: list[Any], names: tuple[str, ...]) -> str:
    having = []
    for symbol in symbols:
        inputs = [
            name
            for name, one in zip(names, values, strict=True)
            if isinstance(one, torch.Tensor) and symbol in _symbols(*one.shape)
        ]
        having.append(f"{symbol} of {', '.join(inputs) or 'no tensor'}")
    return (
        f"a model in pieces with {len(symbols)} symbolic sizes ({'; '.join(having)}), expected one:"
        " graphs are found by that of the batch, and the others would be constants of them. If they"
        " are equal, say so in the model: torch._check(x.shape[0] == y.shape[0]). Otherwise give"
        " the other inputs a fixed size"
    )


def _symbols(*sizes: Any) -> set[str]:
    """Return the names of the sizes that are open."""
    return {str(one) for size in sizes for one in _torch.open_sizes(size)}
