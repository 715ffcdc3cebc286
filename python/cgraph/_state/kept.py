"""Where a function keeps tensors besides attributes: in lists, and in slots that were None."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from cgraph._state.attributes import changes, is_another, is_number
from cgraph._state.hidden import tensors_inside
from cgraph._state.holders import Holder
from cgraph._torch import tree_iter

__all__ = [
    "Before",
    "IsMade",
    "changed_in",
    "grown_in",
    "has_made_items",
    "is_changed",
    "items_of",
    "kept_in",
    "len_of",
    "put_back_items",
    "put_back_kept",
]

Kept = list[Any] | deque[Any] | set[Any]
Before = tuple[Kept, list[Any]]
"""A list, a deque or a set, and what it had."""
IsMade = Callable[[torch.Tensor], bool]
"""Whether a tensor was made by the calls before a capture or by that, or stands for an argument.

What is new besides may be what another thread has put there.
"""


def kept_in(
    lists: Iterable[Before], slots: Iterable[Holder], held: Iterable[Holder], is_made: IsMade
) -> str | None:
    """Why a function is not captured that adds a tensor there; None if it adds none.

    Args:
        lists: Each with what it had.
        slots: Where None was.
        held: Where other tensors were.
        is_made: Tells of tensors.
    """
    # What a set holds has no place that a call could read it from.
    for one, before in (pair for pair in lists if not issubclass(type(pair[0]), set)):
        new = {id(item) for item in _made_in(one, before, is_made)}
        # What is put behind the last one moves the others of a deque.
        is_moved = issubclass(type(one), deque)
        for place, item in enumerate(items_of(one) if new else ()):
            there = [] if is_moved or place >= len(before) else _tensors_in(before[place])
            if id(item) in new and len(_tensors_in(item)) > len(there):
                return "the function adds a tensor to a list, and replays do not"
    for slot in slots:
        if isinstance(slot.now, torch.Tensor) and is_made(slot.now):
            return f"the function sets {slot.title} to a tensor, and replays do not"
    for holder in held:
        # Attributes of modules are looked at elsewhere: hooks of torch's set some.
        is_attribute = isinstance(holder.owner, dict) and "_parameters" in holder.owner
        if isinstance(holder.value, torch.Tensor) and (holder.path or not is_attribute):
            now = holder.now
            if now is not holder.value and isinstance(now, torch.Tensor) and is_made(now):
                return f"the function sets {holder.title} to a tensor, and replays do not"
    return None


def grown_in(exchanged: Iterable[tuple[Any, Any, Any]]) -> str | None:
    """Why a function is not captured that exchanges a container for one with more tensors; or None.

    Args:
        exchanged: The name of each that was exchanged, what was there, and what is.
    """
    for name, then, now in exchanged:
        may_hold = not isinstance(now, torch.Tensor | torch.nn.Module) and not is_number(now)
        if may_hold and _count(now) > _count(then):
            return f"the function adds a tensor to {name}, and replays do not"
    return None


def put_back_kept(
    lists: Iterable[Before], has_made: Callable[[Any], bool], first: Mapping[int, list[Any]]
) -> None:
    """Let lists have what they had, to which what was made since was added.

    Of those that were others later than after the first call only what was made is taken away: the
    others may be other threads'.

    Args:
        lists: Each with what it had.
        has_made: Tells of an item whether tensors in it were made since.
        first: What lists had after the first call, by their numbers.
    """
    for one, before in lists:
        if not is_changed(one, before):
            continue
        known = set(map(id, before))
        new = [item for item in items_of(one) if id(item) not in known]
        # Of all of them nobody knows: operators of a call that is timed are not seen.
        is_ours = any(map(has_made, new))
        made = {id(item) for item in new if is_ours and any(True for _ in tensors_inside(item))}
        is_quiet = id(one) in first and not is_changed(one, first[id(one)])
        if made and is_quiet:
            _fill(one, before)
        elif made:
            others = [item for item in new if id(item) not in made]
            _fill(one, [*before, *others])


def has_made_items(one: Kept, before: list[Any], has_made: Callable[[Any], bool]) -> bool:
    """Whether a list has got something with tensors that were made since.

    Args:
        one: The list.
        before: What it had.
        has_made: Tells of an item whether there are such ones in it.
    """
    if not is_changed(one, before):
        return False
    known = set(map(id, before))
    return any(has_made(item) for item in items_of(one) if id(item) not in known)


def changed_in(one: Kept, before: list[Any], takes: bool) -> str | None:
    """Why a function is not captured that changes numbers in a list; None if it changes none.

    What is added to a list may be a log of calls, or another thread's, and so may be what is taken
    from it.

    Args:
        one: The list.
        before: What it had.
        takes: Whether the function's code names what takes items from lists.
    """
    now = items_of(one)
    if issubclass(type(one), set):
        return None
    if takes and len(now) < len(before):
        return (
            f"the function takes items from a list of {len(before)}, and replays do not: do it"
            " around the call"
        )
    if len(now) != len(before):
        return None
    pairs = enumerate(zip(now, before, strict=True))
    numbers = (pair for pair in pairs if is_number(pair[1][1]) or pair[1][1] is None)
    for place, (there, then) in numbers:
        if is_another(there, then):
            return changes(f"item {place} of a list", then, there)
    return None


def is_changed(one: Kept, before: list[Any]) -> bool:
    """Whether a list has not the very same items any more.

    Args:
        one: The list.
        before: What it had.
    """
    now = items_of(one)
    if issubclass(type(one), set):
        return set(map(id, now)) != set(map(id, before))
    return len(now) != len(before) or not all(map(operator.is_, now, before))


def put_back_items(lists: Iterable[Before]) -> None:
    """Let lists have what they had.

    Args:
        lists: Each with that.
    """
    for one, before in lists:
        if is_changed(one, before):
            _fill(one, before)


def items_of(one: Kept) -> list[Any]:
    """What a list or deque has, by no code of the user's."""
    # A copy at once: other threads may add something meanwhile.
    base = _base_of(one)
    return [*base.__iter__(base.copy(one))]


def len_of(one: Kept) -> int:
    """How much that is."""
    return int(_base_of(one).__len__(one))


def _fill(one: Any, items: list[Any]) -> None:
    base = _base_of(one)
    base.clear(one)
    (base.update if base is set else base.extend)(one, items)


def _base_of(one: Kept) -> Any:
    return next(base for base in (list, deque, set) if issubclass(type(one), base))


def _made_in(one: Kept, before: list[Any], is_made: IsMade) -> list[Any]:
    """The items with tensors that a list did not have, if one of these was made since.

    Of all of them nobody knows: operators of a call that is timed are not seen.
    """
    if not is_changed(one, before):
        return []
    known = set(map(id, before))
    new = [item for item in items_of(one) if id(item) not in known and _tensors_in(item)]
    is_ours = any(is_made(tensor) for item in new for tensor in _tensors_in(item))
    return new if is_ours else []


def _count(value: Any) -> int:
    """How many tensors there are in a value."""
    return sum(1 for _ in tensors_inside(value))


def _tensors_in(item: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_iter(item) if isinstance(leaf, torch.Tensor)]
