"""The result of a graph's function, and the results of calls, in memory of the caller's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from cgraph import _core, _driver, _torch
from cgraph._captures.fresh_results import can_be_fresh
from cgraph._captures.pool_blocks import places_in, unowned_at
from cgraph._driver import Handle
from cgraph._graphed.reasons import reason_against_result
from cgraph._torch import tree_flatten, tree_unflatten

__all__ = ["Result", "View"]


@dataclass(frozen=True)
class Result:
    """The result of a captured function, leaf by leaf.

    Attributes:
        leaves: The leaves of the function's result, in the graph's memory; for an argument its
            place.
        spec: The specification by which they form the result.
        kinds: The kind of each: ``"argument"`` (the caller's own tensor), ``"constant"`` (it is
            returned as it is), ``"own"`` (it lies in the graph's memory) or ``"input"`` (it lies in
            the copy of an argument, and becomes a view of the argument where possible).
        statics: The copies of the arguments.
        lasting: Number of the last leaves, which never lie in the graph's memory for callers.
    """

    leaves: list[Any]
    spec: Any
    kinds: list[str]
    statics: Sequence[torch.Tensor] = ()
    lasting: int = 0

    @classmethod
    def of(
        cls,
        returned: Any,
        statics: Sequence[torch.Tensor],
        is_made: Callable[[torch.Tensor], bool],
        device_type: str,
        lasting: Sequence[Any] = (),
    ) -> Result:
        """Build the result of a captured call.

        Args:
            returned: The value that the function returned.
            statics: The tensors that the function got in place of the call's.
            is_made: Tells whether the call made the memory of a tensor.
            device_type: The device type of the tensors that replays compute.
            lasting: Values to return besides; if there are some, the result is a pair.

        Raises:
            CaptureError: No replay could return it.
        """
        if (reason := reason_against_result(returned, device_type, is_made)) is not None:
            raise reason.error()
        also = len(tree_flatten([*lasting])[0])
        leaves, spec = tree_flatten((returned, [*lasting]) if lasting else returned)
        copies = {_torch.storage_id(one.untyped_storage()) for one in statics}
        kinds = [_kind(one, statics, copies, is_made) for one in leaves]
        for number, kind in enumerate(kinds):
            if kind == "argument":
                leaves[number] = next(p for p, one in enumerate(statics) if one is leaves[number])
        return cls(leaves, spec, kinds, statics, also)

    def fresh(self, outputs: str) -> list[torch.Tensor]:
        """Return the tensors that replays copy to new memory, given the option ``outputs``."""
        first = 0 if outputs == "fresh" else len(self.leaves) - self.lasting
        pairs = zip(self.leaves[first:], self.kinds[first:], strict=True)
        return [leaf for leaf, kind in pairs if kind == "own" and can_be_fresh(leaf)]

    @property
    def storages(self) -> set[int]:
        """The numbers of the storages that the tensors lie in."""
        tensors = (one for one in self.leaves if isinstance(one, torch.Tensor))
        memories = _torch.memories_of(tensors)
        return {_torch.storage_id(one) for one in memories}

    def unowned(self, pool: Handle) -> Result:
        """Return the result with leaves that do not own their blocks.

        The leaves, and what callers get of them, keep the pool alive instead.
        """
        driver = _driver.current()
        own = [one for one in places_in(driver, pool, self.leaves) if self.kinds[one] == "own"]
        return replace(self, leaves=unowned_at(driver, pool, self.leaves, own))

    def lend(self, lent: _core.LentResults) -> None:
        """Note that a caller gets the leaves that lie in the graph's memory."""
        count = len(self.leaves) - self.lasting
        pairs = zip(self.leaves[:count], self.kinds, strict=False)
        lent.lend([leaf for leaf, kind in pairs if kind == "own"])

    def view(self, number: int) -> View | None:
        """Return the view that makes an ``"input"`` leaf of its argument; None if it is a copy."""
        leaf = self.leaves[number]
        memory = _torch.storage_id(leaf.untyped_storage())
        for place, static in enumerate(self.statics):
            if _torch.storage_id(static.untyped_storage()) == memory:
                return View.of(leaf, static, place)
        return None

    def returned(self, tensors: Sequence[torch.Tensor], *, is_fresh: bool) -> Any:
        """Build the return value of a call whose work has been enqueued."""
        copies: dict[int, torch.Tensor] = {}
        leaves = []
        for number, (leaf, kind) in enumerate(zip(self.leaves, self.kinds, strict=True)):
            if kind == "input" and (view := self.view(number)) is not None:
                leaves.append(view(tensors[view.place]))
            elif kind == "argument":
                leaves.append(tensors[leaf])
            elif kind == "constant":
                leaves.append(leaf)
            elif kind == "input" or is_fresh or number >= len(self.leaves) - self.lasting:
                leaves.append(_copied(leaf, copies))
            else:
                leaves.append(leaf.detach())
        return tree_unflatten(leaves, self.spec)


