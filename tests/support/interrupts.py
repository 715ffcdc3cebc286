"""Interrupts, as by Ctrl-C, at chosen places of cgraph's own Python code.

None comes in what a GPU does in one call, and in the contexts of streams: nothing in Python can
protect the end of a ``with`` block.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import cgraph

__all__ = ["interrupt_at"]

# A clone may lie in a folder of the same name.
_PACKAGE = f"{Path(cgraph.__file__).parent}/"


@contextmanager
def interrupt_at(
    number: int,
    kept: list[BaseException] | None = None,
    events: Collection[str] = ("call",),
) -> Iterator[list[bool]]:
    """Interrupt the block at the place of this number; tell whether one was.

    Args:
        number: The place.
        kept: The interrupt goes there, as a console keeps the last one with its frames.
        events: The places that count: where functions of Python are entered (``"call"``), and
            where those of native code have returned (``"c_return"``).
    """
    found, count = [False], 0

    def signal(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        code = frame.f_code
        if event in events and code.co_filename.startswith(_PACKAGE) and not _is_left_out(frame):
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
        code = frame.f_code
        # Python itself drops what a finalizer raises.
        if code.co_name == "__del__":
            return True
        if any(part in code.co_filename for part in ("_captures", "_torch/host.py")):
            return True
        frame = frame.f_back
    return False
