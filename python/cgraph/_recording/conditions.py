"""What must be as it was before a capture, or else the function is not captured now."""

from __future__ import annotations

from cgraph._recording.plan import Plan
from cgraph._state.attributes import Attributes, changed_numbers
from cgraph._state.holders import put_back_numbers
from cgraph._state.kept import IsMade, kept_in, put_back_kept
from cgraph._state.search import Found
from cgraph._state.stepping import Steps
from cgraph.errors import CaptureError

__all__ = [
    "NotReadyError",
    "WarmupError",
    "has_moved",
    "put_back_attributes",
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


def put_back_attributes(
    attributes: Attributes,
    found: Found,
    is_made: IsMade,
    error: type[BaseException] | None,
    *_: object,
) -> None:
    """Let attributes and names be what they were, at the end of a block that raises.

    Numbers that the function has changed before it raised itself stay, as after any call.

    Args:
        attributes: Those in dictionaries, as they were.
        found: Where other numbers, and lists, were.
        is_made: Tells which tensors were made since.
        error: What the block raises; None for nothing.
    """
    if error is not None:
        has_raised = issubclass(error, WarmupError)
        attributes.put_back_others(numbers=not has_raised)
        if not has_raised:
            put_back_kept(found.lists, found.slots, is_made)
            put_back_numbers(found.numbers)


def require_same_numbers(attributes: Attributes, found: Found) -> None:
    """Refuse a function that changes numbers or texts of Python's, or takes them away.

    Args:
        attributes: Those in dictionaries, as they were.
        found: Where others were.
    """
    if (reason := attributes.changed or changed_numbers(found.numbers)) is not None:
        raise NotReadyError(reason)


def require_none_kept(found: Found, is_made: IsMade) -> None:
    """Refuse a function that adds a tensor to a list, or puts one into a slot that was None.

    Args:
        found: Where lists and slots were, and what they had.
        is_made: Tells which tensors were made since.
    """
    if (reason := kept_in(found.lists, found.slots, is_made)) is not None:
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
