"""What steps of optimizers, schedulers and gradient scalers change besides tensors."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from cgraph import _torch
from cgraph._state.constants import Snapshot
from cgraph._state.holders import Holder
from cgraph._state.surroundings import STEPPING, objects_of

__all__ = ["HOOKS_OF_STEPS", "Steps"]


HOOKS_OF_STEPS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""What optimizers keep the hooks in that run around their steps."""


class Steps:
    """The steps of optimizers in a block, and the gradient scalers that a function reaches.

    Args:
        function: The function.
        known: Those that were found behind objects.
        puts_back: Put their states back at the end of the block.
    """

    def __init__(
        self, function: object, known: Iterable[Any] = (), *, puts_back: bool = True
    ) -> None:
        self._puts_back = puts_back
        self._before: dict[int, _States] = {}
        self._function = function
        self._known = list(known)
        found = self._found()
        scalers = [one for one in found if isinstance(one, GradScaler)] if puts_back else []
        self._scalers = [_Scaler(scaler) for scaler in scalers]
        # With those of optimizers that step in a capture, and were not found before.
        self._at_capture = self._settings_of(found)
        # What was found first comes last when it is put back.
        self._settings = [*self._at_capture]

    @contextmanager
    def watched(self, *, leaves_settings: bool = True) -> Iterator[None]:
        """Note the optimizers that step inside the ``with`` block, on its thread.

        Steps in hooks of a backward pass count as well where it runs on threads of autograd's own.

        Args:
            leaves_settings: Put no settings of optimizers and schedulers back, unless the block
                raises: a function that assigns them has done it as one call does.
        """
        thread = threading.get_ident()

        def note(optimizer: Optimizer, *_: object) -> None:
            if id(optimizer) not in self._before and (
                threading.get_ident() == thread or _torch.is_autograds_thread()
            ):
                self._before[id(optimizer)] = _States(optimizer)
                settings = Snapshot(_settings_of(optimizer))
                self._settings.append(settings)
                self._at_capture.append(settings)

        try:
            with _torch.steps_noted(note):
                yield
        except BaseException:
            leaves_settings = False
            raise
        finally:
            if self._puts_back:
                for one in self._before.values():
                    one.put_back()
                for scaler in self._scalers:
                    scaler.put_back()
                if not leaves_settings:
                    for settings in reversed(self._settings):
                        settings.put_back()

    def captures_now(self) -> None:
        """Note that calls end here, and that a capture comes next."""
        self._at_capture = self._settings_of(self._found())

    @property
    def changed(self) -> str | None:
        """What the capture has changed of settings, which no replay does; None if nothing."""
        for name in (settings.changed for settings in self._at_capture):
            if name is not None:
                return (
                    f"the function changes {name} of an optimizer or of a learning rate scheduler,"
                    " and replays do not: do it after the call, and let what changes be a tensor"
                )
        return None

    @property
    def made(self) -> str | None:
        """What the block has made of a state that is to be put back; None if there is nothing."""
        if self._puts_back and any(one.has_more for one in self._before.values()):
            return "an optimizer makes its state at its first step"
        if any(one.has_more for one in self._scalers):
            return "a gradient scaler makes its scale at its first call"
        return None

    @property
    def have_stepped(self) -> bool:
        """Whether an optimizer has stepped in the block."""
        return bool(self._before)

    @property
    def may_have_changed(self) -> bool:
        """Whether there may be something to put back: an optimizer's state, or a scaler's."""
        return bool(self._before or self._scalers)

    def states(self) -> list[Holder]:
        """Where states, settings and hooks of the optimizers are that have stepped."""
        found: list[Holder] = []
        for optimizer in (one.optimizer for one in self._before.values()):
            found.append(Holder(optimizer, "state", optimizer.state))
            # With the place that the next group gets, where nothing is.
            groups = enumerate([*optimizer.param_groups, None])
            found += [Holder(optimizer, "param_groups", one, (place,)) for place, one in groups]
            for place, group in enumerate(optimizer.param_groups):
                # The last parameter, and that there is none behind it.
                parameters = group["params"]
                ends = enumerate([*parameters[-1:], None], max(0, len(parameters) - 1))
                found += [
                    Holder(optimizer, "param_groups", one, (place, "params", index))
                    for index, one in ends
                ]
            hooks = [(name, getattr(optimizer, name, None)) for name in HOOKS_OF_STEPS]
            found += [Holder(optimizer, *one) for one in hooks if isinstance(one[1], dict)]
        return found

    def _found(self) -> list[Any]:
        """Optimizers, schedulers and scalers that the function reaches now, each once."""
        found = (*objects_of(self._function, STEPPING), *self._known)
        return [*{id(one): one for one in found}.values()]

    def _settings_of(self, found: Iterable[object]) -> list[Snapshot]:
        """The groups of optimizers, and what schedulers count, with those that they consist of.

        Args:
            found: The optimizers and schedulers, among others. Those that have stepped are known.
        """
        found = [*found, *(one.optimizer for one in self._before.values())]
        waiting = [one for one in found if isinstance(one, LRScheduler)]
        optimizers = [one for one in found if isinstance(one, Optimizer)]
        counts: list[Any] = []
        while waiting:
            one = waiting.pop()
            counts.append(vars(one))
            # One that steps has an optimizer that does, which may be found there alone.
            optimizers += [one.optimizer] if hasattr(one, "optimizer") else []
            waiting += getattr(one, "_schedulers", ())
        settings = [counts, *map(_settings_of, optimizers)]
        return [Snapshot(settings)] if counts or optimizers else []


def _settings_of(optimizer: Optimizer) -> list[Any]:
    """The groups, and what is kept for each parameter, which may be a count of steps.

    Some keep counts beside that.
    """
    states = optimizer.state.values()
    has_others = any(not isinstance(one, dict) for one in states)
    return [optimizer.param_groups, *([optimizer.state] if has_others else states)]


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


class _States:
    """What an optimiser keeps for its parameters, as it is now; tensors as far as they stay.

    Args:
        optimizer: The optimiser.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        states = {key: one for key, one in optimizer.state.items() if isinstance(one, dict)}
        self._states = [(key, state, dict(state)) for key, state in states.items()]
        self._others = {key: one for key, one in optimizer.state.items() if key not in states}
        values = (value for *_, items in self._states for value in items.values())
        self._lists = [(value, list(value)) for value in values if isinstance(value, list)]

    @property
    def has_more(self) -> bool:
        """Whether there is something now that was not."""
        known = {key: items.keys() for key, _, items in self._states}
        now = self.optimizer.state.items()
        return any(
            not state.keys() <= known.get(key, set())
            if isinstance(state, dict)
            else key not in self._others
            for key, state in now
        )

    def put_back(self) -> None:
        """Let it be as it was, in the same dictionaries and lists."""
        self.optimizer.state.clear()
        for key, state, items in self._states:
            state.clear()
            state.update(items)
            self.optimizer.state[key] = state
        self.optimizer.state.update(self._others)
        for now, before in self._lists:
            now[:] = before
