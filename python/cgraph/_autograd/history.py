"""Autograd's records of tensors: the nodes and leaves that a backward pass would reach."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

__all__ = ["leaves_behind", "leaves_behind_node", "nodes_behind"]


def nodes_behind(tensors: Iterable[torch.Tensor]) -> Iterator[Any]:
    """Yield the nodes that a backward pass from tensors with a history would visit."""
    return _behind([tensor.grad_fn for tensor in tensors])


def _behind(nodes: list[Any], ends: Iterable[Any] = ()) -> Iterator[Any]:
    seen = set(ends)
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        nodes += [after for after, _ in node.next_functions]


def leaves_behind(
    tensors: Iterable[torch.Tensor], arguments: Iterable[torch.Tensor] = ()
) -> Iterator[torch.Tensor]:
    """Yield the leaves that a backward pass from tensors with a history would give gradients to.

    Leaves that it reaches through ``arguments`` are left out.
    """
    ends = [tensor.grad_fn for tensor in arguments]
    return _leaves_of(_behind([tensor.grad_fn for tensor in tensors], ends))


def leaves_behind_node(node: Any) -> list[torch.Tensor]:
    """Return the leaves that a backward pass from a node of autograd would give gradients to."""
    return list(_leaves_of(_behind([node])))


def _leaves_of(nodes: Iterable[Any]) -> Iterator[torch.Tensor]:
    for node in nodes:
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            yield variable
