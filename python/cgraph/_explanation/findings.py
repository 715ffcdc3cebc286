"""Findings that a capture refuses or freezes, and their fixes, for ``explain`` and failures."""

from __future__ import annotations

import dis
import linecache
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import Any, NamedTuple

from cgraph import _source
from cgraph._operators.refused import REFUSED
from cgraph._text import short_place
from cgraph.breaks import Work
from cgraph.errors import CaptureError, CgraphError

__all__ = [
    "KINDS",
    "Finding",
    "Log",
    "blame",
    "blame_at_end",
    "fix_of",
]


class Advice(NamedTuple):
    """The advice on a kind of finding.

    Attributes:
        severity: ``"refused"`` or ``"frozen"``.
        what: The action of such a line, to be read after "it".
        fix: The remedy.
    """

    severity: str
    what: str
    fix: str


KINDS = {
    "host read": Advice(
        "refused",
        "reads a value on the host, which waits for the device",
        "return the tensor and read it after the replay",
    ),
    "branch": Advice(
        "refused",
        "lets a value on the device decide in Python, which waits for the device",
        "choose on the device with torch.where, or decide outside and capture each case",
    ),
    "wait": Advice(
        "refused",
        "waits for the device, or asks whether it has finished",
        "wait after the replay; inside, order streams with wait_stream()",
    ),
    "shape": Advice(
        "refused",
        "makes a shape that depends on values, which the host must wait for",
        "keep the shape fixed: torch.where or a mask to multiply with, a size or output_size given",
    ),
    "host copy": Advice(
        "refused",
        "copies from host memory to the device",
        "make the tensor on the device before the capture, and copy new values in before a replay",
    ),
    "generator": Advice(
        "refused",
        "draws from a generator of its own",
        "draw from the default one, or call graph.register_generator_state(generator) before the"
        " capture",
    ),
    "seed": Advice(
        "refused",
        "seeds random numbers or sets their state",
        "do it before the capture, or pass random numbers as an argument",
    ),
    "host random": Advice(
        "frozen",
        "draws random numbers of Python: replays keep those of the capture",
        "draw torch's, or pass them as an argument",
    ),
    "optimizer": Advice(
        "refused",
        "steps an optimizer that counts its steps on the host",
        "make the optimizer with capturable=True",
    ),
    "unjoined stream": Advice(
        "refused",
        "puts work on a forked stream that nothing waits for at the end",
        "let the capturing stream wait for it afterwards: stream.wait_stream(side)",
    ),
    "outside wait": Advice(
        "refused",
        "lets a stream of the capture wait for work that is not part of it",
        "fork the other stream first: side.wait_stream(stream)",
    ),
    "default stream": Advice(
        "refused",
        "lets the default stream wait for the capture, of which it cannot be part",
        "use a torch.cuda.Stream() in its place",
    ),
    "outside stream": Advice(
        "frozen",
        "puts work on a stream that the capture does not reach: no replay does it again",
        "let that stream wait for the capturing one first; it cannot be the default stream",
    ),
    "host operand": Advice(
        "frozen",
        "gives work of the device a tensor on the host: replays keep the value of the capture",
        "move the tensor to the device before the capture",
    ),
    "host number": Advice(
        "frozen",
        "reads a number from a tensor on the host: replays keep it, and all branches on it",
        "keep the number in a tensor on the device, or capture a graph for each value",
    ),
    "first use": Advice(
        "refused",
        "uses a library of CUDA's for the first time, in this thread or for such a shape, and it"
        " takes memory of its own",
        "call the function once before the capture, in the same thread",
    ),
    "python state": Advice(
        "frozen",
        "changes values of Python, which no replay of a CUDAGraph does; those of graphed assign to"
        " attributes and to items of dictionaries, and do nothing else",
        "keep it in a tensor that is written in place, or change it outside of the capture",
    ),
    "print": Advice(
        "frozen",
        "prints: replays print nothing",
        "print after the replay",
    ),
    "unknown": Advice(
        "refused",
        "does what a stream must not do while it captures",
        "cgraph.explain(function, ...) runs it without a capture and names the operator",
    ),
}

