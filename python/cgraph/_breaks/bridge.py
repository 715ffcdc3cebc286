"""The results of a break, in memory that the segments after it can read at each replay."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from cgraph import _torch
from cgraph._captures.pool_blocks import PoolBlocks
from cgraph._python.values import is_array, is_same, tensors_behind
from cgraph._torch import tree_flatten, tree_unflatten
from cgraph.errors import CaptureError

__all__ = ["Bridge"]


class Bridge:
    """A holder of the first result of a break, which copies later results into it.

    Args:
        name: The break, for errors.
        device_type: Type of device of the tensors that segments can read anew at each replay.
        blocks: The pool's blocks: results lie in new ones, which are free once nobody of the
            capture needs them. None: results have memory of their own.

    The tensors that stand for its results have no history: gradients get back by that of the break
        itself.
    """

    def __init__(self, name: str, device_type: str, blocks: PoolBlocks | None = None) -> None:
        self._blocks = blocks
        self._name = name
        self._device_type = device_type
        self._leaves: list[_Constant | _Kept] = []
        self._spec: Any = None
        self._is_single = False

    def first(self, call: Callable[[], Any]) -> Any:
        """Call the break for the first time; return the result for the code after it."""
        results, self._spec = tree_flatten(call())
        self._is_single = self._spec.is_leaf()
        storages = [_storage(r) if _is_tensor(r) else None for r in results]
        watched: list[tuple[_Kept, _torch.WeakStorage]] = []
        for place, storage in enumerate(storages):
            made, results[place] = self._leaf(results[place], storage)
            self._leaves.append(made)
            if isinstance(made, _Kept):
                made.is_shared = storages.count(storage) > 1
                watched.append((made, made.first))
        for kept, first in watched:
            # Only here everything that the break itself made is gone; a history holds it as well.
            has_others = not kept.has_history and first.get() is not None
            kept.is_shared = kept.is_shared or has_others
            del kept.first
        return tree_unflatten(results, self._spec)

    def later(self, result: Any) -> None:
        """Put the result of a later call in place of the first one.

        Raises:
            CaptureError: It does not fit there.
        """
        if self._is_single and type(result) not in (tuple, list, dict):
            expected = self._leaves[0].put(result)
            if expected is not None:
                raise self._error(_brief(result), expected)
            return
        results, spec = tree_flatten(result)
        if spec != self._spec:
            raise self._error(f"the structure {_line(spec)}", _line(self._spec))
        for value, leaf in zip(results, self._leaves, strict=True):
            expected = leaf.put(value)
            if expected is not None:
                raise self._error(_brief(value), expected)

    @property
    def bytes(self) -> int:
        """Bytes of memory that results are copied into."""
        return sum(leaf.tensor.nbytes for leaf in self._leaves if isinstance(leaf, _Kept))

    @property
    def has_history(self) -> bool:
        """True if a first result requires a gradient."""
        return any(isinstance(leaf, _Kept) and leaf.has_history for leaf in self._leaves)

    @property
    def is_none(self) -> bool:
        """True if the first result was None."""
        single = self._leaves[0] if self._is_single else None
        return isinstance(single, _Constant) and single.put(None) is None

    def check(self) -> None:
        """Raise if the following code has written to a result that others hold, too.

        It has written to a copy: in eager, theirs would have changed.
        """
        for leaf in self._leaves:
            if isinstance(leaf, _Kept) and leaf.is_shared and leaf.is_written():
                raise CaptureError(
                    f"{self._name} has returned a tensor that others also hold, as an argument,"
                    " or two of the same memory, and the code after it has written to it in place:"
                    " a break's result is copied. Return a clone(), or write to it in the break"
                )

    def _leaf(self, value: Any, storage: int | None) -> tuple[_Constant | _Kept, Any]:
        """Return how later values get into the place of one leaf, and what stands there."""
        if not _is_tensor(value) or value.device.type != self._device_type:
            if _is_tensor(value) and value.requires_grad:
                raise CaptureError(
                    f"{self._name} has returned {_brief(value)}, which requires a gradient and is a"
                    " constant of what follows: detach it, or move it to the device"
                )
            if any(True for _ in tensors_behind(value)):
                raise CaptureError(
                    f"{self._name} has returned a {type(value).__qualname__}, whose tensors pytree"
                    " does not know: return tensors, or tuples, lists or dictionaries of them"
                )
            return _Constant(value), value
        if storage is None or value.layout is not torch.strided:
            raise CaptureError(
                f"{self._name} has returned {_brief(value)} of type {type(value).__qualname__} and"
                f" layout {value.layout}, which cannot be copied into at each replay: return"
                " strided tensors"
            )
        # The copy is not the user's work, whose modes must not see it.
        with _torch.without_modes():
            kept = _Kept(value, self._blocks)
        stands = kept.stands
        del kept.stands
        return kept, stands

    def _error(self, found: str, expected: str) -> CaptureError:
        return CaptureError(
            f"{self._name} has returned {found} in a replay, expected {expected} as in the capture:"
            " the segments after the break were captured with that. Let the break return tensors"
            " of fixed shape instead of changing ones, or capture again; a graphed function does so"
            " after reset()"
        )


class _Constant:
    """A value that must stay equal."""

    def __init__(self, value: Any) -> None:
        # Values that can be changed in place are kept as they are now.
        can_change = is_array(value) or isinstance(value, set)
        self._value = (
            value.clone() if _is_tensor(value) else copy.copy(value) if can_change else value
        )

    def put(self, value: Any) -> str | None:
        """Return the expected value, as text, if the value differs."""
        constant = self._value
        if _is_tensor(constant):
            is_equal = _equal(value, constant)
        elif is_array(constant):
            is_equal = is_array(value) and np.array_equal(value, constant)
        else:
            is_equal = is_same(value, constant)
        return None if is_equal else _brief(constant)


class _Kept:
    """A tensor that later results are copied into.

    Attributes:
        tensor: The tensor. In a pool it does not own its block.
        stands: The tensor for the code after the break.
        first: The memory of the first result.
        has_history: True if the first result has a history, which holds it as well.
        is_shared: True if others hold the first result, so that writing to the copy differs.
    """

    def __init__(self, first: torch.Tensor, blocks: PoolBlocks | None) -> None:
        self.first = _torch.WeakStorage(first)
        self.has_history = first.requires_grad
        value = first.detach() if first.requires_grad else first
        new = None if blocks is None or self.has_history else blocks.new_like(value)
        if blocks is None or new is None:
            self.stands = value.clone()
            self.tensor = self.stands.detach()
        else:
            self.stands = new.copy_(value)
            self.tensor = blocks.without_blocks(new)
        # Autograd holds results as well; other holders cannot be told apart then.
        is_known = not (first.is_inference() or self.stands.is_inference())
        self._written = _torch.sharing_version(self.stands) if is_known else None
        self._version = 0 if self._written is None else self._written._version
        self.is_shared = False

    def put(self, value: Any) -> str | None:
        """Copy the value into the memory; return the expected one, as text, if it does not fit."""
        own = self.tensor
        if not _is_tensor(value) or _type(value) != _type(own):
            return _brief(own)
        if value.requires_grad and not self.has_history:
            return f"{_brief(own)} that requires no gradient"
        if value.data_ptr() != own.data_ptr() or value.stride() != own.stride():
            own.copy_(value.detach())
        return None

    def is_written(self) -> bool:
        """True if an operator has written to the memory."""
        return self._written is not None and self._written._version > self._version


def _storage(tensor: torch.Tensor) -> int | None:
    memory = _torch.memory_of(tensor)
    return None if memory is None else _torch.storage_id(memory)


def _type(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _equal(value: Any, constant: Any) -> bool:
    if not _is_tensor(value) or _type(value) != _type(constant):
        return False
    try:
        return torch.equal(value, constant)
    except Exception:  # a kind of tensor that cannot be compared is equal only to itself
        return False


def _line(spec: Any) -> str:
    """Return the structure of a result in one line."""
    return " ".join(str(spec).split())


def _brief(value: Any) -> str:
    if not _is_tensor(value):
        return f"{value!r:.80}"
    name = str(value.dtype).removeprefix("torch.")
    return f"a {name} tensor of shape {tuple(value.shape)} on {value.device}"
