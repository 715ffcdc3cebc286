"""The user's Python lines: frames outside torch and cgraph."""

from __future__ import annotations

import dis
import functools
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from types import CodeType, FrameType

import torch

from cgraph._text import short_place

__all__ = [
    "Place",
    "directories",
    "forget_locals",
    "is_branch",
    "is_omitted",
    "levels_to_user",
    "operation",
    "place_of",
    "place_of_function",
    "user_frame",
    "user_frames",
    "user_line",
    "user_place",
]

_Directories = tuple[str, ...]

Place = tuple[str, int]
"""A file and a line in it."""


def directories(paths: Sequence[str]) -> _Directories:
    """Return paths as :func:`user_frames` compares them: absolute, ending in a separator."""
    return tuple(os.path.join(os.path.abspath(path), "") for path in paths)


_OWN = (
    *directories([os.path.dirname(torch.__file__), os.path.dirname(__file__)]),
    # torch's C++ warns through this function, and someone may listen.
    os.path.abspath(warnings.showwarning.__code__.co_filename),
)


def user_line() -> str | None:
    """Return the innermost line outside torch and cgraph, as ``file:line``; None if there is none.

    There is none on threads that only torch's autograd uses.
    """
    place = user_place()
    return None if place is None else f"{place[0]}:{place[1]}"


def user_place(inner: FrameType | None = None) -> Place | None:
    """Return the innermost line outside torch and cgraph, from the caller's or a given frame on."""
    frame = next(_frames(None, inner), None)
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def user_frame() -> FrameType | None:
    """Return the innermost frame outside torch and cgraph."""
    return next(_frames(None), None)


def place_of(error: BaseException) -> str | None:
    """Return the innermost line outside torch and cgraph that an exception came through."""
    found, trace = None, error.__traceback__
    while trace is not None:
        if not is_omitted(trace.tb_frame.f_code.co_filename):
            found = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def place_of_function(function: object) -> str | None:
    """Return the line at which a Python function begins, for a report; None for other callables."""
    code = getattr(function, "__code__", None)
    return None if code is None else short_place(f"{code.co_filename}:{code.co_firstlineno}")


def user_frames(omitted: _Directories | None = None) -> tuple[str, ...]:
    """Return all frames of the user, the innermost last, as ``file:line function``.

    Args:
        omitted: The :func:`directories` whose frames are left out. By default those of torch and
            cgraph, and files that ``torch.compile`` generates.
    """
    frames = [
        f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
        for frame in _frames(omitted)
    ]
    return tuple(reversed(frames))


_BRANCHES = ("POP_JUMP", "JUMP_IF", "TO_BOOL", "UNARY_NOT")


def operation(code: CodeType, place: int) -> str:
    """Return the name of Python's instruction at a place; empty if there is none."""
    name = dis.opname[code.co_code[place]] if 0 <= place < len(code.co_code) else ""
    # Python 3.13 compares and tests the result in one instruction.
    is_asked = name == "COMPARE_OP" and sys.version_info >= (3, 13) and code.co_code[place + 1] & 16
    return "TO_BOOL" if is_asked else name


def is_branch(code: CodeType, place: int) -> bool:
    """Return whether the instruction at a place, or one behind it on its line, asks for a truth."""
    is_here, here = False, 0
    for begin, end, line in code.co_lines():
        if begin <= place < end:
            is_here, here = True, line or 0
        if is_here and line == here:
            places = range(max(begin, place), end, 2)
            if any(operation(code, one).startswith(_BRANCHES) for one in places):
                return True
        is_here = is_here and line == here
    return False


def _frames(omitted: _Directories | None, inner: FrameType | None = None) -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1) if inner is None else inner
    while frame is not None:
        if not is_omitted(frame.f_code.co_filename, omitted):
            yield frame
        frame = frame.f_back


@functools.lru_cache(maxsize=4096)
def is_omitted(file: str, omitted: _Directories | None = None) -> bool:
    """Return whether a file is not the user's; see :func:`user_frames`."""
    if omitted is not None:
        return os.path.abspath(file).startswith(omitted)
    generated = file.startswith(("<frozen ", "<eval_with_key>")) or "/torchinductor_" in file
    return generated or os.path.abspath(file).startswith(_OWN)


def levels_to_user() -> int:
    """Return the number of calls up to the first one outside cgraph and torch, for a warning."""
    level, frame = 1, sys._getframe(1)
    own = ("cgraph", "torch")
    while frame.f_back is not None and (
        str(frame.f_globals.get("__name__", "")).partition(".")[0] in own
        or frame.f_code.co_filename.startswith("<eval_with_key>")
    ):
        level, frame = level + 1, frame.f_back
    return level


def forget_locals(error: BaseException) -> None:
    """Let go the locals of all frames that an exception, and those that led to it, came through."""
    found: BaseException | None = error
    while found is not None:
        traceback.clear_frames(found.__traceback__)
        found = found.__cause__ or found.__context__
