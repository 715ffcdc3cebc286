"""Numbers and tables in readable form."""

from __future__ import annotations

import difflib
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import TextIO, overload

__all__ = [
    "first_line",
    "in_time",
    "in_units",
    "plural",
    "print_fitted",
    "printable",
    "short_place",
    "shown",
    "table",
]

# XML can hold no other characters, not even escaped.
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def first_line(error: BaseException) -> str:
    r"""Return the first line of an error, without the rest of torch's long texts.

    >>> first_line(ValueError("CUDA error: invalid argument\nSearch for ..."))
    'CUDA error: invalid argument'
    """
    try:
        text = str(error)
    except Exception:  # a user's class may raise anything
        text = type(error).__qualname__
    return text.strip().split("\n", maxsplit=1)[0]


def print_fitted(text: object, file: TextIO | None = None) -> None:
    """Print tables and sentences; on a terminal cut and wrap them to its width.

    Args:
        text: What is printed.
        file: Where, by default standard output.
    """
    out = sys.stdout if file is None else file
    lines = str(text).splitlines()
    if out.isatty():
        width = max(20, shutil.get_terminal_size().columns)
        lines = [part for line in lines for part in _fitted(line, width)]
    print("\n".join(lines), file=out)


def _fitted(line: str, width: int) -> list[str]:
    """Return a line in parts of a width; a table's line is cut."""
    if len(line) <= width:
        return [line]
    is_of_table = "  " in line.strip() or "─" in line
    if is_of_table:
        return [f"{line[: width - 1]}…"]
    return textwrap.wrap(line, width, subsequent_indent="  ", break_on_hyphens=False)


def shown(value: object) -> str:
    """Return the ``repr`` of a value, or that of ``object`` where its own raises."""
    try:
        return repr(value)
    except Exception:  # a user's class may raise anything
        return object.__repr__(value)


def in_time(seconds: float) -> str:
    """Return seconds in readable form, with three significant digits.

    >>> in_time(41e-6), in_time(-1.5e-6), in_time(0.0123456), in_time(1234.5)
    ('41 µs', '-1.5 µs', '12.3 ms', '1,234 s')
    """
    value = seconds * 1e6
    for unit in ("µs", "ms"):
        if abs(value) < 999.5:
            return f"{round(value, 3):.3g} {unit}"
        value /= 1e3
    return f"{value:.3g} s" if abs(value) < 999.5 else f"{value:,.0f} s"


def in_units(count: int | None) -> str:
    """Return bytes in readable form; a dash for an unknown number.

    >>> in_units(512), in_units(35_232_154), in_units(3 << 30), in_units(None)
    ('512 B', '33.6 MiB', '3.0 GiB', '-')
    """
    if count is None:
        return "-"
    if count < 1024:
        return f"{count} B"
    value = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if value < 1023.95:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:.1f} TiB"


@overload
def short_place(place: str) -> str: ...


@overload
def short_place(place: None) -> None: ...


def short_place(place: str | None) -> str | None:
    """Return a line of a file by the file's name and folder; None for no line.

    >>> short_place("/home/me/project/train.py:31"), short_place("<stdin>:1")
    ('project/train.py:31', '<stdin>:1')
    """
    return None if place is None else "/".join(place.split("/")[-2:])


def nearest(given: object, known: Iterable[str]) -> str | None:
    """Return the known name that is most like a given one; None if none is.

    >>> nearest("capture_size", ["capture_sizes", "warmups"]), nearest("x", ["warmups"])
    ('capture_sizes', None)
    """
    return next(iter(difflib.get_close_matches(str(given), [*known], n=1)), None)


def plural(count: int, noun: str) -> str:
    """Return a count with its noun.

    >>> plural(1, "node"), plural(1234, "node")
    ('1 node', '1,234 nodes')
    """
    return f"{count} {noun}" if count == 1 else f"{count:,} {noun}s"


def printable(text: str) -> str:
    """Return text with U+FFFD in place of each character that no page can hold.

    >>> printable(f"a{chr(0)}b") == f"a{chr(0xFFFD)}b"
    True
    """
    return _NOT_XML.sub("\ufffd", text)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Align columns: words to the left, cells that begin with a digit or a dash to the right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = []
        for place, (cell, width) in enumerate(zip(row, widths, strict=True)):
            numeric = all(other[place][:1] in "0123456789-" for other in rows)
            cells.append(cell.rjust(width) if numeric else cell.ljust(width))
        return "  ".join(cells).rstrip()

    rule = "  ".join("─" * width for width in widths)
    return "\n".join([line(head), rule, *map(line, rows)])
