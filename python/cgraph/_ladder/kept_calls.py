"""Captures in words that another process can compare, and what a file keeps of their calls."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

from cgraph import _torch
from cgraph._callables.sample import Sample
from cgraph._ladder.rung import Rung
from cgraph._python.values import is_plain
from cgraph._saved.notes import CallNote, Leaf, Notes
from cgraph._saved.reads import Reads, arguments_in_words, difference
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
        arguments: Its arguments in words, and torch's settings.
        sample: Its arguments.
    """

    key: Hashable
    reads: Reads
    number: int
    arguments: dict[str, str]
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
        before = {**notes.reads[note.reads], **note.arguments}
        return difference({**self.reads.words, **self.arguments}, before)

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
        # Functions of many keys are often the same. They stay, so that no other has their ``id``.
        self._known: dict[int, tuple[Any, Reads]] = {}
        self._reads: list[Reads] = []

    def of(self, key: Hashable, fn: Callable[..., Any], args: tuple[Any, ...]) -> KeptCall:
        """Describe a capture.

        Raises:
            ArgumentError: It cannot be compared in another process.
        """
        if not is_plain(key):
            raise ArgumentError(f"its key is a {type(key).__name__}, expected a plain value")
        known = self._known.get(id(fn))
        if known is None:
            known = self._known[id(fn)] = fn, self._described(fn)
        reads = known[1]
        number = next((place for place, one in enumerate(self._reads) if one is reads), None)
        if number is None:
            number = len(self._reads)
            self._reads.append(reads)
        words = arguments_in_words(args) | _torch.settings_in_words()
        return KeptCall(key, reads, number, words, Sample(args, {}))

    def _described(self, fn: Callable[..., Any]) -> Reads:
        try:
            return self._describe(fn)
        except ArgumentError:
            raise
        except Exception as error:  # objects of users may raise whatever they like when looked at
            raise ArgumentError(
                f"the values that it reads cannot be told: {error!r:.200}"
            ) from error

    def clear(self) -> None:
        """Forget the functions, and the tensors that they read."""
        self._known.clear()
        self._reads.clear()

    def reads(self) -> list[dict[str, str]]:
        """Return what the functions read, in words, by their numbers."""
        return [one.words for one in self._reads]


def _leaf_of(name: str, leaf: Any, named: NamedMemory) -> Leaf:
    if not isinstance(leaf, torch.Tensor):
        if type(leaf) not in (type(None), bool, int, float, str):
            raise ArgumentError(f"{name} is a {type(leaf).__name__}, expected a tensor or a number")
        return Leaf(None, leaf)
    if type(leaf) is not torch.Tensor or leaf.layout is not torch.strided:
        raise ArgumentError(f"{name} is a {type(leaf).__name__}, expected a plain tensor")
    if (note := named.note_there(leaf)) is None:
        raise ArgumentError(f"{name} lies in memory without a name")
    return Leaf(note)