# Names that a line of Python calls, besides those of operators.
_CALLS = {
    **REFUSED,
    **dict.fromkeys(("cpu", "tolist", "print", "numpy", "int", "float"), "host read"),
    **dict.fromkeys(("__repr__", "__format__", "str", "repr"), "host read"),
    **dict.fromkeys(("bool", "__bool__"), "branch"),
    **dict.fromkeys(("synchronize", "query", "elapsed_time"), "wait"),
    **dict.fromkeys(("tensor", "as_tensor", "cuda"), "host copy"),
}

# Parts of error texts of torch, CUDA and the simulator.
_TEXTS = {
    "capturable": "optimizer",
    "CUDA generator": "generator",
    "draws from a generator": "generator",
    "dependency created on uncaptured work": "outside wait",
    "STREAM_CAPTURE_ISOLATION": "outside wait",
    "legacy stream": "default stream",
    "STREAM_CAPTURE_IMPLICIT": "default stream",
    "STREAM_CAPTURE_UNJOINED": "unjoined stream",
    # cuBLAS, cuSOLVER and cuSPARSE; cuDNN; cuFFT, which has a plan for each shape.
    "Create(handle)": "first use",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED": "first use",
    "CUFFT_INTERNAL_ERROR": "first use",
}
_WHERE = "cgraph.explain(function, ...) names the operator and its line"
_OPTIMIZERS = os.path.join("torch", "optim", "")
_UNPINNED = "unless the CPU tensor is pinned"
_CAPTURE_CODES = range(900, 909)


@dataclass(frozen=True)
class Finding:
    """One thing on one line that a capture would refuse or freeze.

    Attributes:
        kind: The kind, in at most two words, as ``"host read"``.
        severity: ``"refused"``: a capture fails there. ``"frozen"``: it goes on, and replays keep
            the values of the capture.
        operator: The operator or function, as ``aten.item`` or ``torch.cuda.synchronize``.
        file: The innermost file outside torch and cgraph.
        line: Its line.
        source: The line's text; empty if there is no file.
        count: The number of times that the line did it.
        fix: The remedy.
    """

    kind: str
    severity: str
    operator: str
    file: str
    line: int
    source: str
    count: int
    fix: str

    @property
    def place(self) -> str:
        """The file's name and folder, and the line."""
        return short_place(f"{self.file}:{self.line}")


class Log:
    """A count of findings by line, except those of breaks, which stay eager."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str, _source.Place], int] = {}
        self._is_aside = False

    def run(self, work: Work, args: Any, kwargs: Any) -> Any:
        """Run a break; see :class:`cgraph.breaks.Breakable`."""
        before, self._is_aside = self._is_aside, True
        try:
            return work.fn(*args, **kwargs)
        finally:
            self._is_aside = before

    def add(self, kind: str, operator: str, place: _source.Place) -> None:
        """Note that a line did something."""
        if self._is_aside:
            return
        if kind == "host read" and any(
            (known, at) == ("optimizer", place) for known, _, at in self._counts
        ):
            # The optimizer reads its count of steps.
            return
        key = kind, operator, place
        self._counts[key] = self._counts.get(key, 0) + 1

    def refuses(self, place: _source.Place) -> bool:
        """Return whether something that a capture refuses was noted for a line."""
        return any(
            KINDS[kind].severity == "refused" and at == place for kind, _, at in self._counts
        )

    def findings(self) -> tuple[Finding, ...]:
        """Return the findings, in the order in which they first happened."""
        found = []
        for (kind, operator, (file, line)), count in self._counts.items():
            advice = KINDS[kind]
            source = linecache.getline(file, line).strip()
            found.append(
                Finding(kind, advice.severity, operator, file, line, source, count, advice.fix)
            )
        return tuple(found)


def blame(error: BaseException, is_broken: bool) -> str | None:
    """Return the user's line behind a capture's failure, the problem, and the fix.

    Args:
        error: The exception from the capture's block.
        is_broken: True if the driver says that the capture became unusable.

    Returns:
        One line; None if the exception is the user's own.
    """
    found = _blamed(error, is_broken)
    if found is None:
        return None
    kind, level = found
    file, line = level.tb_frame.f_code.co_filename, level.tb_lineno
    source = linecache.getline(file, line).strip()
    where = short_place(f"{file}:{line}") + (f" `{source}`" if source else "")
    return f"{where}: {KINDS[kind].what}: {KINDS[kind].fix}"


def fix_of(error: BaseException) -> str | None:
    """Return the fix for a capture's failure; None if it is not known."""
    found = _blamed(error, is_broken=False)
    if found is not None:
        kind = found[0]
    elif isinstance(error, CaptureError):
        kind = _kind_at_end(error)
    else:
        return None
    if kind == "unknown":
        return None
    return KINDS[kind].fix if found is not None else f"{KINDS[kind].fix}; {_WHERE}"


