"""What calls and replays change in Python that are tried out, and nobody has asked for."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from cgraph._state.attributes import Attributes
from cgraph._state.drawing import RandomOfPython
from cgraph._state.hidden import has_any
from cgraph._state.holders import put_back_numbers, put_back_tensors
from cgraph._state.kept import IsMade, changed_in, put_back_items
from cgraph._state.search import Found

__all__ = ["Undone"]


class Undone:
    """Numbers, texts and tensors where a function finds them, as they are now.

    Args:
        dictionaries: What holds the attributes that it may set.
        found: Where else it finds them.
        is_made: Tells which tensors are made from now on.
    """

    def __init__(
        self, dictionaries: Sequence[dict[str, Any]], found: Found, is_made: IsMade
    ) -> None:
        self._attributes = Attributes([*dictionaries, *found.attributes], found.dictionaries)
        self._found = found
        self._has_made = functools.partial(has_any, is_made)
        self._random = RandomOfPython.where(shared=found.draws, own=found.generators)

    def put_back(self) -> None:
        """Let all be as it was."""
        found = self._found
        self._attributes.put_back_new(self._has_made, None)
        self._attributes.put_back_others(numbers=True, made=self._attributes.made_of_objects)
        put_back_numbers([*found.numbers, *found.empty, *found.far])
        put_back_tensors(found.all_holders)
        put_back_items(one for one in found.lists if changed_in(*one, found.takes_items))
        for array, before in found.arrays:
            array[...] = before
        if self._random is not None:
            self._random.put_back()
