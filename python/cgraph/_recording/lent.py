"""Results with gradients that a caller may still have when they are about to be overwritten."""

from __future__ import annotations

import sys
from collections import Counter
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
        # What results lie in, by its number, and that of each result where views are looked for.
        self._memories: dict[int, _Memory] = {}
        self._numbers: dict[int, int] = {}
        self._calls = 0
        self._site: tuple[CodeType, int] | None = None

    def release(self, arguments: object) -> None:
        """Tell of each result that is still held, before a replay overwrites it.

        Args:
            arguments: Those of the call: what is among them is copied first.
        """
        leaves = [one for one in tree_iter(arguments) if isinstance(one, torch.Tensor)]
        given = [id(one) for one in leaves]
        last = self._last if self._numbers else ()
        alive = Counter(self._numbers.get(place) for place, one in last if one() is not None)
        for place, reference in self._last:
            lent = reference()
            if lent is not None and id(lent) not in given:
                of_torch = _torch.references_of_torch(lent)
                count = sys.getrefcount(lent) - references_of_one() - of_torch
                if count > 0:
                    self.holding(None, place, lent, self._site, count)
        self._last = []
        # What is seen through arguments is copied first.
        seen = set(map(_number, leaves)) if self._numbers else set()
        for place, number in self._numbers.items():
            if number in seen:
                continue
            seen.add(number)
            views = self._memories[number].views_beside(alive[number])
            if views.is_held:
                self.holding({place: views}, place, None, self._site, MANY)

    def remember(self, result: Any) -> Any:
        """Note a result that is about to be returned, in place of the one before."""
        leaves = enumerate(tree_iter(result))
        tensors = {place: leaf for place, leaf in leaves if isinstance(leaf, torch.Tensor)}
        self._last = [(place, _torch.TensorWeakRef(leaf)) for place, leaf in tensors.items()]
        self._numbers = {}
        self._calls += 1
        if self._calls <= _FIRST_CALLS or self._calls % _FIRST_CALLS == 0:
            self._note_memories(tensors)
        frame = user_frame()
        self._site = None if frame is None else (frame.f_code, frame.f_lasti)
        return result

    def _note_memories(self, tensors: dict[int, torch.Tensor]) -> None:
        """Note what results lie in."""
        for place, tensor in tensors.items():
            if (number := _number(tensor)) is not None:
                self._numbers[place] = number
                if number not in self._memories:
                    self._memories[number] = _Memory(tensor)
        for number, count in Counter(self._numbers.values()).items():
            self._memories[number].note(count)


# Views are looked for in so many first calls, and then in one of so many.
_FIRST_CALLS = 8


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
    """Views of results, which are held if they are more than when they were last looked for.

    Those in variables of a loop are as many each time: nobody reads them any more.
    """

    now: Callable[[], int]
    most: int

    @property
    def is_held(self) -> bool:
        """Whether there are more references than these explain."""
        return self.now() > self.most
