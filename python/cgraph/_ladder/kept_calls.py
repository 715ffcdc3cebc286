"""Captures in words that another process can compare, and what a file keeps of their calls."""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import torch

from cgraph import _torch
from cgraph._callables.sample import Sample
from cgraph._ladder.rung import Rung
from cgraph._python.values import is_plain
from cgraph._saved.notes import CallNote, Leaf, Notes
from cgraph._saved.reads import Reads, Word, arguments_in_words, difference
from cgraph._saved.saving import NamedMemory
from cgraph._torch import tree_flatten
from cgraph.errors import ArgumentError

__all__ = ["KeptCall", "KeptCalls"]


class KeptCall(NamedTuple):
    """The capture of a key in words.

    Attributes:
        key: The key.
        reads: What its function reads.
        number: The number of these reads among those of other functions.
        arguments: Its arguments in words, torch's settings, and the ladder's.
        sample: Its arguments.
    """

    key: Hashable
    reads: Reads
    number: int
    arguments: list[Word]
    sample: Sample

    def read_tensors(self, number: int) -> dict[str, torch.Tensor]:
        """Return the tensors that its function reads, by names that differ between functions.

        Args:
            number: The number of the function in the file.
        """
        also = f" of function {number}" if number else ""
        return {f"{name}{also}": one for name, one in self.reads.tensors.items()}

    def given_tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors among its arguments, by names that differ between keys."""
        return {f"{self.key!r}: {name}": one for name, one in self.sample.named_tensors()}

    def difference(self, note: CallNote, notes: Notes) -> str | None:
        """Return the first difference from the calls that a file knows, in words."""
        before = [*notes.reads[note.reads], *note.arguments]
        return difference([*self.reads.words, *self.arguments], before)

    def note(self, rung: Rung, named: NamedMemory) -> CallNote:
        """Describe the calls of its rung, given the memory that has names.

        Raises:
            ArgumentError: Its result has something that a file cannot have.
        """
        leaves, spec = tree_flatten(rung.result)
        names = _torch.names_in("result", rung.result)
        noted = [_leaf_of(name, one, named) for name, one in zip(names, leaves, strict=True)]
        return CallNote(self.number, self.arguments, noted, _torch.tree_dumps(spec), rung.fresh)


class KeptCalls:
    """The captures of one block.

    Args:
        describe: Returns what a function reads.
    """

    def __init__(self, describe: Callable[[Callable[..., Any]], Reads]) -> None:
        self._describe = describe
        # Functions stay, so that no other has their ``id``.
        self._known: dict[tuple[int, ...], tuple[Any, Reads]] = {}
        self._reads: list[Reads] = []

    def of(
        self,
        key: Hashable,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        also: Mapping[str, str],
    ) -> KeptCall:
        """Describe a capture.

        Args:
            key: The key.
            fn: The function.
            args: Its arguments.
            also: Other settings in words, by their names.

        Raises:
            ArgumentError: It cannot be compared in another process.
        """
        if not is_plain(key):
            raise ArgumentError(f"its key is a {type(key).__name__}, expected a plain value")
        reads = self._reads_of(fn)
        number = next(place for place, one in enumerate(self._reads) if one is reads)
        settings = {**_torch.settings_in_words(), **also}
        words = arguments_in_words(args) + [(name, one, -1) for name, one in settings.items()]
        return KeptCall(key, reads, number, words, Sample(args, {}))

    def change(self, fn: Callable[..., Any], reads: Reads) -> str | None:
        """Return what a function reads otherwise than before, in words; None if nothing."""
        return None if reads.holds() else difference(self._reads_of(fn).words, reads.words)

    def clear(self) -> None:
        """Forget the functions, and the tensors that they read."""
        self._known.clear()
        self._reads.clear()

    def reads(self) -> list[Reads]:
        """Return what the functions read, by their numbers."""
        return list(self._reads)

    def _reads_of(self, fn: Callable[..., Any]) -> Reads:
        """Return what a function reads now: one object for all that read the same."""
        number: tuple[int, ...] = (id(fn),)
        if isinstance(fn, types.MethodType):
            number = id(fn.__self__), id(fn.__func__)
        known = self._known.get(number)
        if known is not None and known[1].holds():
            return known[1]
        try:
            found = self._describe(fn)
        except ArgumentError:
            raise
        except Exception as error:  # objects of users may raise whatever they like
            why = f"the values that it reads cannot be told: {error!r:.200}"
            raise ArgumentError(why) from error
        reads = next((one for one in self._reads if one is found or one.is_like(found)), None)
        if reads is None:
            self._reads.append(found)
        elif not reads.holds():
            # The same words, and other objects.
            self._reads[self._reads.index(reads)] = found
            reads = found
        self._known[number] = fn, reads or found
        return reads or found


def _leaf_of(name: str, leaf: Any, named: NamedMemory) -> Leaf:
    if not isinstance(leaf, torch.Tensor):
        if type(leaf) not in (type(None), bool, int, float, str):
            raise ArgumentError(f"{name} is a {type(leaf).__name__}, expected a tensor or a number")
        return Leaf(None, leaf)
    if type(leaf) is not torch.Tensor or leaf.layout is not torch.strided:
        raise ArgumentError(f"{name} is a {type(leaf).__name__}, expected a plain tensor")
    if leaf.is_conj() or leaf.is_neg() or leaf.is_quantized:
        raise ArgumentError(f"{name} is a conjugate, a negative or a quantized view")
    if (note := named.note_there(leaf)) is None:
        raise ArgumentError(f"{name} lies in memory without a name")
    return Leaf(note)
