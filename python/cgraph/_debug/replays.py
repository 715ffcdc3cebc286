"""Debug replays of graphs: in steps, compared with eager, or on poisoned memory.

The native entry of a key that is debugged calls :class:`Debugged` instead of the graph. The option
``debug`` of :func:`cgraph.graphed` explains the words.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from cgraph import _driver, _torch
from cgraph._captures.busy import busy
from cgraph._debug.differences import (
    Leaf,
    difference,
    is_tensor,
    put,
    wrong_nan,
    wrong_value,
)
from cgraph._debug.first_wrong_operator import (
    Search,
    differs,
    in_steps,
    run_in_steps,
    written_by,
)
from cgraph._debug.steps import Steps
from cgraph._graphed.call import Call, copied
from cgraph._graphed.record import CapturePlan
from cgraph._graphed.recorded import Recorded
from cgraph._graphed.writeback import leave
from cgraph._operators.rollback import Rollback
from cgraph._operators.snapshots import RandomSnapshot
from cgraph._torch import tree_flatten
from cgraph.errors import CompareError

__all__ = ["Debugged", "debugged"]


def debugged(
    words: Collection[str],
    plan: CapturePlan,
    name: str,
    key: str,
    call: Call,
    recorded: Recorded,
    may_poison: Callable[[], bool],
) -> Debugged:
    """Capture a key once more, in steps of one operator, to debug its replays.

    Args:
        words: As for :class:`Debugged`.
        plan: The plan by which the key was captured.
        name: The name of the function in errors.
        key: The key as text.
        call: A call of the key.
        recorded: The capture.
        may_poison: Tells whether the pool's free memory may be overwritten now.
    """
    checks = "compare" in words or "poison" in words
    steps = in_steps(plan, name, call, recorded.statics, keep=checks)
    # With tensors of its own, so as not to keep the caller's.
    like = call.replaced(recorded.statics)
    written = None
    if checks and "sync" in words:
        try:
            written = written_by(plan.function, like.arguments(_copies(recorded.statics)))
        except BaseException:
            steps.reset()
            raise
    outside = plan.before.guards.named_tensors
    what = plan.function, f"{name} ({key})", like, recorded, outside, steps, written
    return Debugged(words, *what, may_poison)


class Debugged:
    """A replay of a key that checks its effects.

    Args:
        words: Some of ``sync``, ``compare`` and ``poison``.
        function: The captured function.
        title: Its name in errors, and its key.
        call: A call of the key, with the static tensors.
        recorded: The capture.
        outside: The tensors that the function reads where they lie, with their names.
        steps: The function in steps of one operator.
        written: The memory that they write, if each must succeed before eager is called.
        may_poison: Tells whether the pool's free memory may be overwritten now.
    """

    def __init__(
        self,
        words: Collection[str],
        function: Callable[..., Any],
        title: str,
        call: Call,
        recorded: Recorded,
        outside: Sequence[tuple[str, torch.Tensor]],
        steps: Steps,
        written: Rollback | None,
        may_poison: Callable[[], bool],
    ) -> None:
        self._words = words
        self._function = function
        self._title = title
        self._call = call
        self._recorded = recorded
        self._outside_tensors = outside
        self._steps = steps
        self._written = written
        self._may_poison = may_poison
        self._feed = recorded.graph._replay_with
        self._driver = _driver.current()
        self._checks = "compare" in words or "poison" in words
        self._wrong = wrong_value if "compare" in words else wrong_nan

    def __call__(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Replay with these tensors, and write to them what the function writes.

        Raises:
            CompareError: The replay differs from eager; all state is as before the call.
            Exception: An operator or the device raised it.
        """
        if self._checks:
            self._replay_checked(tensors)
        else:
            self._replay(tensors)
        leave(self._recorded, tensors, self._recorded.statics)

    def reset(self) -> None:
        """Drop the capture in steps."""
        self._steps.reset()

    def _replay(self, tensors: tuple[torch.Tensor, ...]) -> None:
        recorded = self._recorded
        if "sync" in self._words:
            self._steps.run(tensors, poison="poison" in self._words)
            assert self._steps.recorded is not None
            put(self._steps.recorded.outputs, recorded.outputs, self._title)
            self._steps.recorded.gradients.give()
        else:
            self._feed(tensors)
            recorded.gradients.give()
        if self._checks or "sync" in self._words:
            self._driver.synchronize()

    def _poison(self) -> None:
        if "poison" in self._words and self._may_poison():
            self._driver.poison(self._recorded.graph.pool())

    def _replay_checked(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Run eagerly, restore the memory that this wrote, replay and compare."""
        if self._written is not None:
            # An eager call would fail, too, without naming the operator.
            run_in_steps(self._steps, self._written, tensors)
        random = RandomSnapshot()
        rollback = Rollback(is_capturing=self._driver.is_capturing)
        copies = _copies(tensors)
        try:
            with rollback, busy():
                args, kwargs = self._call.arguments(copies)
                leaves, spec = tree_flatten(self._function(*args, **kwargs))
            self._require_as_many(leaves, spec)
            expected = self._leaves(leaves, copies, rollback)
        finally:
            rollback.rewind()
            random.rewind(rollback)
        self._poison()
        self._replay(tensors)
        outputs = self._recorded.outputs
        found = difference(
            self._leaves(outputs, self._recorded.statics, rollback), expected, self._wrong
        )
        if found is None:
            return
        search = Search(
            self._function,
            self._steps,
            self._wrong,
            poisons="poison" in self._words,
            has_breaks=bool(self._recorded.breaks),
        )
        arguments = self._call.arguments(_copies(tensors))
        operator, why = search.first(arguments, tensors, rollback, random, self._poison)
        raise differs(self._title, found, operator, why)

    def _require_as_many(self, leaves: list[Any], spec: Any) -> None:
        # By names, as contexts of the user's classes may compare by identity.
        now = _torch.names_in("result", _torch.tree_unflatten(leaves, spec))
        known = self._recorded
        then = _torch.names_in("result", _torch.tree_unflatten(known.outputs, known.spec))
        if now != then:
            found = f"{len(now)} values", f"{len(then)}"
            if len(now) == len(then):
                pair = next(pair for pair in zip(now, then, strict=True) if pair[0] != pair[1])
                found = f"{pair[0]}", f"{pair[1]}"
            error = CompareError(
                f"a replay of {self._title} differs from eager: eager returns {found[0]}, and the"
                f" capture returned {found[1]}. The result of the function depends on more than"
                " its arguments: pass the rest as an argument, or call reset() when it changes"
            )
            error.output = "result"
            raise error

    def _leaves(
        self, leaves: Sequence[Any], arguments: Sequence[torch.Tensor], rollback: Rollback
    ) -> list[Leaf]:
        """Copy a result's leaves and all tensors that were written, with their names."""
        tree = _torch.tree_unflatten(list(leaves), self._recorded.spec)
        found = list(zip(_torch.names_in("result", tree), leaves, strict=True))
        names = self._call.names
        found += [(names[place], arguments[place]) for place in self._recorded.mutated]
        found += [(name, one) for name, one in self._outside() if rollback.is_written(one)]
        return [
            Leaf(name, value.detach().clone() if is_tensor(value) else value)
            for name, value in found
        ]

    def _outside(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over the tensors that are read where they lie, with their names."""
        yield from ((one.name, one.value) for one in self._call.statics)
        yield from self._outside_tensors


def _copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [copied(tensor) for tensor in tensors]
