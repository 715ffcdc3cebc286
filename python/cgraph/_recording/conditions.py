"""What must be as it was before a capture, or else the function is not captured now."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import starmap
from typing import Any, NoReturn

import torch

from cgraph._recording.plan import Plan
from cgraph._state.attributes import Attributes, Place, changed_numbers, is_number, place_of
from cgraph._state.constants import Constant
from cgraph._state.holders import vars_of
from cgraph._state.kept import IsMade, grown_in, kept_in
from cgraph._state.rollback import Rollback
from cgraph._state.search import Found
from cgraph._state.stepping import Steps
from cgraph._text import first_line
from cgraph._torch import tree_flatten
from cgraph.errors import CaptureError

__all__ = [
    "NotReadyError",
    "WarmupError",
    "copied_leaves",
    "has_moved",
    "require_none_drained",
    "require_none_kept",
    "require_same_numbers",
    "require_same_results",
    "require_state",
    "require_unmoved",
    "state_is_made",
]


class NotReadyError(Exception):
    """What the graph would use is made by the first call, and was put back."""

    @property
    def ahead(self) -> CaptureError:
        """The error of a capture that comes before the first call."""
        return CaptureError(f"{self}: if only a first call does so, call the function once before")


class WarmupError(Exception):
    """What the function raised before its capture.

    Attributes:
        cause: The exception.
    """

    def __init__(self, cause: Exception) -> None:
        super().__init__(first_line(cause))
        self.cause = cause

    def come_out(self) -> NoReturn:
        """Raise the exception as the function has raised it, with what that came from."""
        cause = self.cause
        chain = cause.__cause__, cause.__context__, cause.__suppress_context__
        try:
            raise cause
        finally:
            cause.__cause__, cause.__context__, cause.__suppress_context__ = chain


def require_state(steps: Steps) -> None:
    """Refuse a step that begins with the optimizer's state, which is made once.

    Also one that changes settings: the first call may set them, and later ones find them so.
    """
    if (reason := steps.made or steps.changed) is not None:
        raise NotReadyError(reason)


def require_same_numbers(attributes: Attributes, found: Found, but: Collection[Place] = ()) -> None:
    """Refuse a function that changes numbers or texts of Python's, or takes them away.

    Args:
        attributes: Those in dictionaries, as they were.
        found: Where others were.
        but: Places that do not count.
    """
    if (reason := attributes.changed(but) or changed_numbers(found.numbers, but)) is not None:
        raise NotReadyError(reason)


def require_none_kept(
    found: Found,
    is_made: IsMade,
    but: Collection[Place],
    statics: Sequence[torch.Tensor],
    begin: Found,
) -> None:
    """Refuse a function that adds a tensor to a list, or puts one where None or another one was.

    Also one that keeps a container of its arguments: the one of the call is another one.

    Args:
        found: Where lists and all these were, and what they had.
        is_made: Tells which tensors were made since.
        but: Places that do not count.
        statics: What stands for arguments, which only calls before can have put there.
        begin: What was found before the first call.
    """
    lists = (one for one in found.lists if (id(one[0]), "list") not in but)
    slots = (one for one in found.empty if place_of(one) not in but)
    held = [one for one in found.all_holders if place_of(one) not in but]
    reason = kept_in(lists, slots, held, is_made)
    if reason is not None:
        raise NotReadyError(reason)
    own = set(map(id, statics))
    known = {*map(id, begin.all_dictionaries), *(id(one) for one, _ in begin.lists)}
    for one in held:
        if one.path and id(one.value) in own and one.now is one.value:
            container = one._replace(path=one.path[:-1]).now
            is_dataclass = hasattr(type(container), "__dataclass_fields__")
            is_container = is_dataclass or issubclass(type(container), dict | list | tuple)
            if is_container and id(vars_of(container) or container) not in known:
                raise NotReadyError(
                    f"the function keeps an argument, that with {one.title}, and replays do not"
                )


def require_none_grown(attributes: Attributes, but: Collection[Place]) -> None:
    """Refuse a function that exchanges a container for one with more tensors, as a history.

    Args:
        attributes: Attributes and items of dictionaries as they were before the capture.
        but: Places that do not count.
    """
    if (reason := grown_in(attributes.exchanged(but))) is not None:
        raise NotReadyError(reason)


def require_same_results(first: Sequence[Any], second: Sequence[Any]) -> None:
    """Refuse a first call that sets something up and returns something else than the next one.

    Args:
        first: The leaves of its result.
        second: Those of the next call's, with the same arguments.
    """
    pairs = zip(first, second, strict=False)
    if len(first) != len(second) or not all(starmap(_are_alike, pairs)):
        raise NotReadyError("the first call returns something else than the next one")


def copied_leaves(result: Any) -> list[Any]:
    """The leaves of a result, as they are now."""
    leaves = tree_flatten(result)[0]
    return [one.detach().clone() if isinstance(one, torch.Tensor) else one for one in leaves]


def _are_alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        try:
            epsilon = torch.finfo(one.dtype).eps if one.dtype.is_floating_point else 0.0
            near = {"rtol": 16 * epsilon, "atol": 16 * epsilon}
            return torch.allclose(one, other, equal_nan=True, **near)
        except Exception:  # a kind of tensor that cannot be compared
            return True
    if is_number(one) or is_number(other):
        return Constant(one) == Constant(other)
    return isinstance(one, torch.Tensor) == isinstance(other, torch.Tensor)


def require_none_drained(found: Found) -> None:
    """Refuse a function that names an iterator, before it gives anything: nobody can put that back.

    Args:
        found: What the function finds.

    Raises:
        CaptureError: It does.
    """
    for one in found.drained:
        raise CaptureError(
            f"the function names {one.words}, a {type(one.value).__qualname__}, and replays take"
            " nothing from it: take it before the call and pass it as an argument, or in an"
            " eager_break"
        )


def require_unmoved(plan: Plan, rollback: Rollback | None) -> None:
    """Refuse a function that lets tensors lie elsewhere, before they are put back.

    Args:
        plan: How it is captured, which names those of modules.
        rollback: What has noted where others lie, if somebody has.
    """
    name = plan.moved() or (None if rollback is None else rollback.displaced)
    if name is not None:
        raise has_moved(name)


def state_is_made() -> NotReadyError:
    """The error of a function whose calls write to what an earlier one has made."""
    return NotReadyError("the function writes to a tensor that a call makes and keeps")


def has_moved(name: str) -> NotReadyError:
    """The error of a function that does so. After its call the tensor may stay there."""
    return NotReadyError(
        f"the function gives {name} other memory, as `.data = ...` does, and replays do not: write"
        " to it in place"
    )
