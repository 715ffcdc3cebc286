"""Results with gradients that a caller may still have when they are about to be overwritten."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType
from typing import Any, NamedTuple

import torch

from cgraph import _torch
from cgraph._recording.held import MANY, Holding, references_of_one
from cgraph._source import user_frame
from cgraph._torch import tree_iter

__all__ = ["Lent"]


class Lent:
    """The results with gradients that a key returned last, as long as a caller has them.

    Those that only autograd has are no concern here: a backward pass through them is refused.

    Args:
        holding: Who is told.

    Attributes:
        holding: The same.
    """

    def __init__(self, holding: Holding) -> None:
        self.holding = holding
        self._last: list[tuple[int, _torch.TensorWeakRef]] = []
        # What the results lie in, by their places, each with its number.
        self._memories: dict[int, tuple[int, _Memory]] = {}
        self._site: tuple[CodeType, int] | None = None

    def release(self, arguments: object) -> None:
        """Tell of each result that is still held, before a replay overwrites it.

        Args:
            arguments: Those of the call: what is among them is copied first.
        """
        leaves = [one for one in tree_iter(arguments) if isinstance(one, torch.Tensor)]
        given = [id(one) for one in leaves]
        # What is seen through arguments is copied first.
        seen = set(map(_number, leaves))
        there = [place for place, reference in self._last if reference() is not None]
        for place, reference in self._last:
            lent = reference()
            if lent is not None and id(lent) not in given:
                of_torch = _torch.references_of_torch(lent)
                count = sys.getrefcount(lent) - references_of_one() - of_torch
                if count > 0:
                    self.holding(None, place, lent, self._site, count)
            del lent
            number, memory = self._memories.get(place, (None, None))
            if memory is None or number in seen:
                continue
            alive = sum(self._memories.get(one, (None,))[0] == number for one in there)
            seen.add(number)
            views = memory.views_beside(alive)
            if views.is_held:
                self.holding({place: views}, place, None, self._site, MANY)
        self._last = []

    def remember(self, result: Any) -> Any:
        """Note a result that is about to be returned, in place of the one before."""
        leaves = enumerate(tree_iter(result))
        tensors = {place: leaf for place, leaf in leaves if isinstance(leaf, torch.Tensor)}
        self._last = [(place, _torch.TensorWeakRef(leaf)) for place, leaf in tensors.items()]
        numbers = {place: _number(leaf) for place, leaf in tensors.items()}
        known = {number: memory for number, memory in self._memories.values()}
        self._memories = {}
        for place, number in numbers.items():
            if number is not None:
                memory = known.setdefault(number, _Memory(tensors[place]))
                memory.note([*numbers.values()].count(number))
                self._memories[place] = number, memory
        frame = user_frame()
        self._site = None if frame is None else (frame.f_code, frame.f_lasti)
        return result


def _number(tensor: torch.Tensor) -> int | None:
    """That of a tensor's storage; None without one."""
    memory = _torch.memory_of(tensor)
    return None if memory is None else _torch.storage_id(memory)


class _Memory:
    """What results lie in, and how many references it has while no caller has one.

    Args:
        tensor: A result.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._count = _torch.references_of_storage(tensor)
        self._at_rest = sys.maxsize
        self._views = 0

    def note(self, results: int) -> None:
        """Note that nobody has more than so many results that lie in it."""
        self._at_rest = min(self._at_rest, self._count() - results)

    def views_beside(self, results: int) -> _Views:
        """The views that callers have, where so many results are alive."""
        views = self._count() - self._at_rest - results
        # One that is kept for once, or is about to go, is no pile.
        most = self._views if self._views > 0 else views
        self._views = views
        return _Views(self._count, self._at_rest + results + most)


class _Views(NamedTuple):
    """Views of results, which are held if they are more than before the last call.

    Those in variables of a loop are as many each time: nobody reads them any more.
    """

    now: Callable[[], int]
    most: int

    @property
    def is_held(self) -> bool:
        """Whether there are more references than these explain."""
        return self.now() > self.most
