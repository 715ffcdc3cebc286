"""Functions of graph trees."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import Self

from cgraph import _core, _torch
from cgraph._trees.options import TreeOptions

__all__ = ["RESET", "Description", "Function", "Model"]

Model = Callable[[list[Any]], Sequence[Any]]
"""A function that takes a list of inputs, empties it, and returns a sequence."""


@dataclass(frozen=True)
class Description:
    """The description of a function by its compiler.

    Attributes:
        name: Its name, for people.
        mode: ``"inference"``, ``"forward"`` or ``"backward"``.
        statics: The places of inputs that stay where they are.
        mutated: The places of inputs that it writes.
        options: Its options.
        placeholders: What Inductor knows of its inputs.
        pair: The number that a forward pass and its backward pass share, if that is known.
        part: Its number among the parts of its pass.
        names: What users call the inputs of the whole graph.
        operators: The operators of the whole graph that are not torch's.
    """

    name: str
    mode: str
    statics: Collection[int]
    mutated: Collection[int]
    options: TreeOptions
    placeholders: Sequence[Any] = ()
    pair: int | None = None
    part: int = 0
    names: Sequence[str] = ()
    operators: Sequence[str] = ()

    @property
    def keeps_held(self) -> bool:
        """True if outputs that are held when their step ends get memory of their own."""
        return self.mode == "backward" or self.options.held_outputs == "keep"

    def input(self, place: int) -> str:
        """Return the number of an input, with its name and line if they are known."""
        return _torch.described_input(self.placeholders, place, self.names)


class Function(_core.TreeFunction):
    """A function whose calls are replays of the nodes of a tree.

    Attributes:
        tree: The tree.
        description: What its compiler says of it.
        run: The function as it was written.
        message: The error of who accesses an output that a call of it has overwritten.
        keeps: It keeps tensors that it makes and does not return.
        statics: The storages of the inputs that stayed in place in the last recording, by place.
    """

    tree: _core.Tree
    description: Description
    run: Model
    message: str
    keeps: bool
    statics: dict[int, _torch.WeakStorage]

    def __new__(
        cls,
        tree: _core.Tree,
        model: Model,
        inputs: int,
        description: Description,
        *,
        elsewhere: Sequence[int] = (),
    ) -> Self:
        """Add a function to a tree.

        A call runs uncaptured while an input at one of the places ``elsewhere`` is on the host.
        """
        statics, mutated = sorted(set(description.statics)), sorted(set(description.mutated))
        limit = description.options.max_rerecords
        place = description.pair, description.part
        number = tree.add(description.mode, statics, mutated, limit, *place)
        message = _OVERWRITTEN.format(name=description.name)
        function = super().__new__(cls, tree, number, model, inputs, message, elsewhere)
        function.tree, function.description = tree, description
        function.message, function.run = message, model
        function.keeps, function.statics = False, {}
        return function


_OVERWRITTEN = (
    "Error: accessing tensor output of CUDAGraphs that has been overwritten by a subsequent run. It"
    " belongs to a step that ended with the call of {name}. To prevent overwriting, clone the"
    " tensor outside of torch.compile() before the next step"
    " (torch.compiler.cudagraph_mark_step_begin() says where steps begin)"
)
RESET = _OVERWRITTEN.format(name="reset()")
"""The same after a reset, in a torch where outputs cannot get memory of their own."""
