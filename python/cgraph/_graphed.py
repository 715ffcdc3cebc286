"""Calls of a graphed callable: arguments in, replay, outputs and gradients out."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from cgraph import _torch
from cgraph._source import levels_to_user
from cgraph.errors import ArgumentError, StateError, add_note

if TYPE_CHECKING:
    from cgraph.callables import _Pass

__all__ = ["Graphed", "Sample", "leaves"]


class Sample:
    """The arguments that a callable is captured with.

    Attributes:
        tensors: The tensors among their leaves, in order.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Their order is the caller's affair.
        kwargs = dict(sorted(kwargs.items()))
        self._args, self._kwargs = args, kwargs
        self._leaves, self._spec = _torch.tree_flatten((args, kwargs))
        self._paths = _torch.leaf_names((args, kwargs))
        self.tensors = tuple(leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor))
        # Calls with these arguments need no look into containers.
        self._is_flat = not kwargs and len(args) == len(self.tensors)

    def call(self, function: Callable[..., Any]) -> Any:
        """Call a function with them."""
        return function(*self._args, **self._kwargs)

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors, with the paths that they are found by."""
        for path, leaf in zip(self._paths, self._leaves, strict=True):
            if isinstance(leaf, torch.Tensor):
                yield path, leaf

    def matched(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor, ...]:
        """The tensors of a later call, in the places of those of the sample.

        Raises:
            ArgumentError: The arguments are put together in another way, or a constant differs.
        """
        if self._is_flat and not kwargs and len(args) == len(self.tensors):
            for argument in args:
                if not isinstance(argument, torch.Tensor):
                    break
            else:
                return args
        kwargs = dict(sorted(kwargs.items()))
        found, spec = _torch.tree_flatten((args, kwargs))
        if spec != self._spec:
            paths = _torch.leaf_names((args, kwargs))
            missing = [path for path in self._paths if path not in paths]
            surplus = [path for path in paths if path not in self._paths]
            raise ArgumentError(
                f"{name} was called with {len(found)} values in another order or container than"
                f" the {len(self._leaves)} of its sample: missing {', '.join(missing) or 'none'},"
                f" not expected {', '.join(surplus) or 'none'}"
            )
        tensors = []
        for path, constant, value in zip(self._paths, self._leaves, found, strict=True):
            if isinstance(constant, torch.Tensor):
                if not isinstance(value, torch.Tensor):
                    raise ArgumentError(
                        f"argument {path} of {name} is {value!r:.80}, expected a tensor of shape"
                        f" {tuple(constant.shape)} and {constant.dtype}"
                    )
                tensors.append(value)
            elif type(value) is not type(constant) or not _equal(value, constant):
                raise ArgumentError(
                    f"argument {path} of {name} is {value!r:.80}, expected {constant!r:.80}: it is"
                    " no tensor, so the capture has made it a constant"
                )
        return tuple(tensors)


class Graphed:
    """A graphed function. Called as the one that it was made of.

    Args:
        captured: Its captured passes.
        clone_outputs: Return copies of outputs and gradients.
    """

    def __init__(self, captured: _Pass, clone_outputs: bool) -> None:
        self.name = captured.name
        # Keeps alive what was captured, and what it was captured from.
        self._captured = captured
        self._sample = captured.sample
        self._replay = captured.forward._feeder()
        self._parameters = captured.parameters
        self._outputs = captured.outputs
        self._spec = captured.spec
        self._is_single = len(captured.outputs) == 1 and captured.spec.is_leaf()
        self._clone = clone_outputs
        self._backward = None if captured.backward is None else captured.backward._feeder()
        self._grad_outputs = captured.grad_outputs
        self._grad_inputs = captured.grad_inputs
        count = len(captured.sample.tensors)
        own = captured.grad_inputs[count:]
        self._accumulated = [
            (parameter, grad)
            for parameter, grad in zip(captured.parameters, own, strict=True)
            if grad is not None
        ]
        self._wants_grad = tuple(tensor.requires_grad for tensor in captured.sample.tensors)
        outputs = zip(captured.outputs, captured.grad_outputs, strict=True)
        self._constant = [
            place
            for place, (output, grad) in enumerate(outputs)
            if grad is None and _is_tensor(output)
        ]
        self._warned = False
        # Counts forward passes: a backward pass belongs to the last one, and is there once.
        self._call = 0
        self._differentiated = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay with these arguments."""
        tensors = self._sample.matched(self.name, args, kwargs)
        if self._backward is not None and torch.is_grad_enabled():
            self._warn_of_lost_gradients(tensors)
            outputs = _torch.apply(_Replay, self, *tensors, *self._parameters)
        else:
            outputs = self.forward(tensors)
        if self._is_single:
            return outputs[0]
        return _torch.tree_unflatten(outputs, self._spec)

    def forward(self, tensors: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
        """Replay the forward pass; the outputs without history."""
        self._call += 1
        try:
            self._replay(tensors)
        except ArgumentError as error:
            names = ", ".join(path for path, _ in self._sample.named_tensors())
            add_note(error, f"cgraph: the tensor arguments of {self.name} are, from 0 on: {names}")
            raise
        if self._clone:
            return tuple(o.detach().clone() if _is_tensor(o) else o for o in self._outputs)
        return tuple(o.detach() if _is_tensor(o) else o for o in self._outputs)

    def backward(
        self,
        call: int,
        leaves: list[torch.Tensor | None],
        grads: tuple[torch.Tensor | None, ...],
    ) -> tuple[torch.Tensor | None, ...]:
        """Replay the backward pass; a gradient for each input and parameter.

        Args:
            call: The number of the forward pass.
            leaves: The inputs that gradients are accumulated in; None for the others.
            grads: Of the outputs.
        """
        if call != self._call:
            raise StateError(
                f"backward through an older call of {self.name}: the calls since then have"
                " overwritten what it saved. Run backward before the next call, or graph one copy"
                " of the callable for each call that is open at the same time"
            )
        if call == self._differentiated:
            raise StateError(
                f"backward for the second time through one call of {self.name}: its saved tensors"
                " are used up, also with retain_graph=True"
            )
        assert self._backward is not None
        self._differentiated = call
        for leaf, own in (*zip(leaves, self._grad_inputs), *self._accumulated):  # noqa: B905
            _detach_gradient(leaf, own)
        places = zip(self._grad_outputs, grads, strict=True)
        # An output that the loss does not depend on has no gradient: zero.
        fed = tuple(
            place.zero_() if grad is None else grad for place, grad in places if place is not None
        )
        self._backward(fed)
        if self._clone:
            return tuple(None if g is None else g.detach().clone() for g in self._grad_inputs)
        # Each time new objects, which autograd may keep as ``.grad`` without a copy.
        return tuple(None if g is None else g.detach() for g in self._grad_inputs)

    def _warn_of_lost_gradients(self, tensors: tuple[torch.Tensor, ...]) -> None:
        if self._warned:
            return
        for wanted, tensor in zip(self._wants_grad, tensors, strict=True):
            if tensor.requires_grad and not wanted:
                self._warned = True
                warnings.warn(
                    f"an argument of {self.name} requires a gradient, and that of its sample did"
                    " not: it gets none. Set requires_grad on the sample",
                    stacklevel=levels_to_user(),
                )


class _Replay(torch.autograd.Function):
    """The autograd node of a graphed callable."""

    @staticmethod
    def forward(ctx: Any, graphed: Graphed, *inputs: torch.Tensor) -> tuple[Any, ...]:
        tensors = inputs[: len(graphed._wants_grad)]
        outputs = graphed.forward(tensors)
        ctx.graphed, ctx.call = graphed, graphed._call
        ctx.leaves = [t if t.requires_grad and t.is_leaf else None for t in tensors]
        ctx.set_materialize_grads(False)
        if graphed._constant:
            ctx.mark_non_differentiable(*(outputs[place] for place in graphed._constant))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        with torch.no_grad():
            found = ctx.graphed.backward(ctx.call, ctx.leaves, grads)
        if torch.is_grad_enabled():
            # Somebody may want a second derivative (create_graph=True), which would miss all that
            # the graph computes.
            trigger = torch.zeros((), requires_grad=True)
            found = _NoSecond.apply(ctx.graphed.name, trigger, *found)  # type: ignore[no-untyped-call]
        return (None, *found)


class _NoSecond(torch.autograd.Function):
    """Passes gradients on and refuses to be differentiated."""

    @staticmethod
    def forward(
        ctx: Any, name: str, _trigger: torch.Tensor, *grads: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        ctx.name = name
        return tuple(None if grad is None else grad.view_as(grad) for grad in grads)

    @staticmethod
    def backward(ctx: Any, *_grads: torch.Tensor | None) -> None:
        raise StateError(
            f"double backward through {ctx.name}, which is graphed: the graph of its backward pass"
            " has no derivative. Call the function that it was made of"
        )


def _detach_gradient(leaf: torch.Tensor | None, own: torch.Tensor | None) -> None:
    """Move a gradient that the replay is about to overwrite, and that will be added to.

    Autograd keeps a first gradient without a copy: ``.grad`` is then our memory.
    """
    if leaf is not None and own is not None:
        grad = leaf.grad
        if grad is not None and grad.data_ptr() == own.data_ptr():
            leaf.grad = grad.clone()


def leaves(result: Any) -> list[Any]:
    """The leaves of what a callable returned."""
    return list(_torch.tree_iter(result))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _equal(value: Any, constant: Any) -> bool:
    try:
        return bool(value == constant)
    except Exception:  # a type that cannot be compared is equal only to itself
        return value is constant
