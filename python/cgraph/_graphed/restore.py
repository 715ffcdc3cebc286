"""Restoration of guarded places after a capture that broke, for the call to be made again."""

from __future__ import annotations

from collections import deque
from typing import Any

from cgraph._graphed.guards import Guards
from cgraph._python.places import NOTHING, found_at
from cgraph._python.values import attributes_of

__all__ = ["Restore"]


class Restore:
    """The values at the guarded places of a key when this is made.

    Args:
        guards: The guards of the places, all of which hold.
    """

    def __init__(self, guards: Guards) -> None:
        self._values = [
            (holder, step, found_at(holder, step)) for holder, step in guards.steps
        ]
        # The other items of containers are not guarded one by one.
        self._containers = [(one, _copied(one)) for one in guards.containers]

    def put_back(self) -> None:
        """Restore the value of each place."""
        for container, items in self._containers:
            if isinstance(container, dict):
                dict.clear(container)
                dict.update(container, items)
            elif isinstance(container, set):
                set.clear(container)
                set.update(container, items)
            elif isinstance(container, list | deque):
                container.clear()
                container.extend(items)
        for holder, step, value in self._values:
            if found_at(holder, step) is not value:
                _put(holder, step, value)


def _copied(container: Any) -> Any:
    if isinstance(container, dict):
        return dict(dict.items(container))
    return set(container) if isinstance(container, set) else [*container]


def _put(holder: Any, step: tuple[Any, ...], value: Any) -> None:
    """Put a value at a place without running code of the user."""
    kind, *rest = step
    if kind == "attr":
        if value is NOTHING:
            attributes_of(holder).pop(rest[0], None)
        else:
            attributes_of(holder)[rest[0]] = value
    elif kind == "cell" and value is not NOTHING:
        holder.cell_contents = value
    elif kind == "slot" and value is not NOTHING:
        rest[0].__set__(holder, value)
    elif kind == "grad":
        holder.grad = value
    elif kind == "class":
        setattr(holder, rest[0], value)
    elif kind == "item" and isinstance(holder, dict):
        holder[rest[0]] = value
