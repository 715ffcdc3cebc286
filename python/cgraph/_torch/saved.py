"""What autograd's nodes have saved for a backward pass, and whether one has used it up."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["TELLS_SPENT", "is_spent"]

_RAW = "_raw_saved_"
# Without it, only unpacking what is saved would tell, which may run hooks.
TELLS_SPENT = hasattr(torch._C._autograd.SavedTensor, "data")
"""Whether this torch, as 2.11 and not 2.8, tells that a backward pass has used a history up."""


def is_spent(tensor: torch.Tensor) -> bool:
    """Whether a backward pass has run through the history of a tensor, and no other one can.

    Always false where torch does not tell, see :data:`TELLS_SPENT`.
    """
    seen: set[Any] = set()
    nodes = [tensor.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if any(_is_freed(node, name) for name in dir(type(node)) if name.startswith(_RAW)):
            return True
        nodes += [after for after, _ in node.next_functions]
    return False


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
