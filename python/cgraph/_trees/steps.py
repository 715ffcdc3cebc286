"""The steps of the program, which trees follow."""

from __future__ import annotations

import sys
from typing import Any

from cgraph import _core

__all__ = ["follow_torch", "mark_step", "steps"]

steps = _core.StepSource()
"""The step that a call belongs to."""


class _Marks:
    """The steps that cgraph was told of."""

    count = 0


steps.follow(_Marks, "count", is_mark=True)
_followed: set[str] = set()


def mark_step() -> None:
    """Begin a step."""
    _Marks.count += 1


def follow_torch() -> None:
    """Let steps of torch's compiler and its marks count, once they are loaded."""
    for module, box, name, is_mark in _OF_TORCH:
        loaded: Any = sys.modules.get(module)
        if loaded is not None and module not in _followed:
            steps.follow(getattr(loaded, box), name, is_mark=is_mark)
            _followed.add(module)


_OF_TORCH = (
    ("torch._inductor.cudagraph_trees", "MarkStepBox", "mark_step_counter", True),
    ("torch._dynamo.mutation_guard", "GenerationTracker", "generation", False),
)
