"""Numbers and tables as a person reads them."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["in_units", "short_place", "table"]


def in_units(count: int) -> str:
    """Bytes as a person reads them.

    >>> in_units(512), in_units(35_232_154), in_units(3 << 30)
    ('512 B', '33.6 MiB', '3.0 GiB')
    """
    if count < 1024:
        return f"{count} B"
    value = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if value < 1023.95:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:.1f} TiB"


def short_place(place: str) -> str:
    """A line of a file by the file's name and folder.

    >>> short_place("/home/me/project/train.py:31"), short_place("<stdin>:1")
    ('project/train.py:31', '<stdin>:1')
    """
    return "/".join(place.split("/")[-2:])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns: words to the left, cells that begin with a digit or a dash to the right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = []
        for place, (cell, width) in enumerate(zip(row, widths, strict=True)):
            numeric = all(other[place][:1] in "0123456789-" for other in rows)
            cells.append(cell.rjust(width) if numeric else cell.ljust(width))
        return "  ".join(cells).rstrip()

    rule = "  ".join("─" * width for width in widths)
    return "\n".join([line(head), rule, *map(line, rows)])
