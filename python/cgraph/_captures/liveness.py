"""Memory from outside that a capture reads, and checks that it still is where it was.

Two views of it: the tensors that operators were given (:class:`LivenessMode`), and the addresses
that the captured nodes name (:class:`Check`), which include work that torch did not launch.
"""

from __future__ import annotations

from typing import Any

import torch

from cgraph import _core, _source, _torch
from cgraph._captures.blocks import Blocks
from cgraph._captures.footprint import PoolState
from cgraph._driver import Handle
from cgraph._torch import tree_iter
from cgraph.errors import LivenessError

__all__ = ["Check", "LivenessMode", "OutsideTensor"]

# A part of the names of torch's own kernels. Their tensors are those of operators, which the mode
# sees; their parameters may hold left-over addresses in tables that are not filled to the end.
_OF_TORCH = "2at6native"


class OutsideTensor:
    """A tensor from outside a capture, not kept alive.

    Args:
        tensor: The tensor.
        operator: The operator that read it.

    Attributes:
        line: The user's file and line that called the operator, where there is one.
    """

    def __init__(self, tensor: torch.Tensor, operator: str) -> None:
        self.storage = _torch.WeakStorage(tensor)
        self.nbytes = tensor.untyped_storage().nbytes()
        self.dtype = tensor.dtype
        self.shape = tuple(tensor.shape)
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        self.operator = operator
        self.line = _source.user_line()

    def get(self) -> torch.Tensor:
        """Return the tensor again.

        Raises:
            LivenessError: Its memory was freed or moved.
        """
        storage = self.storage.get()
        if storage is None or storage.data_ptr() != self.storage.address:
            raise self.error("freed" if storage is None else "moved")
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        return tensor.set_(storage, self.offset, self.shape, self.stride)

    def fate(self) -> str | None:
        """Return ``"freed"`` or ``"moved"`` if its memory was; None if it is where it was."""
        storage = self.storage.get()
        if storage is None:
            return "freed"
        return None if storage.data_ptr() == self.storage.address else "moved"

    def error(self, fate: str) -> LivenessError:
        """Return the error for a replay that would read it."""
        line = "" if self.line is None else f" ({self.line})"
        return LivenessError(
            f"the replay would read a tensor of shape {self.shape} and {self.dtype}, first used by"
            f" {self.operator}{line}, whose memory was {fate} since the capture: keep the tensors"
            " that a capture reads, and change them in place"
        )


class LivenessMode(_torch.Bystander):
    """A mode that notes CUDA and pinned tensors that captured operators read and did not make.

    Attributes:
        outside: The tensors, by the address of their storage.
    """

    def __init__(self) -> None:
        super().__init__()
        self.outside: dict[int, OutsideTensor] = {}
        self._made: set[int] = set()
        self._there: list[tuple[int, int]] = []

    def begins(self, pool: PoolState) -> None:
        """Note the blocks in the capture's pool before it begins."""
        self._there = pool.blocks

    def ends(self, pool: PoolState) -> None:
        """Forget memory that the capture allocated without an operator, as compiled code does."""

        def is_in(address: int, ranges: list[tuple[int, int]]) -> bool:
            return any(start <= address < start + size for start, size in ranges)

        self.outside = {
            address: tensor
            for address, tensor in self.outside.items()
            if not is_in(address, pool.segments) or is_in(address, self._there)
        }

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator and note the tensors that it read and made."""
        kwargs = kwargs or {}
        if getattr(func, "is_view", False):  # it reads nothing; what uses the view does
            return func(*args, **kwargs)
        tensors = [t for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)]
        result = func(*args, **kwargs)
        made = [t for t in tree_iter(result) if isinstance(t, torch.Tensor)]
        if not _torch.is_capturing():
            return result
        if any(tensor.is_cuda for tensor in (*tensors, *made)):
            for tensor in filter(_stays_on_device, tensors):
                address = tensor.untyped_storage().data_ptr()
                if address and address not in self._made and address not in self.outside:
                    self.outside[address] = OutsideTensor(tensor, str(func))
        for tensor in filter(_stays_on_device, made):
            address = tensor.untyped_storage().data_ptr()
            if address not in self.outside:
                self._made.add(address)
        return result


class Check:
    """A check that all memory which a captured graph names outside its pools is where it was.

    Args:
        device: The device of the capture.
        template: The captured graph.
        watch: The mode that has noted the tensors that its operators read.
        pools: Tokens of the pools that the graph keeps.
    """

    def __init__(
        self,
        device: _core.Device,
        template: _core.Template,
        watch: LivenessMode,
        pools: list[Handle],
    ) -> None:
        self._device = device
        self._outside = list(watch.outside.values())
        # Addresses outside torch's allocator: start and size of the driver's memory there.
        self._foreign_tensors: list[tuple[OutsideTensor, tuple[int, int]]] = []
        self._foreign: dict[int, tuple[str, tuple[int, int]]] = {}
        # Addresses inside it: start and size of the block, None if no block was active.
        self._blocks: dict[int, tuple[str, tuple[int, int] | None]] = {}
        self._note(template, {(handle[0], handle[1]) for handle in pools})

    def __call__(self) -> None:
        """Raise if something is gone.

        Raises:
            LivenessError: Memory is gone; the text names the first.
        """
        blocks: Blocks | None = None
        for tensor in self._outside:
            fate = tensor.fate()
            if fate is None:
                continue
            blocks = blocks or Blocks()
            # A pool of graphs keeps a block that another graph's replay fills again.
            if fate == "moved" or not blocks.is_active_in_pool(tensor.storage.address):
                raise tensor.error(fate)
        for tensor, extent in self._foreign_tensors:
            if self._device.memory_range(tensor.storage.address) != extent:
                raise tensor.error("freed")
        for address, (name, extent) in self._foreign.items():
            if self._device.memory_range(address) != extent:
                raise _unnamed(name, address)
        if self._blocks:
            blocks = blocks or Blocks()
            for address, (name, block) in self._blocks.items():
                if block is None or blocks.active(address) != block:
                    raise _unnamed(name, address)

    def _note(self, template: _core.Template, pools: set[Handle]) -> None:
        blocks = Blocks()
        for tensor in self._outside:
            address = tensor.storage.address
            extent = self._device.memory_range(address)
            if blocks.pool(address) is None and extent is not None:
                self._foreign_tensors.append((tensor, extent))
        for one in template.addresses():
            address, pool = one.address, blocks.pool(one.address)
            name = one.name or "a kernel"
            if _OF_TORCH in name or pool in pools or self._is_of_tensor(address):
                continue
            if pool is None:
                self._foreign[address] = (name, (one.base, one.bytes))
            else:
                self._blocks[address] = (name, blocks.active(address))

    def _is_of_tensor(self, address: int) -> bool:
        return any(0 <= address - t.storage.address < t.nbytes for t in self._outside)


def _unnamed(name: str, address: int) -> LivenessError:
    return LivenessError(
        f"the replay would run {_torch.demangled(name)} on the address {address:#x}, where nothing"
        " is alive since the capture: keep the memory that a capture's kernels use, also that which"
        " came through DLPack, a custom operator or a launch of your own"
    )


def _stays_on_device(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda or tensor.is_pinned()
