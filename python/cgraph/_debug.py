"""Debug replays of graphed functions: in steps, eagerly, compared with eager, on poisoned memory.

The native entry of a key that is debugged calls :class:`Debugged` instead of the graph. What the
words mean stands at the option ``debug`` of :func:`cgraph.graphed`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from cgraph import _driver, _torch
from cgraph._calls import Call
from cgraph._differences import Leaf, difference, is_tensor, put, wrong_nan, wrong_value
from cgraph._recorded import Plan, Recorded, record
from cgraph._rollback import Rollback
from cgraph._steps import FoundError, Steps, Trace
from cgraph._surroundings import modules_of, tensors_of
from cgraph._torch import tree_flatten
from cgraph.errors import CompareError
from cgraph.graphs import graph_pool_handle

__all__ = ["Debugged", "DebuggedCall", "debugged"]

_PYTHON = (
    "Python ran only at the capture: pass as an argument what it reads and what changes, or keep it"
    " in a tensor that is written in place; reset() captures anew"
)
_UNWRITTEN = (
    "The graph reads memory that nothing has written in this replay: write all of it, as with"
    " torch.zeros for torch.empty, and let no tensor of an earlier call be read that is gone"
)
_UNKNOWN = (
    "No operator differs when they run one by one: the graph reads memory that other work"
    " overwrites, or streams that do not wait for each other"
)


def debugged(
    words: Collection[str],
    plan: Plan,
    name: str,
    key: str,
    call: Call,
    recorded: Recorded,
    may_poison: Callable[[], bool],
) -> Debugged:
    """Capture a key once more, in steps of one operator if they are needed, to debug its replays.

    Args:
        words: As for :class:`Debugged`, as the others.
        plan: How the key was captured.
        name: What errors call the function.
        key: The key in words.
        call: A call of the key.
        recorded: The capture.
        may_poison: Whether the pool's free memory may be overwritten now.
    """
    checks = "compare" in words or "poison" in words
    steps = Steps(plan.function, name, keep=checks)
    if checks or "eager" not in words:
        # One call before: what it writes is put back, which the capture alone would not show. Its
        # tensors stay, and must not lie in memory that counts as free for the graph.
        pool = graph_pool_handle()
        again = replace(plan, function=steps, warmup=1, measure=False, pool=pool)
        steps.recorded = record(again, call, recorded.statics, _driver.current())
    return Debugged(words, plan.function, name, key, call, recorded, steps, may_poison)


class Debugged:
    """Replays a key, and looks at what that does.

    Args:
        words: What to do, of ``sync``, ``eager``, ``compare`` and ``poison``.
        function: What was captured.
        name: What errors call it.
        key: What the calls have in common, in words.
        call: A call of the key.
        recorded: The capture.
        steps: The same in steps of one operator, captured where they are needed.
        may_poison: Whether the pool's free memory may be overwritten now.
    """

    def __init__(
        self,
        words: Collection[str],
        function: Callable[..., Any],
        name: str,
        key: str,
        call: Call,
        recorded: Recorded,
        steps: Steps,
        may_poison: Callable[[], bool],
    ) -> None:
        self._words = words
        self._function = function
        self._title = f"{name} ({key})"
        # With tensors of its own: the caller's are not kept.
        self._call = call.replaced(recorded.statics)
        self._recorded = recorded
        self._steps = steps
        self._may_poison = may_poison
        self._feed = recorded.feed()
        self._driver = _driver.current()
        self._checks = "compare" in words or "poison" in words
        self._wrong = wrong_value if "compare" in words else wrong_nan

    def __call__(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Replay with these tensors, write to them what the function writes, and raise or return.

        Raises:
            CompareError: The replay differs from eager; all state is as before the call.
            Exception: What an operator or the device has raised.
        """
        if self._checks:
            self._replay_checked(tensors)
        else:
            self._replay(tensors)
        statics = self._recorded.statics
        with torch.no_grad():
            for place in self._recorded.mutated:
                if tensors[place] is not statics[place]:
                    tensors[place].copy_(statics[place])

    def reset(self) -> None:
        """Let the capture in steps go."""
        self._steps.reset()

    def _replay(self, tensors: tuple[torch.Tensor, ...]) -> None:
        recorded = self._recorded
        if "eager" in self._words:
            self._run_eagerly(tensors)
        elif "sync" in self._words:
            self._steps.run(tensors, poison="poison" in self._words)
            assert self._steps.recorded is not None
            put(self._steps.recorded.outputs, recorded.outputs, self._title)
        else:
            self._feed(tensors)
        if self._checks or "sync" in self._words:
            self._driver.synchronize()

    def _poison(self) -> None:
        if "poison" in self._words and self._may_poison():
            self._driver.poison(self._recorded.graph.pool())

    def _run_eagerly(self, tensors: tuple[torch.Tensor, ...]) -> None:
        with torch.no_grad():
            for static, tensor in zip(self._recorded.statics, tensors, strict=True):
                if static is not tensor:
                    static.copy_(tensor)
        args, kwargs = self._call.arguments(self._recorded.statics)
        put(tree_flatten(self._function(*args, **kwargs))[0], self._recorded.outputs, self._title)

    def _replay_checked(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Run eagerly, put back what that has written, replay and compare."""
        random = RandomStates()
        rollback = Rollback(is_capturing=self._driver.is_capturing)
        copies = _copies(tensors)
        try:
            with rollback:
                args, kwargs = self._call.arguments(copies)
                leaves = tree_flatten(self._function(*args, **kwargs))[0]
            expected = self._leaves(leaves, copies, rollback)
        finally:
            rollback.rewind()
            random.rewind()
        self._poison()
        self._replay(tensors)
        outputs = self._recorded.outputs
        found = difference(
            self._leaves(outputs, self._recorded.statics, rollback), expected, self._wrong
        )
        if found is None:
            return
        try:
            operator, why = self._culprit(tensors, rollback, random)
        finally:
            rollback.rewind()
            random.rewind()
        error = CompareError(f"a replay of {self._title} differs from eager: {found.text}. {why}")
        error.output, error.operator = found.name, operator
        raise error

    def _leaves(
        self, leaves: Sequence[Any], arguments: Sequence[torch.Tensor], rollback: Rollback
    ) -> list[Leaf]:
        """Copies of a result's leaves and of all that was written, by name."""
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
        """The tensors that are read where they lie, by name."""
        yield from ((one.name, one.value) for one in self._call.leaves if one.kind == "fixed")
        for module in modules_of((self._function,)):
            yield from module.named_buffers()
            yield from module.named_parameters()
        for tensor in tensors_of((self._function,)):
            yield "a tensor that the function reaches", tensor

    def _culprit(
        self, tensors: tuple[torch.Tensor, ...], rollback: Rollback, random: RandomStates
    ) -> tuple[str | None, str]:
        """The first operator that differs, and what to do."""
        trace = Trace()
        rollback.rewind()
        random.rewind()
        args, kwargs = self._call.arguments(_copies(tensors))
        with _torch.without_autocast_cache(), trace.watching():
            self._function(*args, **kwargs)
        rollback.rewind()
        random.rewind()
        self._poison()
        look = partial(trace.compare, self._steps, self._wrong)
        try:
            self._steps.run(tensors, look, poison="poison" in self._words)
            trace.finish(self._steps)
        except FoundError as found:
            operator = self._steps.operators[found.place]
            segment = f" of segment {operator.segment}" if self._recorded.breaks else ""
            fix = _UNWRITTEN if found.is_nan and "poison" in self._words else _PYTHON
            return str(operator), (
                f"The first operator that differs is number {found.place}{segment}, {operator}:"
                f" {found.text}. {fix}"
            )
        return None, _UNKNOWN


class DebuggedCall:
    """Calls a key with gradients, and looks at what the forward pass does.

    Args:
        words: What to do; the memory is not poisoned, as backward passes read what is free of it.
        function: What was captured.
        name: What errors call it.
        key: What the calls have in common, in words.
        replay: The captured passes.
    """

    def __init__(
        self,
        words: Collection[str],
        function: Callable[..., Any],
        name: str,
        key: str,
        replay: Callable[..., Any],
    ) -> None:
        self._words = words
        self._function = function
        self._title = f"{name} ({key})"
        self._replay = function if "eager" in words else replay
        self._driver = _driver.current()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call, and raise if the result differs or the device has failed."""
        expected = self._expected(args, kwargs) if "compare" in self._words else None
        result = self._replay(*args, **kwargs)
        if self._words != ("eager",):
            self._driver.synchronize()
        if expected is not None:
            found = difference(_named(result), expected, wrong_value)
            if found is not None:
                text = f"a replay of {self._title} differs from eager: {found.text}. {_PYTHON}"
                error = CompareError(text)
                error.output = found.name
                raise error
        return result

    def _expected(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Leaf]:
        random = RandomStates()
        rollback = Rollback(is_capturing=self._driver.is_capturing)
        try:
            with rollback, torch.no_grad():
                return _named(self._function(*args, **kwargs))
        finally:
            rollback.rewind()
            random.rewind()


class RandomStates:
    """The states of the default generators now."""

    def __init__(self) -> None:
        generators = [torch.default_generator]
        generators += [torch.cuda.default_generators[one] for one in _torch.random_devices()]
        self._states = [(generator, generator.get_state()) for generator in generators]

    def rewind(self) -> None:
        """Put them back."""
        for generator, state in self._states:
            generator.set_state(state)


def _copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [tensor.detach().clone() for tensor in tensors]


def _named(result: Any) -> list[Leaf]:
    """Copies of a result's leaves, by name."""
    leaves = tree_flatten(result)[0]
    names = _torch.names_in("result", result)
    copies = [one.detach().clone() if is_tensor(one) else one for one in leaves]
    return [Leaf(name, value) for name, value in zip(names, copies, strict=True)]
