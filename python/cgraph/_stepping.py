"""What steps of optimizers, schedulers and gradient scalers change besides tensors."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from cgraph import _torch
from cgraph._constants import Constant, as_now
from cgraph._surroundings import Holder, objects_of
from cgraph.errors import CaptureError

__all__ = ["Steps"]


class Steps:
    """The steps of optimizers in a block, and the gradient scalers that a function reaches.

    Args:
        function: The function.
        puts_back: Put their states back at the end of the block.
    """

    def __init__(self, function: object, *, puts_back: bool = True) -> None:
        self._puts_back = puts_back
        self._before: dict[int, _States] = {}
        scalers = objects_of(function, GradScaler) if puts_back else []
        self._scalers = [_Scaler(scaler) for scaler in scalers]
        # One that steps has an optimizer that does, which is found there.
        self._schedulers = [_Scheduler(one) for one in objects_of(function, LRScheduler)]
        found = [one.optimizer for one in self._schedulers]
        self._groups = [_Groups(one) for one in (*found, *objects_of(function, Optimizer))]
        self._at_capture: list[_Groups | _Scheduler] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note the optimizers that step inside the ``with`` block, on its thread.

        Steps in hooks of a backward pass count as well where it runs on threads of autograd's own.
        """
        thread = threading.get_ident()

        def note(optimizer: Optimizer, *_: object) -> None:
            if id(optimizer) not in self._before and (
                threading.get_ident() == thread or _torch.is_autograds_thread()
            ):
                self._before[id(optimizer)] = _States(optimizer)

        hook = register_optimizer_step_pre_hook(note)
        try:
            yield
        finally:
            hook.remove()
            if self._puts_back:
                for one in self._before.values():
                    one.put_back()
                # An optimizer that several have found is put back as it was found first.
                others: list[_Scaler | _Scheduler | _Groups] = [*self._scalers, *self._schedulers]
                for other in (*others, *self._groups):
                    other.put_back()

    def captures_now(self) -> None:
        """Note that calls end here, and that a capture comes next."""
        self._at_capture = [_Groups(one.optimizer) for one in self._groups]
        self._at_capture += [_Scheduler(one.scheduler) for one in self._schedulers]

    def require_unchanged(self) -> None:
        """Refuse a function that has changed settings of optimizers since its capture began.

        Raises:
            CaptureError: It has: replays use what it was then.
        """
        for one in self._at_capture:
            if (name := one.changed) is not None:
                raise CaptureError(
                    f"the function changes {name}, and replays do not: do it after the call, and"
                    " let what changes be a tensor"
                )

    @property
    def made(self) -> str | None:
        """What the block has made of a state that is to be put back; None if there is nothing."""
        if self._puts_back and any(one.has_more for one in self._before.values()):
            return "an optimizer makes its state at its first step"
        if any(one.has_more for one in self._scalers):
            return "a gradient scaler makes its scale at its first call"
        return None

    def states(self) -> list[Holder]:
        """Where the states of the optimizers are."""
        optimizers = (one.optimizer for one in self._before.values())
        return [(optimizer, "state", optimizer.state) for optimizer in optimizers]


class _Scaler:
    """What a gradient scaler knows of the step under way, as it is now."""

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = scaler
        states: Any = scaler._per_optimizer_states
        copy = type(states)(states.default_factory)
        copy.update({key: dict(state) for key, state in states.items()})
        names = ("_scale", "_growth_tracker")
        self._known = {name: getattr(scaler, name, None) for name in names}
        self._known["_per_optimizer_states"] = copy

    @property
    def has_more(self) -> bool:
        """Whether there is a scale now that was not."""
        return self._known["_scale"] is None and getattr(self._scaler, "_scale", None) is not None

    def put_back(self) -> None:
        """Let it be as it was."""
        for name, value in self._known.items():
            setattr(self._scaler, name, value)


class _Scheduler:
    """What a learning rate scheduler counts, as it is now."""

    def __init__(self, scheduler: LRScheduler) -> None:
        self.optimizer: Optimizer = scheduler.optimizer
        self.scheduler = scheduler
        self._known = {name: as_now(value) for name, value in vars(scheduler).items()}
        self._parts = [_Scheduler(one) for one in getattr(scheduler, "_schedulers", ())]

    @property
    def changed(self) -> str | None:
        """What of it is another now, in words; None if nothing is."""
        now = self.scheduler.last_epoch
        is_same = now == self._known["last_epoch"]
        return None if is_same else f"the epoch of a {type(self.scheduler).__name__}"

    def put_back(self) -> None:
        """Let it be as it was."""
        vars(self.scheduler).clear()
        vars(self.scheduler).update(self._known)
        for part in self._parts:
            part.put_back()


class _Groups:
    """The settings of an optimizer, as they are now."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._known = [(group, dict(group)) for group in optimizer.param_groups]

    @property
    def changed(self) -> str | None:
        """One that is another now, in words; None if none is."""
        for group, before in self._known:
            for name, now in group.items():
                then = before.get(name)
                if now is not then and Constant(now) != Constant(then):
                    return f"{name} of an optimizer"
        return None

    def put_back(self) -> None:
        """Let them be as they were; tensors as far as they are the same."""
        for group, before in self._known:
            group.clear()
            group.update(before)


class _States:
    """What an optimiser keeps for its parameters, as it is now; tensors as far as they stay.

    Args:
        optimizer: The optimiser.
    """

    def __init__(self, optimizer: Optimizer) -> None:
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
