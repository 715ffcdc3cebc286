"""Debug calls of keys with gradients: in steps, or both passes compared with eager."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch

from cgraph import _driver
from cgraph._captures.busy import busy
from cgraph._debug.differences import Leaf, difference, is_tensor, named, wrong_value
from cgraph._debug.first_wrong_operator import (
    Search,
    differs,
    in_steps,
    run_in_steps,
    written_by,
)
from cgraph._debug.steps import Steps
from cgraph._graphed.call import Call, copied
from cgraph._graphed.function_module import stand_ins
from cgraph._graphed.record import CapturePlan
from cgraph._graphed.train import Trained
from cgraph._operators.rollback import Rollback
from cgraph._operators.snapshots import RandomSnapshot
from cgraph._torch import tree_flatten, tree_unflatten

__all__ = ["DebuggedCall", "debugged_call"]

_BACKWARD = (
    "The forward passes are alike, so it is the backward pass: a hook or an autograd function reads"
    " changing values, or something has overwritten what the forward pass left for it"
)


def debugged_call(
    words: Collection[str],
    plan: CapturePlan,
    name: str,
    key: str,
    call: Call,
    trained: Trained,
    taken: Callable[[tuple[Any, ...], dict[str, Any]], Call],
) -> DebuggedCall:
    """Capture the forward pass of a key in steps of one operator, if they are needed.

    Args:
        words: The words of the option ``debug``; memory is not poisoned, as backward passes read
            memory that counts as free.
        plan: The plan by which the key was captured.
        name: The name of the function in errors.
        key: The key as text.
        call: A call of the key.
        trained: The captured passes.
        taken: Takes the arguments of a call apart.
    """
    if not {"compare", "sync"} & set(words):
        return DebuggedCall(words, plan.function, f"{name} ({key})", trained, None)
    # Copies, as a backward pass that is still to come may read the graph's.
    statics = [copied(static) for static in trained.statics]
    # Stand-ins, as the results have a history as long as the steps are alive.
    with stand_ins(trained.modules):
        steps = in_steps(plan, name, call, statics, keep="compare" in words)
    try:
        written = written_by(plan.function, call.arguments(statics))
    except BaseException:
        steps.reset()
        raise
    forward = _Forward(steps, written, taken)
    return DebuggedCall(words, plan.function, f"{name} ({key})", trained, forward)


class _Forward(NamedTuple):
    """A forward pass in steps of one operator.

    Attributes:
        steps: The steps.
        written: The memory that they write.
        taken: Takes the arguments of a call apart.
    """

    steps: Steps
    written: Rollback
    taken: Callable[[tuple[Any, ...], dict[str, Any]], Call]


class DebuggedCall:
    """A call of a key with gradients that checks both passes.

    Args:
        words: The words of the option ``debug``.
        function: The captured function.
        title: Its name in errors, and its key.
        trained: The captured passes.
        forward: The forward pass in steps; None if it is not needed.
    """

    def __init__(
        self,
        words: Collection[str],
        function: Callable[..., Any],
        title: str,
        trained: Trained,
        forward: _Forward | None,
    ) -> None:
        self._words = words
        self._function = function
        self._title = title
        self._trained = trained
        self._forward = forward
        self._driver = _driver.current()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call, and raise if a pass differs from eager or the device has failed.

        Raises:
            CompareError: The forward pass differs; all state is as before the call. The backward
                pass raises its own error.
        """
        if self._forward is not None:
            if "sync" in self._words:
                steps, written, taken = self._forward
                run_in_steps(steps, written, tuple(taken(args, kwargs).tensors))
            if "compare" in self._words:
                return self._compared(self._forward, args, kwargs)
        return self._replayed(args, kwargs)

    def reset(self) -> None:
        """Drop the capture in steps."""
        if self._forward is not None:
            self._forward.steps.reset()

    def _compared(self, forward: _Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run eagerly, restore the memory that this wrote, replay and compare."""
        call = forward.taken(args, kwargs)
        random = RandomSnapshot()
        rollback = Rollback(is_capturing=self._driver.is_capturing)
        try:
            with rollback, busy():
                eager = _Eager(self._function, self._trained, call, args, kwargs)
        finally:
            rollback.rewind()
            random.rewind(rollback)
        result = self._replayed(args, kwargs)
        found = difference(named(result), eager.leaves, wrong_value)
        if found is None:
            self._watch_backward(result, eager)
            return result
        search = Search(self._function, forward.steps, wrong_value, poisons=False, has_breaks=False)
        arguments = call.arguments([copied(tensor) for tensor in call.tensors])
        operator, why = search.first(arguments, call.tensors, rollback, random)
        raise differs(self._title, found, operator, why)

    def _replayed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = self._trained.replay(*args, **kwargs)
        self._driver.synchronize()
        return result

    def _watch_backward(self, result: Any, eager: _Eager) -> None:
        """Let the backward pass compare its gradients with eager's."""
        nodes = (one.grad_fn for one in tree_flatten(result)[0] if is_tensor(one))
        node = next((node for node in nodes if node is not None), None)
        if node is None:
            return
        title, driver = self._title, self._driver
        expected: list[Leaf] = []

        def before(given: Sequence[torch.Tensor | None]) -> None:
            driver.synchronize()
            expected[:] = eager.gradients(given, driver)

        def behind(found: Sequence[torch.Tensor | None], _: object) -> None:
            if not expected:
                return
            driver.synchronize()
            pairs = zip(expected, self._trained.replay.of_all(found), strict=True)
            both = [
                (*leaf, one) for leaf, one in pairs if leaf.value is not None or one is not None
            ]
            wrong = difference(
                [Leaf(name, _or_zeros(one, right)) for name, right, one in both],
                [Leaf(name, _or_zeros(right, one)) for name, right, one in both],
                wrong_value,
            )
            if wrong is not None:
                raise differs(title, wrong, None, _BACKWARD)

        node.register_prehook(before)
        node.register_hook(behind)


class _Eager:
    """A call without a graph that keeps the state its backward pass needs.

    Parameters have stand-ins: hooks of the real ones are called with the graph's gradients.

    Attributes:
        leaves: Copies of its result's leaves.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        trained: Trained,
        call: Call,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        fixed = {id(leaf.value) for leaf in call.leaves if leaf.kind == "static"}
        names = {id(leaf.value): leaf.name for leaf in call.leaves}
        for module in trained.modules:
            names |= {id(one): name for name, one in module.named_parameters()}
        # In the order of the autograd node's gradients.
        values, spec = tree_flatten((args, dict(sorted(kwargs.items()))))
        given = [value for value in values if is_tensor(value)]
        inputs = [_again(one) if id(one) in fixed else copied(one) for one in given]
        in_turn = iter(inputs)
        own = [next(in_turn) if is_tensor(value) else value for value in values]
        with stand_ins(trained.modules) as reals:
            own_args, own_kwargs = tree_unflatten(own, spec)
            self._outputs = tree_flatten(result := function(*own_args, **own_kwargs))[0]
            self.leaves = named(result)
            instead = {
                id(reals[id(one)]): one for part in trained.modules for one in part.parameters()
            }
        self._names = [
            names.get(id(one), "a parameter") for one in (*given, *trained.replay.parameters)
        ]
        self._inputs = [*inputs, *(instead.get(id(one), one) for one in trained.replay.parameters)]

    def gradients(self, given: Sequence[torch.Tensor | None], driver: _driver.Driver) -> list[Leaf]:
        """Compute the gradients of the call's tensors and parameters from these of the results.

        Memory and random states that the backward pass changes are restored. A second call
        returns none.
        """
        if not self._outputs:
            return []
        pairs = [
            (output, gradient.detach())
            for output, gradient in zip(self._outputs, given, strict=True)
            if gradient is not None and is_tensor(output) and output.requires_grad
        ]
        wanted = [one for one in self._inputs if one.requires_grad]
        found: Sequence[torch.Tensor | None] = [None] * len(wanted)
        random, rollback = RandomSnapshot(), Rollback(is_capturing=driver.is_capturing)
        try:
            if pairs:
                with rollback:
                    found = torch.autograd.grad(
                        [output for output, _ in pairs],
                        wanted,
                        [gradient for _, gradient in pairs],
                        allow_unused=True,
                    )
            driver.synchronize()
        finally:
            rollback.rewind()
            random.rewind(rollback)
            self._outputs = []
        by_place = iter(found)
        return [
            Leaf(f"the gradient of {name}", next(by_place) if one.requires_grad else None)
            for name, one in zip(self._names, self._inputs, strict=True)
        ]


def _or_zeros(gradient: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor:
    """Return the gradient; zeros if there is none."""
    if gradient is not None:
        return gradient
    assert other is not None
    return torch.zeros_like(other)


def _again(tensor: torch.Tensor) -> torch.Tensor:
    """Return another tensor of the same memory, without history and hooks."""
    return tensor.detach().requires_grad_(tensor.requires_grad)
