"""What autograd's nodes have saved for a backward pass, and whether one has used it up."""

from __future__ import annotations

import functools
from typing import Any

import torch

__all__ = ["is_spent"]

_RAW = "_raw_saved_"


def is_spent(tensor: torch.Tensor) -> bool:
    """Whether a backward pass has run through the history of a tensor, and no other one can.

    Always false with torch 2.8, which does not say so without unpacking what is saved.
    """
    seen: set[Any] = set()
    nodes = [tensor.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if any(_is_freed(node, name) for name in _saved_by(type(node))):
            return True
        nodes += [after for after, _ in node.next_functions]
    return False


@functools.cache
def _saved_by(kind: type) -> tuple[str, ...]:
    """The names of what nodes of a kind save."""
    return tuple(name for name in dir(kind) if name.startswith(_RAW))


def _is_freed(node: Any, name: str) -> bool:
    """Whether what is saved by this name is gone. Nothing is unpacked by hooks."""
    try:
        raw = getattr(node, name)
        several = raw if isinstance(raw, tuple) else (raw,)
        # What is freed has no contents, nor has what never had any: that alone can be asked for.
        if all(getattr(one, "data", one) is None for one in several):
            getattr(node, name.replace("_raw", "", 1), None)
    except RuntimeError as error:
        return "already been freed" in str(error)
    return False
