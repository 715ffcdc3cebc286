"""Values in Python that a function reads, in words that another process can compare.

The names in its code, and in the code that it reaches, say where to look; nothing runs.
"""

from __future__ import annotations

import enum
import hashlib
import types
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch

from cgraph import _torch
from cgraph._python.libraries import is_library, is_library_class
from cgraph._python.named_objects import named_by
from cgraph._python.steps import keys_of
from cgraph._python.values import ATOMS, is_plain
from cgraph._torch import tree_flatten
from cgraph.errors import ArgumentError

__all__ = ["Reads", "arguments_in_words", "difference", "reads_of"]

_CODE = "the code of "
_MOST_BYTES = 1 << 16
"""Of a tensor on the host whose contents are compared."""


@dataclass(frozen=True)
class Reads:
    """The values that a function reads.

    Attributes:
        words: What is at each place, by the place's name; code by the name of the function.
        tensors: The tensors on the GPU, by the names of their places.
    """

    words: dict[str, str]
    tensors: dict[str, torch.Tensor]


def reads_of(function: Callable[..., Any]) -> Reads:
    """Return what a function reads, with the present values.

    Raises:
        ArgumentError: It has no code, too much is read, or an array, whose contents nothing
            compares.
    """
    walk = named_by(function, callees=True, settings=True)
    if not (walk.codes or walk.modules):
        raise ArgumentError(f"{function!r:.80} has no code in Python to compare")
    if walk.stopped is not None or walk.refused is not None:
        raise ArgumentError(
            f"{walk.refused} is an array, whose contents are not compared"
            if walk.stopped is None
            else f"it reads too many places: {walk.stopped} is beyond the limit"
        )
    words: dict[str, set[str]] = {}
    tensors: dict[str, torch.Tensor] = {}
    several: set[str] = set()
    for code in walk.codes:
        words.setdefault(f"{_CODE}{code.co_name}", set()).add(_digest(code))
    for place in walk.found:
        if place.name == "globals" or place.step[0] == "grad" or _is_of_library(place.value):
            continue
        words.setdefault(place.name, set()).add(_in_words(place.value))
        one = place.value
        if isinstance(one, torch.Tensor) and one.is_cuda and _torch.memory_of(one) is not None:
            if tensors.setdefault(place.name, one) is not one:
                several.add(place.name)
    found = {name: " or ".join(sorted(one)) for name, one in sorted(words.items())}
    # A name of several tensors is the name of none.
    return Reads(found, {name: one for name, one in tensors.items() if name not in several})


def arguments_in_words(args: tuple[Any, ...]) -> dict[str, str]:
    """Return the leaves of arguments in words, by their names.

    Raises:
        ArgumentError: One is neither a tensor nor a plain value.
    """
    found = {"the arguments": str(tree_flatten(args)[1])}
    for name, leaf in zip(_torch.names_in("args", args), tree_flatten(args)[0], strict=True):
        if not isinstance(leaf, torch.Tensor) and not is_plain(leaf):
            raise ArgumentError(
                f"argument {name} is a {type(leaf).__name__}, expected a tensor or a plain value"
            )
        found[f"argument {name}"] = _in_words(leaf)
    return found


def difference(now: dict[str, str], saved: dict[str, str]) -> str | None:
    """Return the most telling difference between what is read now and what was, in words."""
    known = [*now.keys() & saved.keys()]
    changed = sorted(name for name in known if now[name] != saved[name])
    if changed:
        name = next((one for one in changed if one.startswith(_CODE)), changed[0])
        return f"{name} is {now[name]:.80}, and was {saved[name]:.80}"
    for name in sorted(now.keys() ^ saved.keys()):
        is_new = name in now
        return f"{name} is {now[name]:.80}, and was not there" if is_new else f"{name} is gone"
    return None


def _is_of_library(value: Any) -> bool:
    """Return whether a value is a library's, whose version tells what it is."""
    if isinstance(value, types.FunctionType):
        return is_library(value.__code__.co_filename)
    if isinstance(value, type):
        return is_library_class(value)
    return isinstance(value, types.ModuleType | types.BuiltinFunctionType)


def _in_words(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _form_of(value)
    if is_plain(value):
        return _plain_in_words(value)
    if isinstance(value, types.FunctionType):
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).items()]
        plain = [_in_words(one) if is_plain(one) else type(one).__name__ for one in defaults]
        return f"{value.__module__}.{value.__qualname__} with defaults {plain}"
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__} {_methods(value)}"
    if isinstance(value, dict):
        keys = [_in_words(one) if is_plain(one) else type(one).__name__ for one in keys_of(value)]
        return f"{type(value).__name__} of {keys}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__} of {sorted(map(_plain_in_words, value))}"
    if type(value).__module__.startswith("triton."):
        return _kernel_in_words(value)
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    return f"{type(value).__module__}.{type(value).__qualname__} {name or ''}"


def _plain_in_words(value: Any) -> str:
    """Describe a plain value: another text for another type, and the same in each process."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if type(value) is frozenset:
        return f"frozenset of {sorted(map(_plain_in_words, value))}"
    if isinstance(value, tuple):
        items = ", ".join(map(_plain_in_words, tuple.__iter__(value)))
        return f"{type(value).__name__} ({items})"
    return repr(value) if type(value) in ATOMS else f"{type(value).__name__} {value!r}"


def _kernel_in_words(value: Any) -> str:
    """Describe a kernel of Triton's, maybe with what tunes it around it."""
    if (inner := getattr(value, "fn", None)) is None:
        return type(value).__qualname__
    # The digest of its source, and of what that calls.
    key = getattr(value, "cache_key", None)
    return f"{type(value).__qualname__} {key if isinstance(key, str) else _in_words(inner)}"


def _form_of(tensor: torch.Tensor) -> str:
    if tensor.layout is not torch.strided:
        return f"{type(tensor).__qualname__} {tensor.layout} {tensor.dtype} on {tensor.device}"
    form = (
        f"{type(tensor).__qualname__} {tensor.dtype} {list(tensor.shape)} strides"
        f" {list(tensor.stride())} on {tensor.device}"
    )
    if tensor.device.type != "cpu" or tensor.nbytes > _MOST_BYTES:
        return form
    # A graph has what is read on the host as constants.
    content = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    return f"{form} with {_short(repr(content.view(torch.uint8).tolist()))}"


def _methods(kind: type) -> str:
    """Return a digest of the code in the user's classes among a class and its bases."""
    found = []
    for base in kind.__mro__:
        if is_library_class(base):
            continue
        for name, one in sorted(vars(base).items()):
            one = one.fget if isinstance(one, property) else one
            one = getattr(one, "__func__", one)
            if isinstance(one, types.FunctionType):
                found.append((name, _digest(one.__code__)))
    return _short(repr(found))


def _digest(code: CodeType) -> str:
    """Return a digest of code: of all that it does, and not of where it stands."""

    def parts(one: Any) -> Any:
        if isinstance(one, CodeType):
            names = one.co_names, one.co_varnames, one.co_freevars, one.co_cellvars
            counts = one.co_argcount, one.co_posonlyargcount, one.co_kwonlyargcount, one.co_flags
            return one.co_name, one.co_code.hex(), names, counts, parts(one.co_consts)
        if isinstance(one, tuple):
            return tuple(map(parts, one))
        if isinstance(one, frozenset):
            return sorted(map(repr, map(parts, one)))
        return _plain_in_words(one) if is_plain(one) else type(one).__name__

    return _short(repr(parts(code)))


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
