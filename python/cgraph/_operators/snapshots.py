"""Earlier states of tensors and storages, to restore them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch

from cgraph import _torch

if TYPE_CHECKING:
    from cgraph._operators.rollback import Rollback

__all__ = [
    "RandomSnapshot",
    "StorageSnapshot",
    "TensorSnapshot",
    "bytes_of",
    "in_type",
    "storage_snapshot",
]


class TensorSnapshot:
    """The earlier state of a tensor; one that has died since needs nothing.

    Args:
        tensor: The tensor.
        like: Another tensor at the same place in the same storage, or a copy of one without
            storage; None if neither is possible.

    Attributes:
        like: The argument ``like``; None if the tensor stays where it is.
    """

    def __init__(self, tensor: torch.Tensor, like: torch.Tensor | None) -> None:
        self.tensor = _torch.TensorWeakRef(tensor)
        self.like = like
        self._requires_grad = tensor.requires_grad
        self._is_leaf = tensor.is_leaf
        self._grad = tensor.grad if tensor.is_leaf else None

    def undo_place(self) -> None:
        """Put the tensor back to its earlier place."""
        tensor = self.tensor()
        if tensor is None or self.like is None:
            return
        if _torch.place_of(tensor) != _torch.place_of(self.like):
            tensor.data = self.like

    def undo_autograd(self) -> None:
        """Remove a history that the tensor did not have, and restore its gradient."""
        tensor = self.tensor()
        if tensor is None or not self._is_leaf:
            return
        if not self._requires_grad and not tensor.is_leaf and _torch.base_of(tensor) is tensor:
            tensor.detach_()
        if tensor.is_leaf and tensor.grad is not self._grad:
            tensor.grad = self._grad


class StorageSnapshot(NamedTuple):
    """The earlier state of a storage, which is kept alive so that its number stays its own."""

    storage: torch.UntypedStorage
    nbytes: int
    copy: torch.Tensor
    dtype: torch.dtype

    def undo(self) -> None:
        """Restore the storage's size and contents."""
        if self.storage.nbytes() != self.nbytes:
            self.storage.resize_(self.nbytes)
        self.rewind()

    def rewind(self) -> None:
        """Restore the storage's contents, and leave it larger: tensors may have grown as well."""
        if self.storage.nbytes() < self.nbytes:
            self.storage.resize_(self.nbytes)
        bytes_of(self.storage)[: self.nbytes].copy_(self.copy)


def storage_snapshot(storage: torch.UntypedStorage, dtype: torch.dtype) -> StorageSnapshot:
    """Note the present contents of a storage, to restore them."""
    with torch.no_grad(), _torch.without_modes():
        return StorageSnapshot(storage, storage.nbytes(), bytes_of(storage).clone(), dtype)


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a tensor of all bytes of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def in_type(content: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return bytes as numbers of a type; as bytes if they are not a whole number of them."""
    return content if content.numel() % dtype.itemsize else content.view(dtype)


class RandomSnapshot:
    """The present states of the default generators.

    Args:
        also: Other generators to include.
        device: The number of the GPU; by default the current one.
    """

    def __init__(self, also: Iterable[torch.Generator] = (), device: int | None = None) -> None:
        devices = _torch.random_devices() if device is None else [device]
        generators = [*also, torch.default_generator]
        generators += [torch.cuda.default_generators[one] for one in devices]
        self._states = [(generator, generator.get_state()) for generator in generators]

    def rewind(self, also: Rollback) -> None:
        """Restore the states, and those of other generators that operators got."""
        also.rewind_generators()
        self.put_back()

    def put_back(self) -> None:
        """Restore the states, and no others."""
        for generator, state in self._states:
            generator.set_state(state)
