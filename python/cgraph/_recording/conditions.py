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


class PythonState:
    """What Python has before calls: attributes, names, lists, and its random numbers.

    Args:
        attributes: Those in dictionaries, as they are.
        found: Where else tensors and numbers are, and lists with what they have.
        is_made: Tells which tensors were made since.
    """

    def __init__(self, attributes: Attributes, found: Found, is_made: IsMade) -> None:
        self._attributes = attributes
        self._found = found
        self._is_made = is_made
        self._made: dict[Place, Any] = {}
        self._random = RandomOfPython()

    def require_same(self) -> None:
        """Refuse a function that changes numbers or texts, or takes them away.

        Also one that goes on changing those that a call before has made where there were none.
        """
        reason = self._attributes.changed or changed_numbers(self._found.numbers)
        if reason is not None:
            raise NotReadyError(reason)
        made = self._made_now()
        for place in self._counted(made):
            raise NotReadyError(changes(str(place[-1]), self._made[place], made[place]))
        self._made = {**made, **self._made}

    def require_none_drawn(self) -> None:
        """Refuse a function that draws random numbers which are not torch's."""
        if self._random.has_moved:
            raise CaptureError(
                "the function draws random numbers of Python or NumPy, and replays do not: draw"
                " torch's, or pass them as an argument"
            )

    def put_back_tensors(self) -> None:
        """Let tensors be where they were that are others now, before a call that is made again.

        What a first call makes stays, with flags and numbers that tell of it.
        """
        put_back_tensors(self._found.all_holders)

    def _put_back(self) -> None:
        """Put back all but what a first call makes, as objects and numbers.

        Where others go on changing a number that it has made, all goes that was made with it.
        """
        made = self._made_now()
        counted = self._counted(made)
        self._made = {**made, **self._made}
        owners = {place[0] for place in counted}
        self._attributes.put_back_others(numbers=True, made=counted)
        put_back_kept(self._found.lists, self._found.empty, self._is_made)
        put_back_numbers(self._found.numbers)
        put_back_numbers(one for one in self._found.empty if id(one.owner) in owners)
        self._random.put_back()
        put_back_tensors(self._found.all_holders)

    def _made_now(self) -> dict[Place, Any]:
        """Numbers where there was none, or None."""
        return {**self._attributes.made, **made_numbers(self._found.empty)}

    def _counted(self, made: dict[Place, Any]) -> set[Place]:
        """The places of those that were another number after a call before."""
        known = self._made.items()
        return {place for place, then in known if is_another(made.get(place), then)}

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
            put_back_tensors(self._found.all_holders)
        else:
            self._put_back()


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
