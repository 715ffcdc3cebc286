"""Tensors of other numbers of rows, and the contents of padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cgraph._graphed.options import OnePad
from cgraph._padding.rows import Fit
from cgraph.errors import ArgumentError

__all__ = ["like_resized", "number_of", "padded", "resized", "row_of"]


def resized(
    tensors: Sequence[torch.Tensor], found: Fit, size: int, pads: Sequence[OnePad]
) -> list[torch.Tensor]:
    """Cut or pad tensors to another number of rows."""
    parts = zip(tensors, found.dims, pads, strict=True)
    return [one if dim is None else padded(one, dim, size, pad) for one, dim, pad in parts]


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


def padded(tensor: torch.Tensor, dim: int, size: int, pad: OnePad) -> torch.Tensor:
    """Cut or pad a tensor to so many rows."""
    rows = tensor.shape[dim]
    if rows >= size:
        return tensor.narrow(dim, 0, size)
    shape = list(tensor.shape)
    if callable(pad):
        shape[dim] = size
        return _checked(pad(tensor, size), tensor, shape)
    shape[dim] = size - rows
    if pad in ("repeat", "first"):
        row = tensor.narrow(dim, row_of(pad, rows), 1)
        return torch.cat([tensor, row.expand(shape)], dim)
    return torch.cat([tensor, tensor.new_full(shape, number_of(pad))], dim)


def row_of(pad: OnePad, rows: int) -> int:
    """Return the number of the row that padding repeats."""
    return 0 if pad == "first" else rows - 1


def number_of(pad: OnePad) -> float:
    """Return the number that fills padding."""
    return 0 if pad == "zero" else pad  # type: ignore[return-value]


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
