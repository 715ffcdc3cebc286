"""Modules whose calls are replays, with results that are the caller's own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from cgraph import _driver, _torch
from cgraph._trees.cudagraphify import Cudagraphified
from cgraph._trees.options import TreeOptions
from cgraph.errors import ArgumentError

__all__ = ["CudaGraphModule"]


class CudaGraphModule(torch.nn.Module):
    """A module that runs once, is captured in the second call, and is replayed from then on.

    Replays copy the arguments, and clone what they return: results stay right for good. What the
    module writes to its arguments is written to those of each call. Where these share memory with
    others, it runs as it is. It records no gradients, and hooks of modules do not run.

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
        options: TreeOptions | None = None,
    ) -> None:
        super().__init__()
        self.gm = gm
        self.mutated_inputs = set(mutated_inputs)
        self._statics, self._sizes = statics, sizes
        self._options = TreeOptions.of(None) if options is None else options
        self._name, self._mode = name, mode
        # Those that are written in place where the module is captured.
        self._in_place = self.mutated_inputs.intersection(statics)
        self._copied_back = sorted(self.mutated_inputs.difference(statics))
        self._graphs: Cudagraphified | None = None
        # By the arguments that are no tensors, and the sizes: the layout of each other argument.
        self._layouts: dict[tuple[Any, ...], list[_Layout | None]] = {}
        self._structure: Any = None

    @torch.no_grad()
    def __call__(self, *args: Any) -> Any:
        """Run the module, or replay its graph.

        Raises:
            ArgumentError: The arguments are not like those of the first call.
        """
        sizes = [args[place].shape[dimension] for place, dimension in self._sizes]
        inputs = self._checked(args, sizes)
        if self._graphs is None:
            self._graphs = self._in_graphs(inputs)
        if self._writes_shared(inputs):
            return self.gm(*args)
        results = self._graphs([*inputs, *sizes])
        for place in reversed(self._copied_back):
            args[place].copy_(results.pop())
        own = [one.clone() if isinstance(one, torch.Tensor) else one for one in results]
        return _torch.tree_unflatten(own, self._structure)

    def _run(self, inputs: list[Any]) -> list[Any]:
        """Run the module on copies of what it writes; return these behind its results."""
        taken = inputs[: len(inputs) - len(self._sizes)]
        inputs.clear()
        for place in self._copied_back:
            taken[place] = _torch.clone_with_strides(taken[place])
        written = [taken[place] for place in self._copied_back]
        results = self.gm(*_popped(taken))
        leaves, self._structure = _torch.tree_flatten(results)
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
        )

    def _checked(self, args: tuple[Any, ...], sizes: Sequence[int]) -> list[Any]:
        """Return the arguments as a list, each laid out as the first one in its place."""
        inputs = [*args]
        numbers = (None if isinstance(one, torch.Tensor) else one for one in inputs)
        key = (*numbers, *sizes)
        layouts = self._layouts.get(key)
        if layouts is None:
            self._require_count(inputs)
            self._layouts[key] = [_layout(one) for one in inputs]
            return inputs
        for place, (given, expected) in enumerate(zip(inputs, layouts, strict=True)):
            found = _layout(given)
            if found == expected:
                continue
            is_other = found is None or expected is None or found[:-1] != expected[:-1]
            if is_other or place in self._in_place:
                raise ArgumentError(
                    f"argument {place} of {self._name} is {_shown(found)}, expected"
                    f" {_shown(expected)} as in the first call"
                )
            assert expected is not None
            inputs[place] = given.new_empty_strided(given.shape, expected[-1]).copy_(given)
        return inputs

    def _require_count(self, inputs: Sequence[Any]) -> None:
        """Raise unless there are as many arguments, and tensors among them, as before."""
        known = next(iter(self._layouts.values()), None)
        if known is None:
            wrong = [one for one in self.mutated_inputs if not 0 <= one < len(inputs)]
            if wrong:
                raise ArgumentError(
                    f"mutated_inputs of {self._name} has {wrong}, expected places of its"
                    f" {len(inputs)} arguments"
                )
        elif len(inputs) != len(known):
            raise ArgumentError(f"{len(inputs)} arguments of {self._name}, expected {len(known)}")
        else:
            for place, (given, layout) in enumerate(zip(inputs, known, strict=True)):
                if isinstance(given, torch.Tensor) != (layout is not None):
                    raise ArgumentError(
                        f"argument {place} of {self._name} is {_shown(_layout(given))}, expected"
                        f" {_shown(layout)} as in the first call"
                    )

    def _writes_shared(self, inputs: Sequence[Any]) -> bool:
        """Return whether an argument shares memory with one that the module writes."""
        if not self.mutated_inputs:
            return False
        starts = [_torch.start_of(one) for one in inputs if isinstance(one, torch.Tensor)]
        written = {_torch.start_of(inputs[place]) for place in self.mutated_inputs}
        return sum(start in written for start in starts) > len(self.mutated_inputs)


_Layout = tuple[torch.Size, torch.dtype, torch.device, tuple[int, ...]]


def _layout(value: Any) -> _Layout | None:
    if not isinstance(value, torch.Tensor):
        return None
    return value.shape, value.dtype, value.device, value.stride()


def _shown(layout: _Layout | None) -> str:
    if layout is None:
        return "no tensor"
    shape, dtype, device, strides = layout
    return f"a tensor of shape {tuple(shape)} and strides {strides}, {dtype}, on {device}"


def _popped(taken: list[Any]) -> Any:
    while taken:
        yield taken.pop(0)
