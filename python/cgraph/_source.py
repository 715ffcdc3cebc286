"""Whose line of Python it was."""

from __future__ import annotations

import sys

__all__ = ["levels_to_user"]


def levels_to_user() -> int:
    """How many calls up the first one is that is not cgraph's, for a warning."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("cgraph."):
        level, frame = level + 1, frame.f_back
    return level
