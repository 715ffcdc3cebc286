"""What autograd has noted of tensors: the nodes and leaves that a backward pass would reach."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

__all__ = ["leaves_behind", "nodes_behind"]


def nodes_behind(tensors: Iterable[torch.Tensor]) -> Iterator[Any]:
    """The nodes that a backward pass from tensors with a history would come through."""
    seen: set[Any] = set()
    nodes = [tensor.grad_fn for tensor in tensors]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        nodes += [after for after, _ in node.next_functions]


def leaves_behind(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The leaves that a backward pass from tensors with a history would give gradients to."""
    for node in nodes_behind(tensors):
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            yield variable
