"""What a replay leaves to its caller besides the result: written arguments and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cgraph import _torch
from cgraph._captures.busy import busy
from cgraph._recording.calls import Call
from cgraph._recording.recorded import Recorded
from cgraph._state.gradients import Gradients
from cgraph._torch import tree_flatten

__all__ = ["Leaving"]


class Leaving:
    """Gives the caller's tensors what the function has written to its own.

    Args:
        recorded: The capture.
        function: What was captured.
        call: A call, for how its arguments are put together.
        outputs: Gives the leaves of the result. What is not kept counts as no reference to them.
        outside: The numbers of the storages that the function reaches without its arguments.
        gradients: Those that leaves get.
    """

    def __init__(
        self,
        recorded: Recorded,
        function: Callable[..., Any],
        call: Call,
        outputs: Callable[[], Sequence[Any]],
        outside: set[int],
        gradients: Gradients,
    ) -> None:
        self._mutated = recorded.mutated
        self._statics = recorded.statics
        self._gradients = gradients
        self._function = function
        self._call = call
        self._outputs = outputs
        self._outside = outside | recorded.in_place
        statics = {_torch.storage_id(one.untyped_storage()) for one in recorded.statics}
        tensors = [one for one in recorded.outputs if isinstance(one, torch.Tensor)]
        memories = [memory for memory in map(_torch.memory_of, tensors) if memory is not None]
        self._results = {_torch.storage_id(one) for one in memories} - statics - self._outside

    def is_seen_elsewhere(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether what is written can be read through another tensor, or another element.

        The copies that a graph reads have no memory in common.
        """
        if not self._mutated:
            return False
        numbers = [_torch.storage_id(tensor.untyped_storage()) for tensor in tensors]
        return any(
            numbers[place] in self._outside
            or _torch.overlaps_itself(tensors[place])
            or (numbers.count(numbers[place]) > 1 and _overlaps(place, numbers, tensors))
            for place in self._mutated
        )

    def run_eagerly(self, tensors: Sequence[torch.Tensor]) -> None:
        """Call the function; the result gets into the graph's memory, as that of a replay."""
        args, kwargs = self._call.arguments(tensors)
        # Graphed functions that it calls are part of it, as in its graph.
        with busy():
            leaves = tree_flatten(self._function(*args, **kwargs))[0]
        for own, new in zip(self._outputs(), leaves, strict=True):
            # An argument that is returned is the caller's own.
            is_argument = any(own is static for static in self._statics)
            if isinstance(own, torch.Tensor) and own is not new and not is_argument:
                _copy(own, new)

    def leave(self, tensors: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Write to the caller's tensors, after a replay.

        Args:
            tensors: The caller's.
            sources: What the function was given instead.
        """
        # As the function has written them, which may be leaves.
        with torch.no_grad():
            for place in self._mutated:
                tensor, source = tensors[place], sources[place]
                # An earlier result as an argument lies where the new one is.
                is_result = _torch.storage_id(tensor.untyped_storage()) in self._results
                if tensor is not source and not is_result:
                    tensor.copy_(source)
        self._gradients.put()


def _copy(own: torch.Tensor, new: torch.Tensor) -> None:
    """Copy a tensor to one that may be expanded."""
    for dim, (size, stride) in enumerate(zip(own.shape, own.stride(), strict=True)):
        if size > 1 and stride == 0:
            own, new = own.narrow(dim, 0, 1), new.narrow(dim, 0, 1)
    own.copy_(new)


def _overlaps(place: int, numbers: list[int], tensors: Sequence[torch.Tensor]) -> bool:
    """Whether one tensor has bytes in common with another one, as far as their ends tell."""
    begin, end = _torch.span_of(tensors[place])
    return any(
        one != place and number == numbers[place] and span[0] < end and begin < span[1]
        for one, number in enumerate(numbers)
        for span in [_torch.span_of(tensors[one])]
    )
