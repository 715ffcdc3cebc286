"""cgraph's exceptions. Each class says what went wrong; each message says what to do."""

from __future__ import annotations

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


class DriverError(CgraphError):
    """A CUDA driver call failed.

    Attributes:
        call: CUDA's name of the call.
    """

    call: str | None = None


class OutOfMemoryError(CgraphError, MemoryError):
    """Too little device memory; the message has the numbers."""


class CaptureError(CgraphError):
    """A capture could not begin, go on or end."""


class InstantiateError(CgraphError):
    """A captured graph could not be made executable."""


class UpdateError(CgraphError, ValueError):
    """An executable graph cannot take a change."""


class ForeignError(CgraphError, ValueError):
    """An object of another device, driver or graph was given."""


class ArgumentError(CgraphError, ValueError):
    """An unacceptable argument; the message names it, its value and the expected one."""


class CallableError(ArgumentError, AssertionError):
    """A callable or its sample cannot be graphed; torch raises ``AssertionError`` for some."""


class KeywordError(ArgumentError, TypeError):
    """A keyword argument is not one of the sample; Python raises ``TypeError`` for such."""


class StateError(CgraphError):
    """A call came in the wrong order, as ``replay()`` before a capture."""


class CompareError(CgraphError):
    """A difference between a replay and eager; raised by debug replays only.

    Attributes:
        output: The first result that differs, as ``result[0]``.
        operator: The first operator that differs, with its line; None if no single one does.
    """

    output: str | None = None
    operator: str | None = None


class LivenessError(CgraphError):
    """A replay would read memory that was freed or moved since the capture."""


class NoDriverError(CgraphError):
    """No CUDA driver can be used.

    cgraph never switches to the simulator by itself; choose it by name: ``CGRAPH_DRIVER=sim`` or
    ``with cgraph.sim.use():``.
    """


class CgraphWarning(UserWarning):
    """The base of all warnings of cgraph."""


class EagerWarning(CgraphWarning):
    """Calls of a graphed function run eagerly; the text says where, why and what to do."""


class PlacesWarning(CgraphWarning):
    """A graphed function reads more places than are compared; the text names the first beyond."""


class ResultWarning(CgraphWarning):
    """A static result is still held that the next call overwrites."""


def add_note(error: BaseException, note: str) -> None:
    """Attach a line to an exception that is on its way to the user."""
    # Python 3.11 prints them. Types of 3.10 have no such attribute.
    vars(error)["__notes__"] = [*getattr(error, "__notes__", []), note]


class TorchError(CgraphError):
    """A torch that lacks something that cgraph needs."""
