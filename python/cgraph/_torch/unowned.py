"""Tensors over memory that they do not own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch

from cgraph import _core
from cgraph._torch.private_names import of_torch
from cgraph._torch.tensors import lazy_view, memory_of, storage_id, without_modes

__all__ = [
    "can_be_unowned",
    "increment_versions",
    "lent_storage",
    "unowned",
    "with_version_of",
]


def can_be_unowned(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has a class, a layout and memory that :func:`unowned` knows."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return False
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return False
    memory = memory_of(tensor)
    return memory is not None and memory.nbytes() > 0


def unowned(
    tensors: Sequence[torch.Tensor],
    owner: object = None,
    pool: _core.Pool | None = None,
    *,
    is_inference: bool | None = None,
) -> list[torch.Tensor]:
    """Return tensors over the memory of others, without owning it and without their history.

    Those of one storage share a storage and a version again. It cannot be resized, and
    ``record_stream`` of one does nothing. No dispatch mode and no mode of functions sees this.

    Args:
        tensors: The tensors, each as :func:`can_be_unowned` has found it.
        owner: Kept until the last tensor over the memory is gone. With None, nothing is kept.
        pool: A pool whose memory is kept as long as the owner.
        is_inference: Whether they are inference tensors. Default: each as the one it stands for.
    """
    first: dict[tuple[int, bool], torch.Tensor] = {}
    found = []
    is_current = torch.is_inference_mode_enabled()
    with without_modes(), of_torch.DisableTorchFunction():
        for tensor in tensors:
            memory = tensor.untyped_storage()
            inference = tensor.is_inference() if is_inference is None else is_inference
            number = storage_id(memory), inference
            with nullcontext() if is_current == inference else torch.inference_mode(inference):
                root = first.get(number)
                if root is None:
                    made = first[number] = _lent(tensor, memory, owner, pool)
                else:
                    made = with_version_of(root, _part(tensor, root.untyped_storage()))
                found.append(lazy_view(made, tensor.is_conj(), tensor.is_neg()))
    return found


def lent_storage(
    address: int, nbytes: int, device: torch.device, owner: object
) -> torch.UntypedStorage:
    """Return a storage over memory of others, which keeps their owner."""
    elements = _BYTE, (nbytes,), (1,)
    capsule = _core.lent_memory(address, elements, device.index, owner, None)
    return torch.utils.dlpack.from_dlpack(capsule).untyped_storage()


def with_version_of(root: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """Return a new tensor over the same memory that has the version of another one, as views do."""
    if made.is_inference():
        return made
    alias = root.detach()
    alias.data = made
    return alias


def _lent(
    tensor: torch.Tensor,
    memory: torch.UntypedStorage,
    owner: object,
    pool: _core.Pool | None,
) -> torch.Tensor:
    """Return a tensor over a storage that is lent, with the owner if there is one."""
    address, nbytes, ordinal = memory.data_ptr(), memory.nbytes(), memory.device.index
    if owner is None:
        # The allocator may give it its block back later, but not if it has something to free.
        made = of_torch._construct_storage_from_data_pointer(address, memory.device, nbytes)
        return _part(tensor, made)
    is_all = tensor.nbytes == nbytes and tensor.storage_offset() == 0 and tensor.is_contiguous()
    dtype = _DTYPES.get(tensor.dtype) if is_all else None
    if dtype is not None:
        elements = dtype, tensor.shape, tensor.stride()
        capsule = _core.lent_memory(address, elements, ordinal, owner, pool)
        return torch.utils.dlpack.from_dlpack(capsule)
    capsule = _core.lent_memory(address, (_BYTE, (nbytes,), (1,)), ordinal, owner, pool)
    return _part(tensor, torch.utils.dlpack.from_dlpack(capsule).untyped_storage())


def _part(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a tensor that lies in a storage as another one lies in its own."""
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return made.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


_BYTE = 1, 8
_DTYPES = {
    torch.int8: (0, 8),
    torch.int16: (0, 16),
    torch.int32: (0, 32),
    torch.int64: (0, 64),
    torch.uint8: _BYTE,
    torch.float16: (2, 16),
    torch.float32: (2, 32),
    torch.float64: (2, 64),
    torch.bfloat16: (4, 16),
}
"""DLPack's code and bits of dtypes."""

increment_versions = of_torch.function("_increment_version")
"""Tell autograd that the tensors of a list were written to; inference tensors have no version."""
