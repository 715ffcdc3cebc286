"""Functions that are graphed with debug words, and comparisons of their errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import cgraph

__all__ = ["MANY", "WORDS", "Unseen", "equal", "graphed", "line_of"]

WORDS = ["sync", "compare", "poison"]
MANY = [*WORDS, "sync,compare", "compare, poison", "sync,compare,poison"]


class Unseen:
    """A value whose change a graphed function cannot see: code reads it under a computed name."""

    def __init__(self, value: Any) -> None:
        self.kept = value

    def __getitem__(self, place: int) -> Any:
        return getattr(self, "".join(["ke", "pt"]))

    def __setitem__(self, place: int, value: Any) -> None:
        self.kept = value


def line_of(path: str, text: str) -> str:
    """Return the line of a text in a file, as errors name it."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if text in line and "line_of" not in line]
    return f"{Path(path).parent.name}/{Path(path).name}:{number}"


def graphed(function: Callable[..., Any], debug: str, **options: Any) -> Any:
    """Return the function, to be debugged; failures come out."""
    return cgraph.graphed(function, debug=debug, on_fail="raise", **options)


def equal(found: Any, expected: Any) -> bool:
    """Return whether two results are alike up to rounding."""
    pairs = zip(
        torch.utils._pytree.tree_leaves(found),
        torch.utils._pytree.tree_leaves(expected),
        strict=True,
    )
    return all(
        torch.allclose(a, b, rtol=1e-5, atol=1e-6) if isinstance(a, Tensor) else a == b
        for a, b in pairs
    )
