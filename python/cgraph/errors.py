"""cgraph's exceptions. Each class says what went wrong; each message says what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cgraph._reason import Reason
    from cgraph.causes import Cause

__all__ = [
    "ArgumentError",
    "CallableError",
    "CaptureError",
    "CgraphError",
    "CgraphWarning",
    "CompareError",
    "DriverError",
    "EagerWarning",
    "ForeignError",
    "InstantiateError",
    "KeywordError",
    "LivenessError",
    "NoDriverError",
    "OutOfMemoryError",
    "PlacesWarning",
    "ResultWarning",
    "StateError",
    "TorchError",
    "UpdateError",
]


class CgraphError(RuntimeError):
    """The base of all errors: a ``RuntimeError``, as torch raises for its own graphs.

    Attributes:
        code: CUDA's result code (``CUresult``), if it is behind the error.
    """

    code: int | None = None
    _reason: Reason | None = None

    @property
    def cause(self) -> Cause | None:
        """The cause, where it is one of those with a code and a page."""
        return None if self._reason is None else self._reason.cause


class DriverError(CgraphError):
    """A failed CUDA driver call.

    Attributes:
        call: CUDA's name of the call.
    """

    call: str | None = None


class OutOfMemoryError(CgraphError, MemoryError):
    """Too little device memory; the message has the numbers."""


class CaptureError(CgraphError):
    """A capture that could not begin, continue or end."""


class InstantiateError(CgraphError):
    """A captured graph that could not be made executable."""


class UpdateError(CgraphError, ValueError):
    """An executable graph that cannot take a change."""


class ForeignError(CgraphError, ValueError):
    """An argument of another device, driver or graph."""


class ArgumentError(CgraphError, ValueError):
    """An unacceptable argument; the message names it, its value and the expected one."""


class CallableError(ArgumentError, AssertionError):
    """A callable or sample that cannot be graphed; torch raises ``AssertionError`` for some."""


class KeywordError(ArgumentError, TypeError):
    """A keyword argument is not one of the sample; Python raises ``TypeError`` for such."""


class StateError(CgraphError):
    """A call in the wrong order, such as ``replay()`` before a capture."""


class CompareError(CgraphError):
    """A difference between a replay and eager; raised by debug replays only.

    Attributes:
        output: The first result that differs, as ``result[0]``.
        operator: The first operator that differs, with its line; None if no single one does.
    """

    output: str | None = None
    operator: str | None = None


class LivenessError(CgraphError):
    """A replay that would read memory freed or moved since the capture."""


class NoDriverError(CgraphError):
    """The lack of a usable CUDA driver.

    cgraph never switches to the simulator by itself; choose it by name: ``CGRAPH_DRIVER=sim`` or
    ``with cgraph.sim.use():``.
    """


class CgraphWarning(UserWarning):
    """The base of all warnings of cgraph.

    A message ends with the code of its cause, so each can be silenced by itself::

        warnings.filterwarnings("ignore", message="(?s).*CG-HELD-RESULT")

    """

    _reason: Reason | None = None

    @property
    def cause(self) -> Cause | None:
        """The cause, where it is one of those with a code and a page."""
        return None if self._reason is None else self._reason.cause


class EagerWarning(CgraphWarning):
    """Eager calls of a graphed function; the text says where, why and what to do."""


class PlacesWarning(CgraphWarning):
    """More places than are compared, in a graphed function; the text names the first beyond."""


class ResultWarning(CgraphWarning):
    """A static result that is still held when the next call overwrites it."""


def add_note(error: BaseException, note: str) -> None:
    """Attach a line to an exception that is on its way to the user."""
    # Python 3.11 prints them. Types of 3.10 have no such attribute.
    vars(error)["__notes__"] = [*getattr(error, "__notes__", []), note]


class TorchError(CgraphError):
    """A torch that lacks something that cgraph needs."""