def blame_at_end(error: CaptureError) -> str | None:
    """Return why a capture cannot end, and how to find the line; None if not known."""
    kind = _kind_at_end(error)
    said = f"the function {KINDS[kind].what}: {KINDS[kind].fix}; {_WHERE}"
    return None if kind == "unknown" else said


def _kind_at_end(error: CaptureError) -> str:
    """Return the kind of a failure that happens in no line of the user's."""
    return next((kind for part, kind in _TEXTS.items() if part in str(error)), "unknown")


def _blamed(error: BaseException, is_broken: bool) -> tuple[str, TracebackType] | None:
    """Return the kind of a capture's failure, and the user's innermost frame."""
    text = _text(error)
    frames = list(_levels(error.__traceback__))
    mine = [place for place, level in enumerate(frames) if _is_users(level)]
    if not mine or not _is_of_capture(error, text, is_broken, frames[-1]):
        return None
    level, inner = frames[mine[-1]], frames[mine[-1] + 1 :]
    kind = _kind(text or "", level, [one.tb_frame.f_code.co_name for one in inner])
    steps = [one for one in map(_capturable_at, inner) if one is not None]
    if steps:
        # An optimizer that is already capturable has failed for another reason.
        kind = "unknown" if all(steps) else "optimizer"
    if kind == "unknown" and isinstance(error, CgraphError):
        return None  # its own text says more
    return kind, level


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
    return any(part in text for part, kind in _TEXTS.items() if kind == "first use")


def _kind(text: str, level: TracebackType, inner: list[str]) -> str:
    """Return the kind of a failure, from its text, the user's frame and the frames inside it."""
    for part, kind in _TEXTS.items():
        if part in text:
            return kind
    operators = re.findall(r"\baten\.(\w+)", text)
    segment = _segment(level).strip()
    names = [*re.findall(r"\b(\w+)\s*\(", segment), *inner]
    known = [_CALLS[name] for name in (*operators, *names) if name in _CALLS]
    operation = _operation(level)
    if operation.startswith(("POP_JUMP", "JUMP_IF", "TO_BOOL", "UNARY_NOT")):
        return "branch"
    if known:
        return known[0] if operators and operators[0] in REFUSED else known[-1]
    if _UNPINNED in text:
        return "host copy"
    return "shape" if segment.endswith("]") or "SUBSCR" in operation else "unknown"


def _levels(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _is_users(level: TracebackType) -> bool:
    return not _source.is_omitted(level.tb_frame.f_code.co_filename)


def _is_raised_by_user(last: TracebackType) -> bool:
    return _is_users(last) and _operation(last) == "RAISE_VARARGS"


def _operation(level: TracebackType) -> str:
    """Return the instruction of Python's that was running in a frame."""
    code, place = level.tb_frame.f_code.co_code, level.tb_lasti
    name = dis.opname[code[place]] if 0 <= place < len(code) else ""
    # Python 3.13 compares and tests the result in one instruction.
    is_asked = name == "COMPARE_OP" and sys.version_info >= (3, 13) and code[place + 1] & 16
    return "TO_BOOL" if is_asked else name


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
