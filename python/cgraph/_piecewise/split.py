"""The split of a graph at given operators."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.passes.split_module import split_module

from cgraph import _torch
from cgraph._given import require_type
from cgraph._reason import Reason
from cgraph.causes import Cause
from cgraph.errors import ArgumentError, CgraphWarning

__all__ = ["SplitItem", "operator_name", "split_graph"]


@dataclass(frozen=True)
class SplitItem:
    """A part of a graph.

    Attributes:
        submod_name: Its name in the graph that calls it.
        graph_id: Its number, in the order of the calls.
        is_splitting_graph: True if it holds a splitting operator, and runs eagerly.
        graph: The part.
    """

    submod_name: str
    graph_id: int
    is_splitting_graph: bool
    graph: torch.fx.GraphModule


def split_graph(
    graph: torch.fx.GraphModule, ops: Sequence[str | Any], *, merge: bool = False
) -> tuple[torch.fx.GraphModule, list[SplitItem]]:
    """Split a graph at operators: each call of one is a part by itself.

    Calls stay in their order, so that writes are seen by the same calls as before, and what takes
    items of a sequence that a call returns stays with that call.

    Args:
        graph: The graph, as Dynamo or ``make_fx`` makes it.
        ops: The operators: objects that the graph calls, such as ``torch.ops.mine.attention``, or
            names of them: ``"mine::attention"``, ``"mine.attention"``,
            ``"mine.attention.default"``, ``"torch.nn.functional.softmax"``,
            ``"torch.Tensor.cumsum"`` for calls of a method.
        merge: Let calls that follow each other be one part.

    Returns:
        The graph of calls of the parts, and the parts in that order.

    Raises:
        ArgumentError: An operator is neither a name nor callable, or there is no graph.
    """
    require_type("graph", graph, torch.fx.GraphModule, "a torch.fx.GraphModule")
    wanted = [operator_name(one) for one in ops]
    parts: dict[torch.fx.Node, int] = {}
    splitting: set[int] = set()
    found: set[str] = set()
    number = 0
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if (
            node.target is operator.getitem
            and _torch.is_sequence(node.args[0])
            and node.args[0] in parts
        ):
            parts[node] = parts[node.args[0]]
            continue
        names = _torch.names_of_call(node)
        known = names.intersection(wanted)
        found |= known
        # The number is new at the begin and at the end of a splitting part.
        if bool(known) != (number in splitting) or (known and not merge):
            number += bool(parts)
        if known:
            splitting.add(number)
        parts[node] = number
    _warn_of_missing(graph, [one for one in wanted if one not in found])
    whole = split_module(graph, None, parts.__getitem__, keep_original_order=True)  # type: ignore[arg-type]
    items = []
    for name, part in whole.named_children():
        if isinstance(part, torch.fx.GraphModule) and name.startswith(_PART):
            graph_id = int(name.removeprefix(_PART))
            items.append(SplitItem(name, graph_id, graph_id in splitting, part))
    return whole, sorted(items, key=lambda one: one.graph_id)


def operator_name(op: str | Any) -> str:
    """Return the name by which an operator is looked for: it is the same in each process."""
    if isinstance(op, str):
        return op.replace("::", ".")
    if _torch.is_operator(op):
        return str(op)
    name = _torch.name_of_function(op) if callable(op) else None
    if name is None:
        raise ArgumentError(f"a splitting operator is {op!r:.80}, expected an operator or its name")
    return name


_PART = "submod_"


def _warn_of_missing(graph: torch.fx.GraphModule, missing: Sequence[str]) -> None:
    if not missing:
        return
    known = {name for node in graph.graph.nodes for name in _torch.names_of_call(node)}
    for name in missing:
        near = ", ".join(difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.4))
        text = f"the graph does not call the splitting operator {name}"
        text += f"; the nearest names in it are {near}" if near else ""
        Reason(Cause.NO_SPLITTING_OPERATOR, text).warn(kind=CgraphWarning)