class View:
    """A view of an argument, like the view that a result is of the argument's copy.

    Args:
        leaf: The result, as it lies in the copy.
        static: The copy.
        place: The place of the argument.
        offset: The first element of the result, in its elements from the beginning of the copy.

    Attributes:
        place: As given.
    """

    def __init__(self, leaf: torch.Tensor, static: torch.Tensor, place: int, offset: int) -> None:
        self.place = place
        self._leaf = leaf
        self._form = leaf.shape, leaf.stride()
        self._offset = offset
        self._dtype = None if leaf.dtype is static.dtype else leaf.dtype
        self._shape, self._strides = static.shape, static.stride()

    @classmethod
    def of(cls, leaf: torch.Tensor, static: torch.Tensor, place: int) -> View | None:
        """Return the view for a result; None if an argument may have no such view."""
        if type(leaf) is not torch.Tensor or type(static) not in (torch.Tensor, torch.nn.Parameter):
            return None
        if leaf.is_conj() or leaf.is_neg():
            return None
        whole = static.detach()
        if leaf.dtype is not static.dtype:
            try:
                whole = whole.view(leaf.dtype)
            except RuntimeError:
                return None
        if leaf.numel() == 0:
            return cls(leaf, static, place, 0)
        offset = int(leaf.storage_offset() - whole.storage_offset())
        if offset < 0 or offset + _reach(leaf) > _reach(whole):
            return None
        return cls(leaf, static, place, offset)

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make the view of an argument; a copy if the argument's layout differs from its copy's."""
        is_alike = tensor.shape == self._shape and _same_strides(tensor, self._strides)
        if is_alike and not tensor.is_conj() and not tensor.is_neg():
            with suppress(RuntimeError):  # the argument may be misaligned for the dtype
                whole = tensor.detach() if tensor.requires_grad else tensor
                whole = whole if self._dtype is None else whole.view(self._dtype)
                return whole.as_strided(*self._form, whole.storage_offset() + self._offset)
        return self._leaf.detach().clone()


def _reach(tensor: torch.Tensor) -> int:
    """Return the distance of the last element from the first one."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return sum((size - 1) * stride for size, stride in pairs)


def _same_strides(tensor: torch.Tensor, strides: Sequence[int]) -> bool:
    now = tensor.stride()
    if now == strides:
        return True
    parts = zip(tensor.shape, now, strides, strict=True)
    return all(one == other for size, one, other in parts if size > 1)


def _kind(
    leaf: Any,
    statics: Sequence[torch.Tensor],
    copies: set[int],
    is_made: Callable[[torch.Tensor], bool],
) -> str:
    if not isinstance(leaf, torch.Tensor):
        return "constant"
    if any(leaf is static for static in statics):
        return "argument"
    memory = _torch.memory_of(leaf)
    assert memory is not None
    if _torch.storage_id(memory) in copies:
        return "input"
    return "own" if is_made(leaf) else "constant"


def _copied(leaf: torch.Tensor, copies: dict[int, torch.Tensor]) -> torch.Tensor:
    """Copy a tensor; the copies of tensors that share memory share memory, too.

    Args:
        leaf: The tensor.
        copies: The copies of whole storages, by the storages' numbers.
    """
    if leaf.is_conj() or leaf.is_neg():
        return leaf.detach().clone()
    with torch.no_grad(), suppress(RuntimeError):
        memory = leaf.untyped_storage()
        number = _torch.storage_id(memory)
        if number not in copies and leaf.numel() * leaf.element_size() == memory.nbytes():
            copy = leaf.clone()
            copies[number] = copy
            return copy
        if number in copies and copies[number].nbytes == memory.nbytes():
            whole = copies[number].untyped_storage()
            view = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
            view.set_(whole, leaf.storage_offset(), leaf.shape, leaf.stride())
            return _torch.with_version_of(copies[number], view)
    return leaf.detach().clone()
