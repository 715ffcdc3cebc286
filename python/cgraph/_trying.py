"""Serves calls of other numbers of rows than were captured, where padding is known to be safe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from cgraph import _core, _torch
from cgraph._calls import Call
from cgraph._keys import Key
from cgraph._leaks import Written, leaks, spoils
from cgraph._native import entry_of_call, returned
from cgraph._options import Options, Pad
from cgraph._padding import Fit, Padded, cut, cut_leaves, fit, resized
from cgraph._recorded import Recorded
from cgraph._rollback import Rollback
from cgraph._surroundings import tensors_of
from cgraph._torch import tree_flatten
from cgraph._training import Trained

if TYPE_CHECKING:
    from cgraph._capturing import Capturing

__all__ = ["Padding"]


class Padding:
    """Calls that are padded to a size.

    Args:
        capturing: Captures the sizes.
        options: The function's options.
    """

    def __init__(self, capturing: Capturing, options: Options) -> None:
        self._capturing = capturing
        self._options = options
        self._without: set[str] = set()

    def serve(
        self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], is_frozen: bool
    ) -> Callable[[], Any] | None:
        """What answers a call that has the rows of no size; None for any other call."""
        options, capturing = self._options, self._capturing
        found = None if options.sizes is None else fit(options, call, self._without)
        if found is None or found.rows == found.size or found.rows == 0:
            return None
        if capturing.is_eager(call):
            return None
        if found.size is None:
            most = options.sizes[-1] if options.sizes else 0
            reason = f"larger than all sizes: {found.rows} rows, the largest size is {most}"
            return capturing.eagerly(call, args, kwargs, reason)
        tensors = resized(call.tensors, found, found.size, options.pad)
        whole = call.replaced(tensors)
        large = capturing.key(whole)
        instead = capturing.ensure(large, whole, call, args, kwargs, is_frozen)
        if instead is not None:
            return instead
        if large.batched is None and large.leak is None:
            if self._options.check_padding:
                large.batched, large.leak = self._tried(large, call, found)
            else:
                large.batched = self._assumed(large, call, found)
        if large.leak is not None:
            reason = f"padding to {found.size} rows is not safe: {large.leak}"
            return capturing.eagerly(call, args, kwargs, reason)
        entry = self._entry(large, call, found)
        capturing.add(large, call, entry)
        return lambda: entry.call(args, kwargs, call.tensors)

    def _entry(self, large: Key, call: Call, found: Fit) -> _core.Entry:
        """The entry of calls of this number of rows."""
        surroundings = self._capturing.surroundings()
        recorded, batched = large.recorded, large.batched
        assert recorded is not None and batched is not None
        if isinstance(recorded, Trained):
            run = _PaddedCall(recorded, call, found, self._options.pad, batched, self._capturing)
            return entry_of_call(run, call, surroundings)
        padded = Padded(recorded, found, self._options.pad)
        # Calls are compared with dense tensors, as they come; what is copied to may have gaps.
        like = [torch.empty_like(tensor, requires_grad=False) for tensor in call.tensors]
        padded.keep(like)
        return _core.Entry(
            *call.patterns([_torch.signature(one) for one in like]),
            modes=call.mode,
            flags=surroundings.flags,
            fixed=surroundings.fixed,
            work=padded,
            outputs=returned(
                recorded,
                cut_leaves(recorded.outputs, batched, found.rows),
                surroundings,
                copies=self._options.outputs == "clone",
                held=self._capturing.holding,
            ),
            lane=self._capturing.lane(),
        )

    def _assumed(self, large: Key, call: Call, found: Fit) -> list[int | None]:
        """Where the rows of a result are by its shape alone."""
        recorded, dim = large.recorded, self._options.dim
        assert recorded is not None
        if isinstance(recorded, Trained):
            with torch.random.fork_rng(_torch.random_devices()), torch.no_grad():
                leaves = _replayed(recorded, call, found, self._options.pad)
        else:
            leaves = recorded.outputs
        first = next(one for one in found.dims if one is not None) if dim != 0 else 0
        return [
            first
            if isinstance(leaf, torch.Tensor)
            and leaf.dim() > first
            and leaf.shape[first] == found.size
            else None
            for leaf in leaves
        ]

    def _tried(
        self, large: Key, call: Call, found: Fit
    ) -> tuple[list[int | None] | None, str | None]:
        """Run the call without padding, and twice with paddings that differ; what shows."""
        recorded, function = large.recorded, self._capturing.function
        assert recorded is not None and found.size is not None
        tensors = [tensor.detach().clone() for tensor in call.tensors]
        args, kwargs = call.arguments(tensors)
        pads: list[Pad] = [self._options.pad, "repeat" if self._options.pad == "zero" else "zero"]
        rollback = Rollback(leaves=tensors_of((function, args, kwargs)))
        devices = _torch.random_devices()
        states = []
        try:
            with self._capturing.busy(), rollback, torch.no_grad():
                with torch.random.fork_rng(devices):
                    leaves = tree_flatten(function(*args, **kwargs))[0]
                eager = _copied([*leaves, *(tensors[place] for place in recorded.mutated)])
                before = rollback.before()
                states.append(rollback.contents(len(before)))
                results = []
                for pad in pads:
                    rollback.rewind()
                    with torch.random.fork_rng(devices):
                        results.append(_replayed(recorded, call, found, pad))
                    states.append(rollback.contents(len(before)))
        except torch.OutOfMemoryError as error:
            return None, (
                "there is no memory to try it out: give check_padding=False if padding rows leave"
                f" others alone ({str(error).splitlines()[0]})"
            )
        finally:
            rollback.undo()
        spoilt = spoils([Written(*times) for times in zip(before, *states, strict=True)])
        if spoilt is not None:
            return None, spoilt
        batched, leak = leaks(results, eager, found.rows, found.size)
        return batched[: len(batched) - len(recorded.mutated)], leak


class _PaddedCall:
    """A call with gradients, padded and cut by operators that pass them on."""

    def __init__(
        self,
        recorded: Trained,
        call: Call,
        found: Fit,
        pad: Pad,
        batched: Sequence[int | None],
        capturing: Capturing,
    ) -> None:
        self._recorded = recorded
        self._found = found
        self._pad = pad
        self._batched = batched
        self._taken = capturing.taken

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Pad, replay and cut."""
        assert self._found.size is not None
        call = self._taken(args, kwargs)
        tensors = resized(call.tensors, self._found, self._found.size, self._pad)
        args, kwargs = call.arguments(tensors)
        return cut(self._recorded.call(*args, **kwargs), self._batched, self._found.rows)


def _replayed(recorded: Recorded | Trained, call: Call, found: Fit, pad: Pad) -> list[Any]:
    """The leaves of a replay with this padding, as copies."""
    assert found.size is not None
    if isinstance(recorded, Trained):
        args, kwargs = call.arguments(resized(call.tensors, found, found.size, pad))
        leaves = tree_flatten(recorded.call(*args, **kwargs))[0]
    else:
        tensors = tuple(tensor.detach().clone() for tensor in call.tensors)
        Padded(recorded, found, pad)(tensors)
        leaves = [*recorded.outputs, *(tensors[place] for place in recorded.mutated)]
    return _copied(leaves)


def _copied(leaves: Sequence[Any]) -> list[Any]:
    """Leaves of a result that nothing overwrites."""
    return [one.detach().clone() if isinstance(one, torch.Tensor) else one for one in leaves]
