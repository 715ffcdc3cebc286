"""Whose code and classes are: the user's, a library's, or torch's."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterable

__all__ = ["OF_OBJECTS", "are_of_users", "is_installed", "is_users"]

# Their code and classes are not looked into: there is no end to what they refer to.
_NOT_USERS = frozenset({*sys.stdlib_module_names, "torch", "cgraph"}) - {"__main__"}

OF_OBJECTS = (
    *(staticmethod, classmethod, types.FunctionType),
    *(property, functools.cached_property, functools.partialmethod),
    *(functools.singledispatchmethod, functools._lru_cache_wrapper),
)
"""What classes have that objects have as methods or properties."""


def is_users(module: object) -> bool:
    """Whether a module's name is that of one of the user's."""
    return isinstance(module, str) and module.partition(".")[0] not in _NOT_USERS


@functools.lru_cache(maxsize=4096)
def is_installed(module: object) -> bool:
    """Whether a module, by its name, is of a library, and none that its user may be writing.

    Hundreds of its constants may be named, which nobody changes.
    """
    if not isinstance(module, str):
        return False
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return not _PLACES.isdisjoint(file.replace("\\", "/").split("/"))


def are_of_users(kind: type, names: Iterable[str]) -> bool:
    """Whether what a class has by these names is the user's, and hands its object to no other.

    What its objects have of their own may have any name.
    """
    bases = kind.__mro__
    own = [one for one in bases if is_users(vars(one).get("__module__"))]
    if any("__getattr__" in vars(one) or "__getattribute__" in vars(one) for one in own):
        return False
    for name in names:
        base = next((one for one in bases if name in vars(one)), None)
        value = None if base is None else vars(base)[name]
        is_plain = isinstance(value, OF_OBJECTS) or not hasattr(type(value), "__get__")
        if base is not None and (base not in own or not is_plain):
            return False
    return True


_PLACES = frozenset({"site-packages", "dist-packages"})
