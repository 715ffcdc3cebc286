"""Tensors of other numbers of rows, and the contents of padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cgraph._graphed.options import Pad
from cgraph._padding.rows import Fit
from cgraph.errors import ArgumentError

__all__ = ["like_resized", "padded", "resized"]


def resized(tensors: Sequence[torch.Tensor], found: Fit, size: int, pad: Pad) -> list[torch.Tensor]:
    """Cut or pad tensors to another number of rows.

    Args:
        tensors: The tensors.
        found: Their rows.
        size: The number of rows to make.
        pad: The contents of the padding.
    """
    pairs = zip(tensors, found.dims, strict=True)
    return [one if dim is None else padded(one, dim, size, pad) for one, dim in pairs]


def like_resized(tensors: Sequence[torch.Tensor], found: Fit, size: int) -> list[torch.Tensor]:
    """Make uninitialised tensors of so many rows."""
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
    """Cut or pad a tensor to so many rows."""
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
    """Check the tensor that the user's function has padded."""
    expected = f"{tensor.dtype}{shape} on {tensor.device}"
    if not isinstance(padded, torch.Tensor):
        raise ArgumentError(f"pad returned {padded!r:.80}, expected a tensor: {expected}")
    if (list(padded.shape), padded.dtype, padded.device) != (shape, tensor.dtype, tensor.device):
        raise ArgumentError(
            f"pad returned {padded.dtype}{list(padded.shape)} on {padded.device} for"
            f" {list(tensor.shape)}, expected {expected}"
        )
    return padded
