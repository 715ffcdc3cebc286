"""Where a function keeps tensors besides attributes: in lists, and in slots that were None."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch

from cgraph._state.holders import Holder
from cgraph._torch import tree_iter

__all__ = ["Before", "IsMade", "kept_in", "put_back_kept"]

Before = tuple[list[Any], list[Any]]
"""A list, and what it had."""
IsMade = Callable[[torch.Tensor], bool]
"""Whether a tensor was made by the calls before a capture or by that, or stands for an argument.

What is new besides may be what another thread has put there.
"""


def kept_in(lists: Iterable[Before], slots: Iterable[Holder], is_made: IsMade) -> str | None:
    """Why a function is not captured that adds a tensor there; None if it adds none.

    Args:
        lists: Each with what it had.
        slots: Where None was.
        is_made: Tells of tensors.
    """
    for one, before in lists:
        new = {id(item) for item in _made_in(one, before, is_made)}
        for place, item in enumerate(list.__iter__(one) if new else ()):
            there = _tensors_in(before[place]) if place < len(before) else []
            if id(item) in new and len(_tensors_in(item)) > len(there):
                return "the function adds a tensor to a list, and replays do not"
    for slot in slots:
        if isinstance(slot.now, torch.Tensor) and is_made(slot.now):
            return f"the function sets {slot.title} to a tensor, and replays do not"
    return None


def put_back_kept(lists: Iterable[Before], slots: Iterable[Holder], is_made: IsMade) -> None:
    """Let lists and slots have no tensors that were made since.

    Args:
        lists: Each with what it had.
        slots: Where None was.
        is_made: Tells of tensors.
    """
    for one, before in lists:
        if made := _made_in(one, before, is_made):
            gone = {id(item) for item in (*before, *made)}
            others = [item for item in list.__iter__(one) if id(item) not in gone]
            list.__setitem__(one, slice(None), [*before, *others])
    for slot in slots:
        if isinstance(slot.now, torch.Tensor) and is_made(slot.now):
            slot.put_back()


def _made_in(one: list[Any], before: list[Any], is_made: IsMade) -> list[Any]:
    """The items with tensors that a list did not have, if one of these was made since.

    Of all of them nobody knows: operators of a call that is timed are not seen.
    """
    now = [*list.__iter__(one)]
    if len(now) == len(before) and all(map(operator.is_, now, before)):
        return []
    known = set(map(id, before))
    new = [item for item in now if id(item) not in known and _tensors_in(item)]
    is_ours = any(is_made(tensor) for item in new for tensor in _tensors_in(item))
    return new if is_ours else []


def _tensors_in(item: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_iter(item) if isinstance(leaf, torch.Tensor)]
