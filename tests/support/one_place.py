"""Guards on one place, for the tests of them."""

from __future__ import annotations

from typing import Any

from cgraph import _core
from guarded import Plain
from readers import reader_by_fields


def guards_on(root: Any, *steps: tuple[Any, ...], check: tuple[Any, ...]) -> _core.Guards:
    """Return guards on one place at the end of some steps."""
    last = len(steps)
    places: list[Any] = [(-1, ("root", root), check if not steps else ("is", root))]
    for i, step in enumerate(steps):
        places.append(
            (i, step, check if i + 1 == last else ("kind", type(found_by(root, steps[: i + 1]))))
        )
    return _core.Guards(places, reader_by_fields())


def found_by(found: Any, steps: tuple[tuple[Any, ...], ...]) -> Any:
    for kind, *rest in steps:
        if kind == "attr":
            found = vars(found)[rest[0]]
        elif kind == "item":
            found = found[rest[0]]
        else:
            found = found.cell_contents
    return found


def plain(**attributes: Any) -> Plain:
    made = Plain()
    vars(made).update(attributes)
    return made
