"""How code uses the containers that it names: item by item, or as a whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["Place", "Uses"]


class Place(NamedTuple):
    """What code finds by the name of a variable or an attribute, or in a container there.

    Attributes:
        name: The name, with a dot before that of an attribute.
        depth: How many items lead on from there: that of ``self.layers[0]`` is 1.
    """

    name: str
    depth: int


class Uses(NamedTuple):
    """How code uses what it names.

    Attributes:
        named: The names, with a dot before those of attributes.
        wholes: Where it uses something otherwise than by its items, as in a loop.
        tested: Where it asks whether there is something in a container.
        filled: Where it assigns something, puts something into a container, or takes it from there.
        computed: Where it looks items up by keys that are no constants.
        got: Where it calls ``get``, as that of a queue.
        sought: Texts and numbers by which it asks whether containers have them.
        composed: What the names begin and end with that it makes to ask for attributes.
    """

    named: frozenset[str] = frozenset()
    wholes: frozenset[Place] = frozenset()
    tested: frozenset[Place] = frozenset()
    filled: frozenset[Place] = frozenset()
    computed: frozenset[Place] = frozenset()
    got: frozenset[Place] = frozenset()
    sought: frozenset[str | int] = frozenset()
    composed: frozenset[tuple[str, str]] = frozenset()

    def joined(self, *more: Uses) -> Uses:
        """All of them."""
        return Uses(*(one.union(*rest) for one, *rest in zip(self, *more, strict=True)))

    def is_whole(self, way: Iterable[str | None]) -> bool:
        """Whether code may use a container as a whole that others fill.

        Args:
            way: What leads to it, the last one first: names of variables and attributes, keys that
                are texts, and None for others.
        """
        places = self._places(way)
        return places is None or (
            self.filled.isdisjoint(places) and not self.wholes.isdisjoint(places)
        )

    def is_tested(self, way: Iterable[str | None]) -> bool:
        """Whether code asks whether there is something in a container that others fill."""
        places = self._places(way) or set()
        return self.filled.isdisjoint(places) and not self.tested.isdisjoint(places)

    def is_any_read(self, way: Iterable[str | None]) -> bool:
        """Whether code may look at items of a container that it does not name."""
        places = self._places(way)
        return places is None or not (self.wholes | self.computed).isdisjoint(places)

    def is_got_from(self, way: Iterable[str | None]) -> bool:
        """Whether code may call ``get`` on something, or hands it on."""
        places = self._places(way)
        return places is None or not (self.wholes | self.got).isdisjoint(places)

    def composes(self, name: object) -> bool:
        """Whether code may make a name to ask for an attribute."""
        return (
            isinstance(name, str)
            and not name.startswith("__")
            and any(name.startswith(begin) and name.endswith(end) for begin, end in self.composed)
        )

    def _places(self, way: Iterable[str | None]) -> set[Place] | None:
        """Where code comes by a container, and what it is in; None if it names nothing there."""
        for depth, name in enumerate(way):
            if name is None:
                continue
            # What a way begins with may be either.
            for one in (name,) if name.startswith(".") else (f".{name}", name):
                if one in self.named:
                    return {Place(one, above) for above in range(depth + 1)}
        return None
