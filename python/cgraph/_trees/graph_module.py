"""Modules whose calls are replays, with results that are the caller's own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cgraph import _driver, _torch
from cgraph._trees.cudagraphify import Cudagraphified
from cgraph._trees.options import TreeOptions
from cgraph.errors import ArgumentError

__all__ = ["CudaGraphModule", "cloner"]


def cloner(value: Any) -> Any:
    """Return a clone of a tensor; anything else as it is."""
    return value.clone() if isinstance(value, torch.Tensor) else value


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
        # By the arguments that are no tensors, and the sizes: the layouts of the tensors, which
        # results lie in arguments, and how results are put together.
        self._layouts: dict[tuple[Any, ...], list[_Layout | None]] = {}
        self._aliases: dict[tuple[Any, ...], dict[int, _Alias]] = {}
        self._structures: dict[tuple[Any, ...], Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which has no graphs yet."""
        new: dict[str, Any] = {"_layouts": {}, "_aliases": {}, "_structures": {}}
        return {**vars(self), **new, "_graphs": None, "_types": None}

    @torch.no_grad()
    def __call__(self, *args: Any) -> Any:
        """Run the module, or replay its graph.

        Raises:
            ArgumentError: The arguments are not like those of the first call.
        """
        types = [_type(one) for one in args]
        self._require_types(types)
        sizes = [args[place].shape[dimension] for place, dimension in self._sizes]
        key = _key([*args, *sizes])
        layouts = self._layouts.get(key)
        inputs = [*args] if layouts is None else self._laid_out(args, layouts)
        graphs = self._in_graphs(inputs) if self._graphs is None else self._graphs
        if self._writes_shared(args):
            return self.gm(*args)
        results = graphs([*inputs, *sizes])
        for place in reversed(self._copied_back):
            args[place].copy_(results.pop())
        if layouts is None:
            self._graphs, self._types = graphs, types
            self._on_host.update(place for place, one in enumerate(args) if _is_on_host(one))
            self._layouts[key] = [self._layout(place, one) for place, one in enumerate(args)]
        own = _torch.clone_together(results)
        for place, (argument, layout) in self._aliases[key].items():
            own[place] = _over(inputs[argument], layout)
        return _torch.tree_unflatten(own, self._structures[key])

    def _run(self, inputs: list[Any]) -> list[Any]:
        """Run the module on copies of what it writes; return these behind its results."""
        key = _key(inputs)
        taken = inputs[: len(inputs) - len(self._sizes)]
        inputs.clear()
        for place in self._copied_back:
            taken[place] = _torch.clone_with_strides(taken[place])
        written = [taken[place] for place in self._copied_back]
        given = [_Given.of(one) for one in taken]
        results = self.gm(*_popped(taken))
        leaves, self._structures[key] = _torch.tree_flatten(results)
        self._aliases[key] = _aliases(leaves, given)
        # What lies in an argument is made from that of each call.
        for place in self._aliases[key]:
            leaves[place] = None
        return [*leaves, *written]

    def _in_graphs(self, inputs: Sequence[Any]) -> Cudagraphified:
        devices = (one.device for one in inputs if isinstance(one, torch.Tensor))
        found = [one.index for one in devices if one.type == _driver.current().device_type]
        index = next((one for one in found if one is not None), 0)
        return Cudagraphified(
            self._run,
            index,
            self._options,
            name=self._name,
            mode=self._mode,
            statics=self._statics,
            mutated=sorted(self._in_place),
            may_be_on_host=True,
        )

    def _require_types(self, types: Sequence[type]) -> None:
        """Raise unless there are as many arguments, and of the same types, as in the first call."""
        if self._types is None:
            wrong = [one for one in self.mutated_inputs if not 0 <= one < len(types)]
            if wrong:
                raise ArgumentError(
                    f"mutated_inputs of {self._name} has {wrong}, expected places of its"
                    f" {len(types)} arguments"
                )
        elif len(types) != len(self._types):
            raise ArgumentError(
                f"{len(types)} arguments of {self._name}, expected {len(self._types)}"
            )
        else:
            for place, (given, expected) in enumerate(zip(types, self._types, strict=True)):
                if given is not expected:
                    raise ArgumentError(
                        f"argument {place} of {self._name} is a {given.__name__}, expected a"
                        f" {expected.__name__} as in the first call"
                    )

    def _laid_out(self, args: Sequence[Any], layouts: Sequence[_Layout | None]) -> list[Any]:
        """Return the arguments, each laid out as the first one in its place."""
        inputs = [*args]
        for place, (given, expected) in enumerate(zip(args, layouts, strict=True)):
            found = self._layout(place, given)
            if expected is None or found == expected:
                continue
            is_other = found is None or found[:-1] != expected[:-1]
            if is_other or place in self._in_place or 0 in expected[-1]:
                raise ArgumentError(
                    f"argument {place} of {self._name} is a tensor {_shown(found)}, expected one"
                    f" {_shown(expected)} as in the first call"
                )
            inputs[place] = given.new_empty_strided(given.shape, expected[-1]).copy_(given)
        return inputs

    def _layout(self, place: int, value: Any) -> _Layout | None:
        """Return what must be as in the first call, and the strides, which copies change."""
        if not isinstance(value, torch.Tensor):
            return None
        device = None if place in self._on_host else value.device
        return value.shape, value.dtype, device, value.stride()

    def _writes_shared(self, inputs: Sequence[Any]) -> bool:
        """Return whether an argument shares memory with one that the module writes."""
        if not self.mutated_inputs:
            return False
        starts = [_torch.start_of(one) for one in inputs if isinstance(one, torch.Tensor)]
        written = {_torch.start_of(inputs[place]) for place in self.mutated_inputs}
        return sum(start in written for start in starts) > len(written)


