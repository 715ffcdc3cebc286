"""What padding contains."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cgraph._graphed.options import Pad
from cgraph._padding.rows import Fit
from cgraph.errors import ArgumentError

__all__ = ["like_resized", "padded", "resized"]


def resized(tensors: Sequence[torch.Tensor], found: Fit, size: int, pad: Pad) -> list[torch.Tensor]:
    """Tensors of another number of rows: cut, or padded.

    Args:
        tensors: The tensors.
        found: Where their rows are.
        size: How many they are to have.
        pad: What the padding contains.
    """
    pairs = zip(tensors, found.dims, strict=True)
    return [one if dim is None else padded(one, dim, size, pad) for one, dim in pairs]


def like_resized(tensors: Sequence[torch.Tensor], found: Fit, size: int) -> list[torch.Tensor]:
    """Tensors of so many rows, with nothing in them."""
    pairs = zip(tensors, found.dims, strict=True)
    return [
        one
        if dim is None
        else one.new_empty([*one.shape[:dim], size, *one.shape[dim + 1 :]]).requires_grad_(
            one.requires_grad
        )
        for one, dim in pairs
    ]


def padded(tensor: torch.Tensor, dim: int, size: int, pad: Pad) -> torch.Tensor:
    """A tensor of so many rows: cut, or padded."""
    rows = tensor.shape[dim]
    if rows >= size:
        return tensor.narrow(dim, 0, size)
    shape = list(tensor.shape)
    if callable(pad):
        shape[dim] = size
        return _checked(pad(tensor, size), tensor, shape)
    shape[dim] = size - rows
    if pad == "zero":
        return torch.cat([tensor, tensor.new_zeros(shape)], dim)
    return torch.cat([tensor, tensor.narrow(dim, rows - 1, 1).expand(shape)], dim)


def _checked(padded: object, tensor: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """What a function of the user has padded a tensor to."""
    expected = f"{tensor.dtype}{shape} on {tensor.device}"
    if not isinstance(padded, torch.Tensor):
        raise ArgumentError(f"pad returned {padded!r:.80}, expected a tensor: {expected}")
    if (list(padded.shape), padded.dtype, padded.device) != (shape, tensor.dtype, tensor.device):
        raise ArgumentError(
            f"pad returned {padded.dtype}{list(padded.shape)} on {padded.device} for"
            f" {list(tensor.shape)}, expected {expected}"
        )
    return padded
