"""Modules whose calls are replays, with results that are the caller's own."""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cgraph import _core, _driver, _torch
from cgraph._given import require_type
from cgraph._trees.cudagraphify import Cudagraphified
from cgraph._trees.function import Description
from cgraph._trees.options import TreeOptions
from cgraph.errors import ArgumentError

__all__ = ["CudaGraphModule"]


class CudaGraphModule(torch.nn.Module):
    """A module that runs once, is captured in the second call, and is replayed from then on.

    Replays copy the arguments, and clone what they return: results stay right for good, share
    memory among each other, and are views of arguments where those of the module are. What the
    module writes to its arguments is written to those of each call. Where these share memory with
    others, it runs as it is. Tensors have the shapes of the first call, other arguments its types;
    each combination of numbers has a graph. It records no gradients, and hooks do not run.

    Args:
        gm: The module, as a graph of AOTAutograd's; it takes tensors and numbers.
        mutated_inputs: The places of the arguments that it writes.
        statics: The places of arguments that stay where they are, as weights; not copied.
        sizes: The sizes that may differ, with a graph for each: the place of an argument, and the
            number of its dimension.
        name: Its name, for people.
        mode: ``"inference"``, or ``"backward"``: then only those of ``statics`` stay in place that
            did so in other calls.
        options: The options, as of ``torch.compile(backend="cgraph_aot", options=...)``.

    >>> import torch, cgraph
    >>> with cgraph.sim.use():
    ...     module = cgraph.aot.CudaGraphModule(torch.nn.ReLU(), set())
    ...     results = [module(torch.tensor([float(n), -1.0])) for n in range(4)]
    ...     print(results[1], results[3])
    tensor([1., 0.]) tensor([3., 0.])
    """

    def __init__(
        self,
        gm: torch.nn.Module | Callable[..., Any],
        mutated_inputs: Collection[int],
        *,
        statics: Sequence[int] = (),
        sizes: Sequence[tuple[int, int]] = (),
        name: str = "a graph module",
        mode: str = "inference",
        options: Mapping[str, Any] | TreeOptions | None = None,
    ) -> None:
        super().__init__()
        require_type("gm", gm, (torch.nn.Module, Callable), "a module or a function")
        require_type("mutated_inputs", mutated_inputs, Collection, "places of inputs")
        self.gm = gm
        self.mutated_inputs = set(mutated_inputs)
        self._statics, self._sizes = statics, sizes
        self._options = TreeOptions.of(options)
        self._name, self._mode = name, mode
        # Those that are written in place where the module is captured.
        self._in_place = self.mutated_inputs.intersection(statics)
        self._copied_back = sorted(self.mutated_inputs.difference(statics))
        # From the first call that has returned on.
        self._graphs: Cudagraphified | None = None
        self._types: list[type] | None = None
        # Outside of captures, torch's attention returns its random state on the host.
        self._on_host: set[int] = set()
        # By the arguments that are no tensors, and the sizes.
        self._forms: dict[tuple[Any, ...], _Form] = {}
        self._last: _Statics | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which has no graphs yet."""
        return {**vars(self), "_graphs": None, "_types": None, "_forms": {}, "_last": None}

    @torch.no_grad()
    def __call__(self, *args: Any) -> Any:
        """Run the module, or replay its graph.

        Raises:
            ArgumentError: The arguments are not like those of the first call.
        """
        # Those that stay were looked at in the call before.
        last = self._last if self._last is not None and self._last.are(args) else None
        places: Sequence[int] = range(len(args)) if last is None else last.others
        self._require_types(args, places)
        sizes = [args[place].shape[dimension] for place, dimension in self._sizes]
        form = self._form([*args, *sizes])
        inputs = [*args]
        if form.layouts is not None and not self._lay_out(inputs, form.layouts, places):
            return self.gm(*args)
        graphs = self._in_graphs(inputs) if self._graphs is None else self._graphs
        if self._writes_shared(args, last):
            return self.gm(*args)
        results = graphs([*inputs, *sizes])
        for place in reversed(self._copied_back):
            args[place].copy_(results.pop())
        if form.layouts is None:
            self._graphs, self._types = graphs, [_type(one) for one in args]
            self._on_host.update(place for place, one in enumerate(args) if _is_on_host(one))
            form.layouts = [self._layout(place, one) for place, one in enumerate(args)]
        if last is None and self._mode != "backward":
            # What is static in a backward pass may move in each call.
            self._last = _Statics(args, self._statics)
        own = _torch.clone_together(results)
        for place, alias in form.aliases.items():
            own[place] = alias.over(inputs)
        return _torch.tree_unflatten(own, form.structure)

    def _run(self, inputs: list[Any]) -> list[Any]:
        """Run the module on copies of what it writes; return these behind its results."""
        form = self._form(inputs)
        taken = inputs[: len(inputs) - len(self._sizes)]
        inputs.clear()
        for place in self._copied_back:
            taken[place] = _torch.clone_with_strides(taken[place])
        written = [taken[place] for place in self._copied_back]
        memories = [_memory(one) for one in taken]
        leaves, form.structure = _torch.tree_flatten(self.gm(*_popped(taken)))
        form.aliases = _aliases(leaves, memories)
        # What lies in an argument is made from that of each call.
        for place in form.aliases:
            leaves[place] = None
        return [*leaves, *written]

    def _form(self, values: Sequence[Any]) -> _Form:
        """Return the form of calls with these arguments and sizes."""
        key = tuple(None if isinstance(one, torch.Tensor) else one for one in values)
        return self._forms.setdefault(key, _Form())

    def _in_graphs(self, inputs: Sequence[Any]) -> Cudagraphified:
        devices = (one.device for one in inputs if isinstance(one, torch.Tensor))
        found = [one.index for one in devices if one.type == _driver.current().device_type]
        index = next((one for one in found if one is not None), 0)
        graph = getattr(self.gm, "graph", None)
        return Cudagraphified(
            self._run,
            index,
            Description(
                self._name,
                self._mode,
                self._statics,
                self._in_place,
                self._options,
                operators=_torch.foreign_operators(graph) if graph is not None else (),
            ),
            may_be_on_host=True,
        )

    def _require_types(self, args: Sequence[Any], places: Sequence[int]) -> None:
        """Raise unless there are as many arguments, and of the same types, as in the first call.

        Args:
            args: The arguments.
            places: The places of those that may be others than in the call before.
        """
        if self._types is None:
            wrong = [one for one in self.mutated_inputs if not 0 <= one < len(args)]
            if wrong:
                raise ArgumentError(
                    f"mutated_inputs of {self._name} has {wrong}, expected places of its"
                    f" {len(args)} arguments"
                )
            return
        if len(args) != len(self._types):
            raise ArgumentError(
                f"{len(args)} arguments of {self._name}, expected {len(self._types)}"
            )
        for place in places:
            given, expected = _type(args[place]), self._types[place]
            if given is not expected:
                raise ArgumentError(
                    f"argument {place} of {self._name} is a {given.__name__}, expected a"
                    f" {expected.__name__} as in the first call"
                )

    def _lay_out(
        self, inputs: list[Any], layouts: Sequence[_Layout | None], places: Sequence[int]
    ) -> bool:
        """Lay each argument at these places out as the first one in its place.

        Return False if one cannot be: hooks on saved tensors have spread out an expanded one.
        """
        for place in places:
            given, expected = inputs[place], layouts[place]
            found = self._layout(place, given)
            if expected is None or found == expected:
                continue
            is_other = found is None or found[:-1] != expected[:-1]
            # A graph reads those that stay where they are; what a forward pass has saved may not.
            is_backward = self._mode == "backward"
            stays = place in self._in_place or (place in self._statics and not is_backward)
            is_expanded = 0 in expected[-1]
            if is_expanded and is_backward and not is_other:
                return False
            if is_other or stays or is_expanded:
                raise ArgumentError(
                    f"argument {place} of {self._name} is a tensor {_shown(found)}, expected one"
                    f" {_shown(expected)} as in the first call"
                )
            inputs[place] = given.new_empty_strided(given.shape, expected[-1]).copy_(given)
        return True

    def _layout(self, place: int, value: Any) -> _Layout | None:
        """Return what must be as in the first call, and the strides, which copies change."""
        if not isinstance(value, torch.Tensor):
            return None
        device = None if place in self._on_host else value.device
        return value.shape, value.dtype, device, value.stride()

    def _writes_shared(self, args: Sequence[Any], last: _Statics | None) -> bool:
        """Return whether an argument shares memory with one that the module writes.

        Args:
            args: The arguments.
            last: What is known of those that stay; None if nothing is.
        """
        if not self.mutated_inputs:
            return False
        written = {_torch.start_of(args[place]) for place in self.mutated_inputs}
        places = range(len(args)) if last is None else last.others
        given = (args[place] for place in places)
        starts = [_torch.start_of(one) for one in given if isinstance(one, torch.Tensor)]
        known = 0 if last is None else sum(last.starts[start] for start in written)
        return known + sum(start in written for start in starts) > len(written)


class _Statics:
    """Arguments that stay where they are, as they were in a call.

    Args:
        args: The arguments.
        places: The places of those that stay.

    Attributes:
        others: The places of the others.
        starts: How many of them lie in memory that begins at each address.
    """

    def __init__(self, args: Sequence[Any], places: Sequence[int]) -> None:
        staying = {place for place in places if isinstance(args[place], torch.Tensor)}
        self.others = [place for place in range(len(args)) if place not in staying]
        self.starts = collections.Counter(_torch.start_of(args[place]) for place in staying)
        reader = _torch.tensor_reader()
        self._count = len(args)
        self._same = _core.SamePlaces(reader, tuple(args), sorted(staying))

    def are(self, args: tuple[Any, ...]) -> bool:
        """Return whether other arguments have the same tensors, with the same memory."""
        return len(args) == self._count and self._same.moved(args) is None


_Layout = tuple[torch.Size, torch.dtype, torch.device | None, tuple[int, ...]]


def _shown(layout: _Layout | None) -> str:
    if layout is None:
        return "without a layout"
    shape, dtype, device, strides = layout
    return f"of shape {tuple(shape)} and strides {strides}, {dtype}, on {device}"


@dataclass
class _Alias:
    """A result that lies in an argument.

    Attributes:
        argument: The place of the argument.
        offset: The number of elements between the begins of both.
        like: The shape, the strides, and whether the result is conjugated or negative.
    """

    argument: int
    offset: int
    like: tuple[torch.Size, tuple[int, ...], bool, bool]

    def over(self, arguments: Sequence[Any]) -> torch.Tensor:
        """Return the result of a call with other arguments."""
        given = arguments[self.argument]
        shape, strides, is_conj, is_neg = self.like
        view = given.as_strided(shape, strides, given.storage_offset() + self.offset)
        return _torch.lazy_view(view, is_conj, is_neg)


@dataclass
class _Form:
    """The form of calls with the same numbers.

    Attributes:
        layouts: The layouts of the arguments, once a call has returned.
        aliases: The results that lie in arguments, by place.
        structure: How results are put together.
    """

    layouts: list[_Layout | None] | None = None
    aliases: dict[int, _Alias] = field(default_factory=dict)
    structure: Any = None


def _aliases(results: Sequence[Any], memories: Sequence[_Memory | None]) -> dict[int, _Alias]:
    """Return which results lie in arguments, whose memories these are."""
    begins = {memory[:2]: (place, memory[2]) for place, memory in enumerate(memories) if memory}
    found = {}
    for place, one in enumerate(results):
        memory = _memory(one)
        if memory is not None and memory[:2] in begins:
            argument, offset = begins[memory[:2]]
            like = one.shape, one.stride(), one.is_conj(), one.is_neg()
            found[place] = _Alias(argument, memory[2] - offset, like)
    return found


_Memory = tuple[int, torch.dtype, int]


def _memory(value: Any) -> _Memory | None:
    """Return where a tensor's memory begins, its dtype, and its offset; None without memory."""
    if not isinstance(value, torch.Tensor) or not (start := _torch.start_of(value)):
        return None
    return start, value.dtype, int(value.storage_offset())


def _is_on_host(value: Any) -> bool:
    is_cpu = isinstance(value, torch.Tensor) and value.is_cpu
    return is_cpu and _driver.current().device_type != "cpu"


def _type(value: Any) -> type:
    return torch.Tensor if isinstance(value, torch.Tensor) else type(value)


def _popped(taken: list[Any]) -> Iterator[Any]:
    while taken:
        yield taken.pop(0)