_Layout = tuple[torch.Size, torch.dtype, torch.device | None, tuple[int, ...]]


def _shown(layout: _Layout | None) -> str:
    if layout is None:
        return "without a layout"
    shape, dtype, device, strides = layout
    return f"of shape {tuple(shape)} and strides {strides}, {dtype}, on {device}"


@dataclass
class _Given:
    """The place of an argument in memory."""

    start: int
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, value: Any) -> _Given | None:
        if not isinstance(value, torch.Tensor) or not _torch.start_of(value):
            return None
        return cls(_torch.start_of(value), int(value.storage_offset()), value.dtype)


_Alias = tuple[int, tuple[torch.Size, tuple[int, ...], int, bool, bool]]


def _aliases(results: Sequence[Any], given: Sequence[_Given | None]) -> dict[int, _Alias]:
    """Return which results lie in arguments, and how: from where the argument begins."""
    found: dict[int, _Alias] = {}
    for place, one in enumerate(results):
        if not isinstance(one, torch.Tensor) or not _torch.start_of(one):
            continue
        for argument, memory in enumerate(given):
            is_there = memory is not None and memory.start == _torch.start_of(one)
            if memory is not None and is_there and memory.dtype == one.dtype:
                offset = int(one.storage_offset()) - memory.offset
                layout = one.shape, one.stride(), offset, one.is_conj(), one.is_neg()
                found[place] = argument, layout
                break
    return found


def _over(argument: torch.Tensor, layout: tuple[Any, ...]) -> torch.Tensor:
    """Return a view of an argument, as a result is one."""
    shape, strides, offset, is_conj, is_neg = layout
    view = argument.as_strided(shape, strides, argument.storage_offset() + offset)
    return _torch.lazy_view(view, is_conj, is_neg)


def _is_on_host(value: Any) -> bool:
    is_cpu = isinstance(value, torch.Tensor) and value.is_cpu
    return is_cpu and _driver.current().device_type != "cpu"


def _type(value: Any) -> type:
    return torch.Tensor if isinstance(value, torch.Tensor) else type(value)


def _key(values: Sequence[Any]) -> tuple[Any, ...]:
    """Return the values that are no tensors, in their places."""
    return tuple(None if isinstance(one, torch.Tensor) else one for one in values)


def _popped(taken: list[Any]) -> Iterator[Any]:
    while taken:
        yield taken.pop(0)
