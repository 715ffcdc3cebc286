"""Findings that a capture refuses or freezes, and their fixes, for ``explain`` and failures."""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import Any

from cgraph import _source
from cgraph._operators.refused import REFUSED
from cgraph._reason import Reason
from cgraph._text import first_line, short_place
from cgraph.breaks import Work
from cgraph.causes import Cause, Severity
from cgraph.errors import CaptureError, CgraphError

__all__ = [
    "Finding",
    "Log",
    "blame",
    "blame_at_end",
    "failed_by",
]


# Names that a line of Python calls, besides those of operators.
_CALLS = {
    **REFUSED,
    **dict.fromkeys(("cpu", "tolist", "print", "numpy", "int", "float"), Cause.HOST_READ),
    **dict.fromkeys(("__repr__", "__format__", "str", "repr"), Cause.HOST_READ),
    **dict.fromkeys(("bool", "__bool__"), Cause.BRANCH),
    **dict.fromkeys(("synchronize", "query", "elapsed_time"), Cause.WAIT),
    **dict.fromkeys(("tensor", "as_tensor", "cuda"), Cause.HOST_COPY),
}

# Parts of error texts of torch, CUDA and the simulator.
_TEXTS = {
    "capturable": Cause.OPTIMIZER,
    "CUDA generator": Cause.GENERATOR,
    "draws from a generator": Cause.GENERATOR,
    "dependency created on uncaptured work": Cause.OUTSIDE_WAIT,
    "STREAM_CAPTURE_ISOLATION": Cause.OUTSIDE_WAIT,
    "legacy stream": Cause.DEFAULT_STREAM,
    "STREAM_CAPTURE_IMPLICIT": Cause.DEFAULT_STREAM,
    "STREAM_CAPTURE_UNJOINED": Cause.UNJOINED_STREAM,
    "unjoined work": Cause.UNJOINED_STREAM,
    # cuBLAS, cuSOLVER and cuSPARSE; cuDNN; cuFFT, which has a plan for each shape.
    "Create(handle)": Cause.FIRST_USE,
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED": Cause.FIRST_USE,
    "CUFFT_INTERNAL_ERROR": Cause.FIRST_USE,
}
_WHERE = "cgraph.explain(function, ...) names the operator and its line"
_OPTIMIZERS = os.path.join("torch", "optim", "")
_UNPINNED = "unless the CPU tensor is pinned"
_CAPTURE_CODES = range(900, 909)


@dataclass(frozen=True)
class Finding:
    """One thing on one line that a capture would refuse or freeze.

    Attributes:
        cause: What the line does, with its fix.
        operator: The operator or function, as ``aten.item`` or ``torch.cuda.synchronize``.
        file: The innermost file outside torch and cgraph.
        line: Its line.
        source: The line's text; empty if there is no file.
        count: The number of times that the line did it.
    """

    cause: Cause
    operator: str
    file: str
    line: int
    source: str
    count: int

    @property
    def kind(self) -> str:
        """The cause, in at most two words, as ``"host read"``."""
        return self.cause.kind

    @property
    def severity(self) -> Severity:
        """``"refused"``: a capture fails there. ``"frozen"``: replays keep the capture's values."""
        return self.cause.severity

    @property
    def fix(self) -> str:
        """The remedy."""
        return self.cause.fix

    @property
    def place(self) -> str:
        """The file's name and folder, and the line."""
        return short_place(f"{self.file}:{self.line}")

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as plain values, with the code of its cause."""
        about = {name: getattr(self, name) for name in ("kind", "severity", "fix")}
        own = {name: value for name, value in vars(self).items() if name != "cause"}
        return {"code": self.cause.code, **about, **own}


class Log:
    """A count of findings by line, except those of breaks, which stay eager."""

    def __init__(self) -> None:
        self._counts: dict[tuple[Cause, str, _source.Place], int] = {}
        self._is_aside = False

    def run(self, work: Work, args: Any, kwargs: Any) -> Any:
        """Run a break; see :class:`cgraph.breaks.Breakable`."""
        before, self._is_aside = self._is_aside, True
        try:
            return work.fn(*args, **kwargs)
        finally:
            self._is_aside = before

    def add(self, cause: Cause, operator: str, place: _source.Place) -> None:
        """Note that a line did something."""
        if self._is_aside:
            return
        if cause is Cause.HOST_READ and any(
            (known, at) == (Cause.OPTIMIZER, place) for known, _, at in self._counts
        ):
            # The optimizer reads its count of steps.
            return
        key = cause, operator, place
        self._counts[key] = self._counts.get(key, 0) + 1

    def refuses(self, place: _source.Place) -> bool:
        """Return whether something that a capture refuses was noted for a line."""
        return any(cause.severity == "refused" and at == place for cause, _, at in self._counts)

    def findings(self) -> tuple[Finding, ...]:
        """Return the findings, in the order in which they first happened."""
        found = []
        for (cause, operator, (file, line)), count in self._counts.items():
            source = linecache.getline(file, line).strip()
            found.append(Finding(cause, operator, file, line, source, count))
        return tuple(found)


def blame(error: BaseException, is_broken: bool) -> Reason | None:
    """Return the reason of a capture's failure, with the user's line.

    Args:
        error: The exception from the capture's block.
        is_broken: True if the driver says that the capture became unusable.

    Returns:
        The reason; None if the exception is the user's own.
    """
    found = _blamed(error, is_broken)
    if found is None:
        return None
    cause, level = found
    file, line = level.tb_frame.f_code.co_filename, level.tb_lineno
    return Reason(cause, f"it {cause.what}", f"{file}:{line}")


def failed_by(error: BaseException) -> Reason:
    """Return the reason why a capture failed, from its error."""
    own = getattr(error, "_reason", None)
    if isinstance(own, Reason):
        return own.at(_source.place_of(error))
    found, text, fix = _blamed(error, is_broken=False), first_line(error), None
    if found is not None:
        cause = found[0]
        if cause is not Cause.UNKNOWN:
            text = f"it {cause.what} ({text})"
    elif isinstance(error, CaptureError) and _cause_at_end(error) is not Cause.UNKNOWN:
        cause = _cause_at_end(error)
        fix = f"{cause.fix}; {_WHERE}"
    else:
        cause = Cause.CAPTURE_FAILED
    return Reason(cause, text, _source.place_of(error), fix)


def blame_at_end(error: CaptureError) -> str | None:
    """Return why a capture cannot end, and how to find the line; None if not known."""
    cause = _cause_at_end(error)
    if cause is Cause.UNKNOWN:
        return None
    return str(Reason(cause, f"the function {cause.what}", None, f"{cause.fix}; {_WHERE}"))


def _cause_at_end(error: CaptureError) -> Cause:
    """Return the cause of a failure that happens in no line of the user's."""
    return next((cause for part, cause in _TEXTS.items() if part in str(error)), Cause.UNKNOWN)


