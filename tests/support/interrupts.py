"""Interrupts, as by Ctrl-C, at chosen places of cgraph's own Python code.

None comes in what a GPU does in one call, and in the contexts of streams: nothing in Python can
protect the end of a ``with`` block.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["interrupt_at"]


@contextmanager
def interrupt_at(number: int, kept: list[BaseException] | None = None) -> Iterator[list[bool]]:
    """Interrupt the block where the function of this number is entered; tell whether one was.

    The interrupt goes to ``kept``, as a console keeps the last one with its frames.
    """
    found, count = [False], 0

    def signal(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        code = frame.f_code
        # Python itself drops what a finalizer raises.
        may_raise = code.co_name != "__del__" and not _is_left_out(frame)
        if event == "call" and "cgraph" in code.co_filename and may_raise:
            count += 1
            if count == number:
                sys.setprofile(None)
                found[0] = True
                raise KeyboardInterrupt

    try:
        sys.setprofile(signal)
        yield found
    except KeyboardInterrupt as error:
        if kept is not None:
            kept.append(error)
    finally:
        sys.setprofile(None)


def _is_left_out(frame: FrameType | None) -> bool:
    while frame is not None:
        if any(part in frame.f_code.co_filename for part in ("_captures", "_torch/host.py")):
            return True
        frame = frame.f_back
    return False
