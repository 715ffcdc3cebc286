"""The surroundings of a graphed callable that must be at a call as they were at the capture."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch

from cgraph import _core, _torch
from cgraph.errors import CallableError, StateError

__all__ = ["Conditions"]


class Conditions:
    """The conditions under which the calls of one graphed callable are replays.

    Args:
        name: The name of the callable.
        function: The callable.
        device_type: The type of device that it was captured on.
    """

    def __init__(self, name: str, function: Any, device_type: str) -> None:
        self._name = name
        self._device_type = device_type
        self._autocast = self._autocast_now()
        self._own = _OwnState(name, function) if isinstance(function, torch.nn.Module) else None

    def require(self, module: torch.nn.Module | None) -> None:
        """Refuse a call under other conditions.

        Raises:
            CallableError: A transform would not see the operators, or autocast differs.
            StateError: Something of the module was replaced.
        """
        if _torch.is_transformed():
            raise CallableError(
                f"{self._name} was called inside a transform of torch.func (grad, vmap, jvp, ...),"
                " which does not see the operators of a graph: call the function that it was made"
                " of, or graph the whole transformed function"
            )
        autocast = self._autocast_now()
        if autocast != self._autocast:
            raise CallableError(
                f"{self._name} was captured {_in_words(self._autocast)} and is called"
                f" {_in_words(autocast)}: its results would have another dtype than in eager. Call"
                " it as it was captured, or capture it under the autocast of the call"
            )
        if self._own is not None and module is not None:
            self._own.require(module)

    def require_unchanged(self, function: Any) -> None:
        """Refuse a module whose forward has replaced something of it.

        Raises:
            CallableError: It has, and replays would overwrite what it has put there.
        """
        changed = None if self._own is None else self._own.changed(function)
        if changed is not None:
            raise CallableError(
                f"the forward of {self._name} replaces {changed}, which then lies in memory that"
                " replays overwrite: change it in place, as self.count.add_(1) or"
                " self.state.copy_(new)"
            )

    def _autocast_now(self) -> torch.dtype | None:
        """Return the dtype of autocast; None if it is off."""
        if torch.is_autocast_enabled(self._device_type):
            return torch.get_autocast_dtype(self._device_type)
        return None


class _OwnState:
    """The submodules, parameters and buffers of a module, as they were at one moment.

    It keeps no reference to the module itself, whose forward refers to this.

    Args:
        name: The name of the callable.
        module: The module.
    """

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        self._name = name
        self._parts = {path: weakref.ref(part) for path, part in module.named_modules() if path}
        self._tensors = {path: _place(one) for path, one in _tensors_of(module)}
        self._guards = _core.Guards(list(_guarded(module)), _torch.tensor_reader())

    def require(self, module: torch.nn.Module) -> None:
        """Refuse a module in which something was replaced.

        Raises:
            StateError: A graph would read the memory of what was there before.
        """
        if self._guards.fits([module]):
            return
        changed = self.changed(module)
        if changed is not None:
            raise StateError(
                f"{changed} of {self._name} was replaced since the capture, and the graph would"
                " read the memory of what was there before: write into it in place (copy_(),"
                " load_state_dict() without assign=True), or graph the module again"
            )

    def changed(self, module: torch.nn.Module) -> str | None:
        """Name the first part, parameter or buffer that was replaced; None if there is none."""
        parts = {path: part for path, part in module.named_modules() if path}
        tensors = dict(_tensors_of(module))
        for path, reference in self._parts.items():
            if parts.get(path) is not reference():
                return f"submodule {path}"
        for path, place in self._tensors.items():
            if path not in tensors or _place(tensors[path]) != place:
                return path
        added = [path for path in (*parts, *tensors) if path not in {*self._parts, *self._tensors}]
        return next(iter(added), None)


def _in_words(autocast: torch.dtype | None) -> str:
    return "without autocast" if autocast is None else f"under autocast to {autocast}"


def _tensors_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    memory = _torch.memory_of(tensor)
    if memory is None:
        return (id(tensor),)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _guarded(module: torch.nn.Module) -> Iterator[tuple[int, tuple[Any, ...], tuple[Any, ...]]]:
    """List the places of a module, the first object of a comparison, for ``_core.Guards``."""
    count = 1
    yield -1, ("object", 0), ("kind", type(module))
    waiting = [(0, module)]
    while waiting:
        parent, part = waiting.pop()
        for kind in ("_modules", "_parameters", "_buffers"):
            entries: dict[str, Any] = getattr(part, kind)
            yield parent, ("attr", kind), ("dict", type(entries), tuple(entries), frozenset())
            holder, count = count, count + 1
            for name, value in entries.items():
                if isinstance(value, torch.Tensor):
                    yield holder, ("item", name), ("tensor", value)
                else:
                    yield holder, ("item", name), ("is", value)
                if isinstance(value, torch.nn.Module):
                    waiting.append((count, value))
                count += 1
