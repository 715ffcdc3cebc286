"""Values in Python that a function reads, in words that another process can compare.

The names in its code, and in the code that it reaches, say where to look; nothing runs. The walk
is the same in each process, so that the words of all places, one after the other, tell whether a
function is the same: also which objects are one, and which value belongs to which place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch

from cgraph import _torch
from cgraph._python.guards import Guards
from cgraph._python.named_objects import named_by
from cgraph._python.places import Places
from cgraph._python.values import is_plain
from cgraph._saved.source_files import files_of
from cgraph._saved.words import code_in_words, in_words, shares_nothing
from cgraph._torch import tree_flatten
from cgraph.errors import ArgumentError

__all__ = ["Reads", "Word", "arguments_in_words", "difference", "reads_of"]

_HOOK = re.compile(r"(_hooks)\[\d+\]")

Word = tuple[str, str, int]
"""The name of a place, its value in words, and the number of the place that it is found in."""


@dataclass(frozen=True, eq=False)
class Reads:
    """The values that a function reads.

    Attributes:
        words: The places in the order of the walk.
        tensors: The tensors on the GPU, by the names of their places.
        files: Digests of the source files of the code, by their paths.
        holds: Returns whether all places still have the same values.
    """

    words: Sequence[Word]
    tensors: dict[str, torch.Tensor]
    files: dict[str, str]
    holds: Callable[[], bool] = lambda: True

    def is_like(self, other: Reads) -> bool:
        """Return whether another function reads the same, from the very same tensors."""
        if self.words != other.words or self.tensors.keys() != other.tensors.keys():
            return False
        return all(one is other.tensors[name] for name, one in self.tensors.items())


def reads_of(function: Callable[..., Any]) -> Reads:
    """Return what a function reads, with the present values.

    Raises:
        ArgumentError: It has no code, too much is read, or a value whose contents cannot be
            compared, as an array.
    """
    walk = named_by(function, callees=True, settings=True)
    if not (walk.codes or walk.modules):
        raise ArgumentError(f"{function!r:.80} has no code in Python to compare")
    if walk.refused is not None:
        raise ArgumentError(f"{walk.refused} is an array, whose contents are not compared")
    if walk.stopped is not None:
        raise ArgumentError(f"it reads too many places: {walk.stopped} is beyond the limit")
    codes = [(f"the code of {one.co_name}", code_in_words(one), -1) for one in walk.codes]
    hooks = [("a global hook", in_words("a hook", one), -1) for one in _torch.global_hooks()]
    whole = ("the function", in_words("it", function), -1)
    words, tensors = _words_and_tensors(walk)
    # From here on the walk tells what to compare, and no values.
    return Reads([*codes, whole, *hooks, *words], tensors, files_of(walk), _holds(walk))


def arguments_in_words(args: tuple[Any, ...]) -> list[Word]:
    """Return the leaves of arguments in words.

    Raises:
        ArgumentError: One is neither a tensor nor a plain value.
    """
    found: list[Word] = [("the arguments", str(tree_flatten(args)[1]), -1)]
    for name, leaf in zip(_torch.names_in("args", args), tree_flatten(args)[0], strict=True):
        if not isinstance(leaf, torch.Tensor) and not is_plain(leaf):
            raise ArgumentError(
                f"argument {name} is a {type(leaf).__name__}, expected a tensor or a plain value"
            )
        found.append((f"argument {name}", in_words(name, leaf), -1))
    return found


def difference(now: Sequence[Sequence[Any]], saved: Sequence[Sequence[Any]]) -> str | None:
    """Return the first difference between what is read now and what was, in words."""
    nothing = ("nothing", "", -1)
    for one, other in zip_longest(now, saved, fillvalue=nothing):
        if (*one,) == (*other,):
            continue
        if one[0] == other[0]:
            return f"{one[0]} is {one[1]:.120}, and was {other[1]:.120}"
        return f"{one[0]} ({one[1]:.80}) is read, where {other[0]} ({other[1]:.80}) was"
    return None


def _words_and_tensors(walk: Places) -> tuple[list[Word], dict[str, torch.Tensor]]:
    words: list[Word] = []
    tensors: dict[str, torch.Tensor] = {}
    first: dict[int, int] = {}
    for number, place in enumerate(walk.found):
        # The keys of hooks are numbers in the order in which the process has made them.
        value, name = place.value, _HOOK.sub(r"\1[]", place.name)
        if name == "globals" or place.step[0] == "grad":
            continue
        known = None if shares_nothing(value) else first.setdefault(id(value), number)
        if known is not None and known != number:
            other = _HOOK.sub(r"\1[]", walk.found[known].name)
            words.append((name, f"the same as {other} at {known}", place.parent))
            continue
        words.append((name, in_words(name, value), place.parent))
        if _is_named(value):
            while name in tensors:
                name += "'"
            tensors[name] = value
    return words, tensors


def _is_named(value: Any) -> bool:
    is_on_gpu = isinstance(value, torch.Tensor) and value.is_cuda
    return is_on_gpu and value.layout is torch.strided and _torch.memory_of(value) is not None


def _holds(walk: Places) -> Callable[[], bool]:
    """Return what compares all places with their present values."""
    values = [one.value for one in walk.found if isinstance(one.value, torch.Tensor)]
    on_host = [one for one in values if one.device.type == "cpu"]
    guards = Guards(walk.settle(lambda *_: True))
    # Their contents count, and a tensor of inference mode does not tell of writes.
    can_tell = not any(one.is_inference() for one in on_host)
    versions = [one._version for one in on_host] if can_tell else []

    def holds() -> bool:
        return can_tell and guards.fit(()) and versions == [one._version for one in on_host]

    return holds
