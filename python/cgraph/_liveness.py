"""Which tensors from outside a capture read, and whether they still are where they were."""

from __future__ import annotations

from typing import Any

import torch

from cgraph import _torch
from cgraph._torch import TorchDispatchMode, tree_iter
from cgraph.errors import LivenessError

__all__ = ["Outside", "Watch"]


class Outside:
    """A tensor from outside a capture, not kept alive.

    Args:
        tensor: The tensor.
        operator: The operator that read it.
    """

    def __init__(self, tensor: torch.Tensor, operator: str) -> None:
        self.storage = _torch.WeakStorage(tensor)
        self.dtype = tensor.dtype
        self.shape = tuple(tensor.shape)
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        self.operator = operator

    def get(self) -> torch.Tensor:
        """The tensor again.

        Raises:
            LivenessError: Its memory was freed or moved.
        """
        storage = self.storage.get()
        if storage is None or storage.data_ptr() != self.storage.address:
            what = "freed" if storage is None else "moved"
            raise LivenessError(
                f"the replay would read a tensor of shape {self.shape} and {self.dtype}, first used"
                f" by {self.operator}, whose memory was {what} since the capture: keep the tensors"
                " that a capture reads, and change them in place"
            )
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        return tensor.set_(storage, self.offset, self.shape, self.stride)


class Watch(TorchDispatchMode):
    """Notes the CUDA and pinned tensors that operators read and none of them made."""

    def __init__(self) -> None:
        super().__init__()
        self._outside: dict[int, Outside] = {}
        self._made: set[int] = set()

    def check(self) -> None:
        """Raise if one of them is gone.

        Raises:
            LivenessError: It names the first one.
        """
        for tensor in self._outside.values():
            storage = tensor.storage.get()
            if storage is None or storage.data_ptr() != tensor.storage.address:
                tensor.get()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator and note what it read and made."""
        kwargs = kwargs or {}
        tensors = [t for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)]
        result = func(*args, **kwargs)
        made = [t for t in tree_iter(result) if isinstance(t, torch.Tensor)]
        if any(tensor.is_cuda for tensor in (*tensors, *made)):
            for tensor in filter(_stays_on_device, tensors):
                address = tensor.untyped_storage().data_ptr()
                if address and address not in self._made:
                    self._outside.setdefault(address, Outside(tensor, str(func)))
        for tensor in filter(_stays_on_device, made):
            address = tensor.untyped_storage().data_ptr()
            if address not in self._outside:
                self._made.add(address)
        return result


def _stays_on_device(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda or tensor.is_pinned()
