"""A stand-in for a function or a module, with its attributes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from cgraph import _core, _torch

__all__ = ["FunctionProxy"]


class FunctionProxy(_core.Dispatcher):
    """A dispatcher that forwards attributes it does not have to its function or module."""

    _fn: Callable[..., Any]

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute of the module if it has one of that name, such as ``training``."""
        is_public = not name.startswith("_") and not hasattr(type(self), name)
        if is_public and isinstance(self._fn, torch.nn.Module) and hasattr(self._fn, name):
            setattr(self._fn, name, value)
        else:
            object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        """Delete an attribute from where :meth:`__setattr__` would set it."""
        is_own = name.startswith("_") or name in vars(self) or hasattr(type(self), name)
        if not is_own and isinstance(self._fn, torch.nn.Module):
            delattr(self._fn, name)
        else:
            object.__delattr__(self, name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        found = getattr(self._fn, name)
        is_method = name in _torch.OF_ITSELF and getattr(found, "__self__", None) is self._fn
        return functools.partial(self._itself, found) if is_method else found

    def _itself(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a module's method; return this proxy if it returns the module."""
        result = method(*args, **kwargs)
        return self if result is self._fn else result
