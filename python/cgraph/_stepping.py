"""What steps of optimizers change besides tensors, and how it is put back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from cgraph import _torch
from cgraph._surroundings import Holder, scalers_of

__all__ = ["Steps", "scalers_put_back"]


class Steps:
    """The steps of optimizers in a block."""

    def __init__(self) -> None:
        self._before: dict[int, _States] = {}

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Put the states of optimisers back that step inside the ``with`` block, on its thread.

        Steps in hooks of a backward pass count as well where it runs on threads of autograd's own.
        """
        thread = threading.get_ident()

        def note(optimizer: torch.optim.Optimizer, *_: object) -> None:
            if id(optimizer) not in self._before and (
                threading.get_ident() == thread or _torch.is_autograds_thread()
            ):
                self._before[id(optimizer)] = _States(optimizer)

        hook = register_optimizer_step_pre_hook(note)
        try:
            yield
        finally:
            hook.remove()
            for one in self._before.values():
                one.put_back()

    @property
    def have_made_state(self) -> bool:
        """Whether one of the optimizers has made some of its state in the block."""
        return any(one.has_more for one in self._before.values())

    def holders(self) -> list[Holder]:
        """Where the states of the optimizers are."""
        optimizers = (one.optimizer for one in self._before.values())
        return [(optimizer, "state", optimizer.state) for optimizer in optimizers]


@contextmanager
def scalers_put_back(objects: object) -> Iterator[None]:
    """Put back what the gradient scalers that a function reaches know of the step under way.

    Args:
        objects: The function.
    """
    names = ("_scale", "_growth_tracker", "_per_optimizer_states")
    before = []
    for scaler in scalers_of(objects):
        states: Any = scaler._per_optimizer_states
        copy = type(states)(states.default_factory)
        copy.update({key: dict(state) for key, state in states.items()})
        known = {name: getattr(scaler, name, None) for name in names}
        before.append((scaler, {**known, "_per_optimizer_states": copy}))
    try:
        yield
    finally:
        for scaler, known in before:
            for name, value in known.items():
                setattr(scaler, name, value)


class _States:
    """What an optimiser keeps for its parameters, as it is now; tensors as far as they stay.

    Args:
        optimizer: The optimiser.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._states = [(key, state, dict(state)) for key, state in optimizer.state.items()]
        values = (value for *_, items in self._states for value in items.values())
        self._lists = [(value, list(value)) for value in values if isinstance(value, list)]

    @property
    def has_more(self) -> bool:
        """Whether there is something now that was not."""
        known = {key: items.keys() for key, _, items in self._states}
        now = self.optimizer.state.items()
        return any(not state.keys() <= known.get(key, set()) for key, state in now)

    def put_back(self) -> None:
        """Let it be as it was, in the same dictionaries and lists."""
        self.optimizer.state.clear()
        for key, state, items in self._states:
            state.clear()
            state.update(items)
            self.optimizer.state[key] = state
        for now, before in self._lists:
            now[:] = before
