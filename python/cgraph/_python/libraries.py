"""Code of libraries, whose own state nobody changes between calls."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import sysconfig
import types
import weakref
from contextlib import suppress

import torch

__all__ = ["is_library", "is_library_class", "is_library_module"]

_PATHS = {name: sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
_STANDARD = tuple(os.path.join(path, "") for path in {*_PATHS.values()} if path)
_SITE = (os.path.join("site-packages", ""), os.path.join("dist-packages", ""))


def _triton() -> list[str]:
    """Return the folders of Triton, which counts as part of torch, without importing it."""
    with suppress(ValueError, ImportError):  # another module is in its place
        spec = importlib.util.find_spec("triton")
        return [*(getattr(spec, "submodule_search_locations", None) or ())]
    return []


_OF_TORCH = tuple(
    os.path.join(path, "")
    for path in (
        os.path.dirname(torch.__file__),
        os.path.dirname(os.path.dirname(__file__)),
        *_triton(),
    )
)


@functools.cache
def is_library(file: str) -> bool:
    """Return whether a file belongs to torch, Triton, cgraph or Python's own library."""
    if file.startswith(("<frozen ", "<eval_with_key>", "<built-in", *_OF_TORCH)):
        return True
    return file.startswith(_STANDARD) and not any(part in file for part in _SITE)


_classes: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


def is_library_class(kind: type) -> bool:
    """Return whether a class belongs to a library."""
    known = _classes.get(kind)
    if known is None:
        name = str(getattr(kind, "__module__", None) or "")
        module = sys.modules.get(name)
        # The base of classes that C++ extensions define belongs to no module.
        is_base = name.startswith("pybind11_")
        known = _classes[kind] = is_base or (module is not None and is_library_module(module))
    return known


def is_library_module(module: types.ModuleType) -> bool:
    """Return whether a module belongs to a library."""
    name = vars(module).get("__name__")
    if name == "__main__":
        return False
    file = vars(module).get("__file__")
    if not isinstance(file, str):
        # A module that was made by hand has no spec.
        return vars(module).get("__spec__") is not None
    return is_library(file) or str(name).partition(".")[0] == "numpy"
