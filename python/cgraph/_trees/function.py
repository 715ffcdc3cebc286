"""Functions of graph trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from typing_extensions import Self

from cgraph import _core, _torch
from cgraph._trees.options import TreeOptions

__all__ = ["RESET", "Function", "Model"]

Model = Callable[[list[Any]], Sequence[Any]]
"""A function that takes a list of inputs, empties it, and returns a sequence."""


class Function(_core.TreeFunction):
    """A function whose calls are replays of the nodes of a tree.

    Attributes:
        tree: The tree.
        name: Its name, for people.
        mode: ``"inference"``, ``"forward"`` or ``"backward"``.
        statics: The places of inputs that stay where they are.
        mutated: The places of inputs that it writes.
        options: Its options.
        run: The function as it was written.
        message: The error of who accesses an output that a call of it has overwritten.
    """

    tree: _core.Tree
    name: str
    mode: str
    statics: list[int]
    mutated: list[int]
    options: TreeOptions
    run: Model
    message: str
    _placeholders: Sequence[Any]

    def __new__(
        cls,
        tree: _core.Tree,
        model: Model,
        inputs: int,
        options: TreeOptions,
        *,
        name: str,
        mode: str,
        statics: Sequence[int],
        mutated: Sequence[int],
        placeholders: Sequence[Any] = (),
        elsewhere: Sequence[int] = (),
    ) -> Self:
        """Add a function to a tree.

        A call runs uncaptured while an input at one of the places ``elsewhere`` is on the host.
        """
        statics, mutated = sorted(set(statics)), sorted(set(mutated))
        number = tree.add(mode, statics, mutated, options.max_rerecords)
        message = _OVERWRITTEN.format(name=name)
        function = super().__new__(cls, tree, number, model, inputs, message, elsewhere)
        function.message = message
        function.tree, function.name, function.mode = tree, name, mode
        function.statics, function.mutated = statics, mutated
        function.options, function._placeholders = options, placeholders
        function.run = model
        return function

    @property
    def keeps_held(self) -> bool:
        """True if outputs that are held when their step ends get memory of their own."""
        return self.mode == "backward" or self.options.held_outputs == "keep"

    def described(self, place: int) -> str:
        """Return the number of an input, with its name and line if they are known."""
        return _torch.described_input(self._placeholders, place)


_OVERWRITTEN = (
    "Error: accessing tensor output of CUDAGraphs that has been overwritten by a subsequent run. It"
    " belongs to a step that ended with the call of {name}. To prevent overwriting, clone the"
    " tensor outside of torch.compile() before the next step"
    " (torch.compiler.cudagraph_mark_step_begin() says where steps begin)"
)
RESET = _OVERWRITTEN.format(name="reset()")
"""The same after a reset, in a torch where outputs cannot get memory of their own."""
