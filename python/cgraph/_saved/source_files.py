"""The source files of a function's code, and of the user's modules that its modules use."""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import types
from collections.abc import Iterator, Mapping

from cgraph._python.libraries import is_library_module
from cgraph._python.places import Places

__all__ = ["files_of", "other_file"]


def files_of(walk: Places) -> dict[str, str]:
    """Return digests of the files of the code that a walk has reached, by their paths.

    With those of the modules that these name, and so on: a change of any of them may matter.
    Packages that are installed are left out; their code is compared as far as it is reached.
    """
    waiting = [scope.get("__name__") for scope in walk.codes.values()]
    waiting += [type(one.value).__module__ for one in walk.found]
    found: dict[str, str] = {}
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        module = sys.modules.get(name) if isinstance(name, str) else None
        if not isinstance(module, types.ModuleType) or name in seen:
            continue
        seen.add(str(name))
        path = vars(module).get("__file__")
        if is_library_module(module) or not isinstance(path, str) or "site-packages" in path:
            continue
        found[os.path.abspath(path)] = _digest_of(os.path.abspath(path))
        waiting += _named_modules(module)
    return found


def other_file(files: Mapping[str, str]) -> str | None:
    """Return the first file whose digest is another one now; None if there is none."""
    return next((path for path, one in files.items() if _digest_of(path) != one), None)


def _named_modules(module: types.ModuleType) -> Iterator[str]:
    """Yield the names of the modules that a module has, or has something of."""
    for one in [*vars(module).values()]:
        if isinstance(one, types.ModuleType):
            yield one.__name__
        elif isinstance(one, types.FunctionType | type):
            yield one.__module__


def _digest_of(path: str) -> str:
    try:
        found = os.stat(path)
    except OSError:
        return "none"
    return _digest_at(path, found.st_mtime_ns, found.st_size)


@functools.lru_cache(maxsize=4096)
def _digest_at(path: str, _: int, __: int) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()[:16]
    except OSError:
        return "none"
