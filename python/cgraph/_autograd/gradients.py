"""Gradients that share no memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

__all__ = ["with_own_memory"]


def with_own_memory(
    gradients: Sequence[torch.Tensor | None], others: Iterable[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Return gradients, none of which shares memory with another one or with other tensors.

    Autograd passes one tensor on as several gradients, and copies it where it becomes the ``.grad``
    of several leaves. It could not detect that here.
    """
    storages = {_storage(other) for other in others if other.layout is torch.strided}
    own: list[torch.Tensor | None] = []
    for gradient in gradients:
        if gradient is not None and gradient.layout is not torch.strided:
            gradient = gradient.clone()
        elif gradient is not None:
            if _storage(gradient) in storages:
                gradient = gradient.clone(memory_format=torch.contiguous_format)
            storages.add(_storage(gradient))
        own.append(gradient)
    return own


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