def _blamed(error: BaseException, is_broken: bool) -> tuple[Cause, TracebackType] | None:
    """Return the cause of a capture's failure, and the user's innermost frame."""
    text = _text(error)
    frames = list(_levels(error.__traceback__))
    mine = [place for place, level in enumerate(frames) if _is_users(level)]
    if not mine or not _is_of_capture(error, text, is_broken, frames[-1]):
        return None
    level, inner = frames[mine[-1]], frames[mine[-1] + 1 :]
    cause = _cause(text or "", level, [one.tb_frame.f_code.co_name for one in inner])
    steps = [one for one in map(_capturable_at, inner) if one is not None]
    if steps:
        # An optimizer that is already capturable has failed for another reason.
        cause = Cause.UNKNOWN if all(steps) else Cause.OPTIMIZER
    if cause is Cause.UNKNOWN and isinstance(error, CgraphError):
        return None  # its own text says more
    return cause, level


def _capturable_at(level: TracebackType) -> bool | None:
    """Return whether the torch optimizer of a frame counts on the device; None for others."""
    frame = level.tb_frame
    optimizer = frame.f_locals.get("self")
    defaults = getattr(optimizer, "defaults", None)
    is_torchs = _OPTIMIZERS in frame.f_code.co_filename
    if not (is_torchs and isinstance(defaults, dict) and "capturable" in defaults):
        return None
    return all(group.get("capturable") for group in getattr(optimizer, "param_groups", ()))


def _text(error: BaseException) -> str | None:
    """Return the exception's text; None if it cannot be had."""
    try:
        return None if isinstance(error, UnicodeDecodeError) else str(error)
    except Exception:  # of a class whose text comes from elsewhere
        return None


def _is_of_capture(
    error: BaseException, text: str | None, is_broken: bool, last: TracebackType
) -> bool:
    if isinstance(error, UnicodeDecodeError):  # in place of an error of torch's
        return is_broken and not _is_raised_by_user(last)
    if isinstance(error, MemoryError) or not isinstance(error, RuntimeError):
        return False
    if isinstance(error, CgraphError):
        return isinstance(error, CaptureError) or error.code in _CAPTURE_CODES
    is_told = "captur" in (text or "") or _has_first_use(text or "")
    return (is_broken or is_told) and not _is_raised_by_user(last)


def _has_first_use(text: str) -> bool:
    return any(part in text for part, cause in _TEXTS.items() if cause is Cause.FIRST_USE)


def _cause(text: str, level: TracebackType, inner: list[str]) -> Cause:
    """Return the cause of a failure, from its text, the user's frame and the frames inside it."""
    for part, cause in _TEXTS.items():
        if part in text:
            return cause
    operators = re.findall(r"\baten\.(\w+)", text)
    segment = _segment(level).strip()
    names = [*re.findall(r"\b(\w+)\s*\(", segment), *inner]
    known = [_CALLS[name] for name in (*operators, *names) if name in _CALLS]
    code, place = level.tb_frame.f_code, level.tb_lasti
    if _source.is_branch(code, place):
        return Cause.BRANCH
    if known:
        return known[0] if operators and operators[0] in REFUSED else known[-1]
    if _UNPINNED in text:
        return Cause.HOST_COPY
    return (
        Cause.SHAPE
        if segment.endswith("]") or "SUBSCR" in _source.operation(code, place)
        else Cause.UNKNOWN
    )


def _levels(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _is_users(level: TracebackType) -> bool:
    return not _source.is_omitted(level.tb_frame.f_code.co_filename)


def _is_raised_by_user(last: TracebackType) -> bool:
    operation = _source.operation(last.tb_frame.f_code, last.tb_lasti)
    return _is_users(last) and operation == "RAISE_VARARGS"


def _segment(level: TracebackType) -> str:
    """Return the part of the line that failed; all before Python 3.11, or if it spans lines."""
    code = level.tb_frame.f_code
    line = linecache.getline(code.co_filename, level.tb_lineno)
    positions = getattr(code, "co_positions", None)
    if positions is not None and level.tb_lasti >= 0:
        first, last, begin, end = next(islice(positions(), level.tb_lasti // 2, None))
        if first == last and begin is not None and end is not None:
            return line.encode()[begin:end].decode(errors="replace")
    return line
