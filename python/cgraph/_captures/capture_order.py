"""The order of the captures of many sizes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from tqdm import tqdm  # type: ignore[import-untyped]

__all__ = ["largest_first"]


def largest_first(sizes: Iterable[int], what: str, *, shows: bool) -> Iterator[int]:
    """Yield sizes in the order in which smaller captures have the memory of larger ones.

    Args:
        sizes: The sizes.
        what: The work, for the progress bar.
        shows: True to show a progress bar.
    """
    ordered = sorted(sizes, reverse=True)
    yield from tqdm(
        ordered, desc=what, unit="graph", leave=False, disable=not shows, file=sys.stderr
    )
