"""What padding contains: the user's choice, and what trials put in its place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from cgraph._functions.padding.rows import Fit
from cgraph._recording.options import Pad
from cgraph.errors import ArgumentError

__all__ = ["AnyPad", "Mixed", "padded", "resized", "trials"]


class Mixed(NamedTuple):
    """Numbers that differ in a row and from row to row, for a trial: the same ones for each seed.

    Args:
        seed: What they are drawn from.
        is_wide: Whether they reach beyond those of the call.
    """

    seed: int
    is_wide: bool


AnyPad = Pad | Literal["first", "again", "above", "below"] | Mixed
"""What padding contains; for a trial, also the first row again, or more or less than in any row."""


def resized(
    tensors: Sequence[torch.Tensor],
    found: Fit,
    size: int,
    pad: AnyPad,
    pad_of_floats: AnyPad | None = None,
    keeps: bool = False,
) -> list[torch.Tensor]:
    """Tensors of another number of rows: cut, or padded.

    Args:
        tensors: The tensors.
        found: Where their rows are.
        size: How many they are to have.
        pad: What the padding contains.
        pad_of_floats: What it contains where it cannot be a place, if that is something else: for
            tensors of floating point and of truth values.
        keeps: Whether numbers from 0 to 1 are to stay so: they may be probabilities.
    """
    made = []
    for place, (tensor, dim) in enumerate(zip(tensors, found.dims, strict=True)):
        fill = pad if pad_of_floats is None or not _is_free(tensor) else pad_of_floats
        if isinstance(fill, Mixed):  # each tensor has numbers of its own
            fill = fill._replace(seed=fill.seed + _MIXED * place)
        made.append(tensor if dim is None else padded(tensor, dim, size, fill, keeps))
    return made


def padded(
    tensor: torch.Tensor, dim: int, size: int, pad: AnyPad, keeps: bool = False
) -> torch.Tensor:
    """A tensor of so many rows: cut, or padded."""
    rows = tensor.shape[dim]
    if rows >= size:
        return tensor.narrow(dim, 0, size)
    shape = list(tensor.shape)
    if callable(pad):
        shape[dim] = size
        return _checked(pad(tensor, size), tensor, shape)
    shape[dim] = size - rows
    return torch.cat([tensor, _rows_of(tensor, dim, shape, pad, keeps)], dim)


def trials(pad: Pad, rows: int) -> list[tuple[AnyPad, AnyPad]]:
    """Paddings to try, the user's first: of whole numbers, and of other ones.

    Whole numbers may say where a row is written to. Where that is varied, no row must be written to
    a place that another one has.
    """
    if callable(pad):
        return [(pad, pad), (pad, "zero")]
    if pad == "zero":
        # One value in all places is the same to what takes differences or normalises, and what
        # keeps the largest of all rows shows only padding that comes to more than the call's rows.
        mixed = [Mixed(seed, is_wide=seed % 2 == 0) for seed in range(_MIXED)]
        # The last two differ in whole numbers alone, which tells whether rows are written there.
        floats: list[AnyPad] = ["zero", "above", "below", *mixed, "again"]
        return [*(("zero", one) for one in floats), ("again", "again")]
    return [("repeat", "repeat"), *([("first", "first")] if rows > 1 else [])]  # type: ignore[list-item]


_MIXED = 6


def _rows_of(
    tensor: torch.Tensor,
    dim: int,
    shape: list[int],
    pad: Literal["zero", "repeat", "first", "again", "above", "below"] | Mixed,
    keeps: bool,
) -> torch.Tensor:
    """So many rows of padding."""
    of_trial = isinstance(pad, Mixed) or pad in ("again", "above", "below")
    # Where the padding is zero, a mask says of its rows that they are none.
    if pad == "zero" or (of_trial and tensor.dtype is torch.bool):
        return tensor.new_zeros(shape)
    if pad in ("first", "repeat", "again"):
        row = 0 if pad == "first" else tensor.shape[dim] - 1
        return tensor.narrow(dim, row, 1).expand(shape)
    is_wide = not isinstance(pad, Mixed) or pad.is_wide
    lowest, highest = _bounds_of(tensor, is_wide, keeps)
    if isinstance(pad, Mixed):
        # Of a generator of its own: the call draws as without padding.
        drawn = torch.rand(shape, generator=torch.Generator().manual_seed(pad.seed))
        return torch.lerp(lowest, highest, drawn.to(lowest)).to(tensor.dtype)
    return (highest if pad == "above" else lowest).to(tensor.dtype).expand(shape)


def _bounds_of(
    tensor: torch.Tensor, is_wide: bool, keeps: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What numbers of a trial lie between: single numbers.

    Kernels that take probabilities, as those that draw by them, end the process's CUDA at others.
    """
    numbers = tensor.float() if tensor.itemsize == 1 else tensor
    lowest, highest = torch.nan_to_num(numbers, nan=0, posinf=0, neginf=0).aminmax()
    if not is_wide:
        return lowest, highest
    if keeps and lowest >= 0 and highest <= 1:
        return torch.zeros_like(lowest), torch.ones_like(highest)
    most = torch.finfo(tensor.dtype).max
    beyond = (torch.maximum(-lowest, highest).double() * 2 + 1).clamp(max=most).to(lowest)
    return -beyond, beyond


def _is_free(tensor: torch.Tensor) -> bool:
    """Whether any value will do: whole numbers may be places."""
    return tensor.is_floating_point() or tensor.dtype is torch.bool


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
