"""What must be as it was before a capture, or else the function is not captured now."""

from __future__ import annotations

from typing import Any

from cgraph._recording.plan import Plan
from cgraph._state.attributes import (
    Attributes,
    Place,
    changed_numbers,
    changes,
    is_another,
    made_numbers,
    place_of,
)
from cgraph._state.drawing import RandomOfPython
from cgraph._state.holders import put_back_numbers, put_back_tensors
from cgraph._state.kept import IsMade, kept_in, put_back_kept
from cgraph._state.search import Found
from cgraph._state.stepping import Steps
from cgraph.errors import CaptureError

__all__ = [
    "NotReadyError",
    "PythonState",
    "WarmupError",
    "has_moved",
    "require_none_kept",
    "require_same_numbers",
    "require_state",
    "require_unmoved",
]


class NotReadyError(Exception):
    """What the graph would use is made by the first call, and was put back."""

    @property
    def ahead(self) -> CaptureError:
        """The error of a capture that comes before the first call."""
        return CaptureError(f"{self}: call the function once before")


class WarmupError(Exception):
    """What the function raised before its capture.

    Attributes:
        cause: The exception.
    """

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


def require_state(steps: Steps) -> None:
    """Refuse a step that begins with the optimizer's state, which is made once.

    Also one that changes settings: the first call may set them, and later ones find them so.
    """
    if (reason := steps.made or steps.changed) is not None:
        raise NotReadyError(reason)


def require_same_numbers(attributes: Attributes, found: Found) -> None:
    """Refuse a function that changes numbers or texts of Python's, or takes them away.

    Args:
        attributes: Those in dictionaries, as they were.
        found: Where others were.
    """
    if (reason := attributes.changed or changed_numbers(found.numbers)) is not None:
        raise NotReadyError(reason)


class PythonState:
    """What Python has before calls: attributes, names, lists, and its random numbers.

    What is made in the first call alone stays, with the objects that are made beside it: numbers
    where there was none, and flags of what the function only calls.

    Args:
        attributes: Those in dictionaries, as they are.
        found: Where else tensors and numbers are, and lists with what they have.
        is_made: Tells which tensors were made since.
    """

    def __init__(self, attributes: Attributes, found: Found, is_made: IsMade) -> None:
        self._attributes = attributes
        self._found = found
        self._is_made = is_made
        # After the first call.
        self._made: dict[Place, Any] = {}
        self._far: list[Any] = []
        self._looks = 0
        self._random = RandomOfPython() if found.draws else None
        self._drawn = self._random

    def require_same(self, *, captured: bool = False) -> None:
        """Refuse a function that changes numbers or texts, or takes them away.

        Also one that goes on changing those that it has made itself, or those of what it calls, or
        that goes on drawing random numbers which are not torch's.

        Args:
            captured: Whether the capture has run.
        """
        self._require_none_drawn(captured=captured)
        require_same_numbers(self._attributes, self._found)
        made, far = self._made_now(), [one.now for one in self._found.far]
        self._looks += 1
        if self._looks == _AFTER_FIRST and not captured:
            self._made, self._far = made, far
        if self._looks <= _AFTER_FIRST and not captured:
            return
        for place in self._counted(made):
            raise NotReadyError(changes(str(place[-1]), self._made[place], made.get(place)))
        values = self._far or [one.value for one in self._found.far]
        for one, then, now in zip(self._found.far, values, far, strict=True):
            if is_another(now, then):
                raise NotReadyError(changes(one.words, then, now))

    def _require_none_drawn(self, *, captured: bool) -> None:
        """Refuse a function that goes on drawing random numbers which are not torch's."""
        if self._drawn is None or not self._drawn.has_moved:
            return
        if captured or self._drawn is not self._random:
            raise NotReadyError(
                "the function draws from random or numpy.random, and replays do not: draw torch's"
                " random numbers, or pass them as an argument"
            )
        # What the first call draws may be for the others to use.
        self._drawn = RandomOfPython()

    def put_back_what_breaks_assign(self) -> None:
        """Let tensors and random numbers be as they were, before a call that is made again."""
        put_back_tensors(self._found.all_holders)
        if self._random is not None:
            self._random.put_back()

    def after(self, error: type[BaseException] | None, *_: object) -> None:
        """Put it back at the end of a block that raises.

        Numbers that the function has changed before it raised itself stay, as after any call.

        Args:
            error: What the block raises; None for nothing.
        """
        if error is None:
            return
        if issubclass(error, WarmupError):
            self._attributes.put_back_others(numbers=False)
        else:
            self._put_back_numbers()
        put_back_tensors(self._found.all_holders)

    def _put_back_numbers(self) -> None:
        counted = self._counted(self._made_now())
        self._attributes.put_back_others(numbers=True, made=counted)
        put_back_kept(self._found.lists, self._found.empty, self._is_made)
        put_back_numbers(self._found.numbers)
        put_back_numbers(one for one in self._found.empty if place_of(one) in counted)
        pairs = zip(self._found.far, self._far, strict=False)
        put_back_numbers(one for one, then in pairs if is_another(one.now, then))
        if self._random is not None:
            self._random.put_back()

    def _made_now(self) -> dict[Place, Any]:
        """Numbers where there was none, or None."""
        return {**self._attributes.made, **made_numbers(self._found.empty)}

    def _counted(self, made: dict[Place, Any]) -> set[Place]:
        """The places of those that were another number after the first call."""
        known = self._made.items()
        return {place for place, then in known if is_another(made.get(place), then)}


# The first look comes before the first call.
_AFTER_FIRST = 2


def require_none_kept(found: Found, is_made: IsMade) -> None:
    """Refuse a function that adds a tensor to a list, or puts one where None or another one was.

    Args:
        found: Where lists and all these were, and what they had.
        is_made: Tells which tensors were made since.
    """
    reason = kept_in(found.lists, found.empty, found.all_holders, is_made)
    if reason is not None:
        raise NotReadyError(reason)


def require_unmoved(plan: Plan) -> None:
    """Refuse a function that lets tensors of modules lie elsewhere, before they are put back."""
    if (name := plan.moved()) is not None:
        raise has_moved(name)


def has_moved(name: str) -> NotReadyError:
    """The error of a function that does so. After its call the tensor may stay there."""
    return NotReadyError(
        f"the function gives {name} other memory, as `.data = ...` does, and replays do not: write"
        " to it in place"
    )
