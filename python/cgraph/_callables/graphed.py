"""Calls of a graphed callable: arguments in, replay, outputs and gradients out."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from cgraph import _torch
from cgraph._autograd.history import leaves_behind, leaves_behind_node
from cgraph._autograd.pool_order import LentGradients, Loan, OpenCall
from cgraph._breaks.flows import no_way_back
from cgraph._breaks.outer_flows import OuterFlow
from cgraph._reason import Reason
from cgraph.causes import Cause
from cgraph.errors import (
    ArgumentError,
    CgraphWarning,
    StateError,
    add_note,
)

if TYPE_CHECKING:
    from cgraph._callables.passes import Pass
    from cgraph.segments import SegmentedGraph

__all__ = ["Graphed", "reached"]


class Graphed:
    """A graphed function, called like the original one.

    Args:
        captured: Its captured passes.
        clone_outputs: Return copies of outputs.
        clone_gradients: Give copies of gradients.

    Attributes:
        kept: An object that lives as long as one of its calls may need it.
    """

    kept: Sequence[Any] = ()

    def __init__(self, captured: Pass, clone_outputs: bool, clone_gradients: bool) -> None:
        self.name = captured.name
        # Keeps the capture and its sources alive.
        self._captured = captured
        self._order = captured.order
        self._sample = captured.sample
        self._replay = captured.forward._replay_with
        self._has_run = False
        self._outputs = captured.outputs
        self._spec = captured.spec
        self._is_single = len(captured.outputs) == 1 and captured.spec.is_leaf()
        self._clone = clone_outputs
        self._clone_gradients = clone_gradients
        self._backward = None if captured.backward is None else captured.backward._replay_with
        self._grad_outputs = captured.grad_outputs
        self._grad_inputs = captured.grad_inputs
        self._count = len(captured.sample.tensors)
        self._parameters = captured.parameters
        # Autograd would call the hooks of other parameters, without a gradient. The parameters that
        # breaks use are known only in the backward pass.
        own = captured.grad_inputs[self._count :]
        self._used_places = [
            place for place, one in enumerate(own) if one is not None or captured.flows
        ]
        self._used_parameters = tuple(captured.parameters[place] for place in self._used_places)
        self._lent_parameters = [
            (parameter, own)
            for parameter, own in zip(
                captured.parameters, captured.grad_inputs[self._count :], strict=True
            )
            if own is not None and own.layout is torch.strided
        ]
        outputs = zip(captured.outputs, captured.grad_outputs, strict=True)
        self._constant = [
            place
            for place, (output, grad) in enumerate(outputs)
            if grad is None and _is_tensor(output)
        ]
        tensors = enumerate(captured.sample.tensors)
        self._without_grad = [place for place, tensor in tensors if not tensor.requires_grad]
        self._frozen = captured.frozen
        self._warned = False
        self._last: weakref.ref[OpenCall] | None = None

    def take_any_constants(self) -> None:
        """Leave the comparison of non-tensor arguments to the caller."""
        self._sample.compares_constants = False

    def stand_for(self, parameters: Mapping[int, torch.Tensor]) -> None:
        """Give gradients to other parameters than those of the capture, found by their ``id``."""
        self._parameters = tuple(parameters.get(id(one), one) for one in self._parameters)
        self._used_parameters = tuple(self._parameters[place] for place in self._used_places)
        self._frozen = tuple(parameters.get(id(one), one) for one in self._frozen)
        self._lent_parameters = [
            (parameters.get(id(one), one), own) for one, own in self._lent_parameters
        ]
        for flow in self._captured.flows:
            flow.stand_for(parameters)

    @property
    def parameters(self) -> tuple[torch.Tensor, ...]:
        """The parameters that get gradients."""
        return self._parameters

    @property
    def graphs(self) -> tuple[SegmentedGraph, ...]:
        """The graph of the forward pass, and that of the backward pass if there is one."""
        return tuple(filter(None, (self._captured.forward, self._captured.backward)))

    def as_run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call that returns the results computed at the capture of its forward pass."""
        self._has_run = True
        try:
            return self(*args, **kwargs)
        finally:
            self._has_run = False

    @property
    def breaks(self) -> tuple[str, ...]:
        """The breaks of the forward pass, for eager work."""
        return getattr(self._captured.forward, "breaks", ())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay with these arguments."""
        tensors = self._sample.matched(self.name, args, kwargs)
        if self._backward is not None and torch.is_grad_enabled():
            self._warn_of_lost_gradients(tensors)
            outputs = _torch.apply(_Replay, self, *tensors, *self._used_parameters)
        else:
            outputs = self.forward(tensors)
        if self._is_single:
            return outputs[0]
        return _torch.tree_unflatten(outputs, self._spec)

    def loses_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether a call has gradients, and the capture was made without."""
        if self._captured.records or not torch.is_grad_enabled():
            return False
        tensors = (one for one in _torch.tree_iter((args, kwargs)) if _is_tensor(one))
        return any(one.requires_grad for one in (*tensors, *self._parameters, *self._frozen))

    def forward(self, tensors: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
        """Replay the forward pass; return the outputs without history."""
        self._order.replaying(self._captured.forward_number)
        try:
            if self._has_run:
                pass
            elif self._captured.flows:
                # Breaks record their operators, and would each have to change the mode.
                with torch.enable_grad():
                    self._replay(tensors)
            else:
                self._replay(tensors)
        except ArgumentError as error:
            converted = self._converted(tensors)
            if converted is not None:
                return self.forward(converted)
            names = ", ".join(path for path, _ in self._sample.named_tensors())
            add_note(error, f"cgraph: the tensor arguments of {self.name} are, from 0 on: {names}")
            raise
        if self._clone:
            return tuple(o.detach().clone() if _is_tensor(o) else o for o in self._outputs)
        return tuple(o.detach() if _is_tensor(o) else o for o in self._outputs)

    def _converted(self, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        """Convert tensors as ``copy_`` does, which torch's callables use; None without need.

        A shape that would broadcast is not what the capture was made for.
        """
        found = []
        for one, sample in zip(tensors, self._sample.tensors, strict=True):
            differs = one.dtype != sample.dtype or one.device != sample.device
            is_plain = one.layout is torch.strided and one.shape == sample.shape
            is_copied = differs and is_plain and one.device.type in ("cpu", sample.device.type)
            # A gradient would have to get back to another device.
            if is_copied and (one.device == sample.device or not one.requires_grad):
                one = one.detach().to(sample.device, sample.dtype)
            found.append(one)
        return tuple(found) if any(map(operator.is_not, found, tensors)) else None

    @property
    def saved_versions(self) -> list[int]:
        """The versions of the outputs that the backward pass reads; each write counts one up."""
        return [self._outputs[place]._version for place in self._captured.saved]

    def opened(self) -> OpenCall:
        """Return the last call, whose backward pass may follow."""
        numbers = self._captured.forward_number, self._captured.backward_number
        call = self._order.opened(*numbers)
        self._last = weakref.ref(call)
        return call

    @property
    def is_open(self) -> bool:
        """True if the backward pass of the last call may still run."""
        call = None if self._last is None else self._last()
        return call is not None and call.is_open

    def backward(
        self,
        owners: list[torch.Tensor | bool],
        grads: tuple[torch.Tensor | None, ...],
    ) -> tuple[torch.Tensor | None, ...]:
        """Replay the backward pass; return a gradient for each input and each used parameter.

        Args:
            owners: For each input the leaf whose ``.grad`` the gradient may become, or True to copy
                it.
            grads: Gradients of the outputs.
        """
        assert self._backward is not None
        self._order.replaying(self._captured.backward_number)
        places = zip(self._grad_outputs, grads, strict=True)
        # An output that the loss does not depend on has no gradient: zero.
        fed = tuple(
            place.zero_() if grad is None else grad for place, grad in places if place is not None
        )
        places = zip(self._grad_outputs, grads, strict=True)
        is_whole = all(own is None or grad is not None for own, grad in places)
        for flow in self._captured.flows:
            flow.live = None if is_whole else self._live(flow, grads)
        self._backward(fed)
        grad_inputs = self._grad_inputs if is_whole else self._used(grads)
        if self._clone_gradients:
            copies = [None if g is None else g.detach().clone() for g in grad_inputs]
            return self._of_used(self._with_those_of_breaks(copies))
        loans: list[Loan] = []
        found: list[torch.Tensor | None] = []
        for owner, own in zip(owners, grad_inputs):  # noqa: B905
            if own is None:
                found.append(None)
            elif owner is True or own.layout is not torch.strided:
                found.append(own.detach().clone())
            else:
                found.append(own.detach())
                if isinstance(owner, torch.Tensor):
                    loans.append((owner, own))
        # New objects each time, which autograd may keep as ``.grad`` without a copy.
        for own in grad_inputs[self._count :]:
            found.append(None if own is None else own.detach())
        lent = LentGradients([*self._lent_parameters, *loans], zip(found, grad_inputs, strict=True))
        self._order.lend(self._captured.backward_number, lent)
        _torch.at_end_of_backward(lent.end)
        return self._of_used(self._with_those_of_breaks(found))

    def _of_used(self, found: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the inputs, and of the parameters that the node depends on."""
        if len(self._used_parameters) == len(self._parameters):
            return found
        used = (found[self._count + place] for place in self._used_places)
        return *found[: self._count], *used

    def of_all(self, found: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return the gradients of all inputs and parameters.

        Args:
            found: The gradients that the node has passed on; those of used parameters come last.
        """
        first = len(found) - len(self._used_places)
        of_parameters: list[torch.Tensor | None] = [None] * len(self._parameters)
        for place, one in zip(self._used_places, found[first:], strict=True):
            of_parameters[place] = one
        return [*found[first - self._count : first], *of_parameters]

    def _with_those_of_breaks(
        self, found: list[torch.Tensor | None]
    ) -> tuple[torch.Tensor | None, ...]:
        """Add the gradients of parameters that breaks have used, which are known only now."""
        if not self._captured.flows:
            return tuple(found)
        given = [one for flow in self._captured.flows for one in flow.taken()]
        places = {id(one): place for place, one in enumerate(self._parameters, self._count)}
        for leaf, grad in given:
            place = places.get(id(leaf))
            if place is None:
                raise no_way_back(f"a break of {self.name}", leaf)
            if grad is not None:
                own = found[place]
                found[place] = grad if own is None else _sum(own, grad)
        return tuple(found)

    def _live(self, flow: OuterFlow, grads: tuple[torch.Tensor | None, ...]) -> frozenset[int]:
        """Return the results of a break that the loss depends on."""
        known = zip(self._captured.live, grads, strict=True)
        live = (one for found, grad in known if grad is not None for one in found)
        return frozenset(number for owner, number in live if owner is flow)

    def _used(self, grads: tuple[torch.Tensor | None, ...]) -> list[torch.Tensor | None]:
        """Return the gradients of the loss's dependencies, through outputs with gradients."""
        known = zip(self._captured.reached, grads, strict=True)
        used = frozenset[int]().union(*(one for one, grad in known if grad is not None))
        return [own if place in used else None for place, own in enumerate(self._grad_inputs)]

    def _warn_of_lost_gradients(self, tensors: tuple[torch.Tensor, ...]) -> None:
        if self._warned:
            return
        if any(tensors[place].requires_grad for place in self._without_grad):
            lost = "an argument", "that of its sample"
        elif any(parameter.requires_grad for parameter in self._frozen):
            lost = "a parameter", "it at the capture"
        else:
            return
        self._warned = True
        text = f"{lost[0]} of {self.name} requires a gradient, and {lost[1]} did not: it gets none"
        Reason(Cause.LATE_GRADIENT, text).warn(kind=CgraphWarning)


def reached(outputs: Sequence[Any], pass_inputs: Sequence[torch.Tensor]) -> list[frozenset[int]]:
    """Return for each output the indices of the tensors that it depends on, as autograd knows it.

    Tensors that no output is known to depend on count for each.
    """
    places = {id(tensor): place for place, tensor in enumerate(pass_inputs)}
    with_grad = [_is_tensor(output) and output.requires_grad for output in outputs]
    if sum(with_grad) == 1:
        return [frozenset(places.values()) if one else frozenset() for one in with_grad]
    found = [
        # A tensor that is returned as it is depends on itself.
        frozenset(
            places[one] for one in map(id, (output, *leaves_behind([output]))) if one in places
        )
        if is_reached
        else frozenset()
        for output, is_reached in zip(outputs, with_grad, strict=True)
    ]
    unknown = frozenset(places.values()).difference(*found)
    return [one | unknown for one in found]


class _Replay(torch.autograd.Function):
    """The autograd node of a graphed callable."""

    @staticmethod
    def forward(ctx: Any, graphed: Graphed, *inputs: torch.Tensor) -> tuple[Any, ...]:
        tensors = inputs[: graphed._count]
        outputs = graphed.forward(tensors)
        ctx.graphed, ctx.call = graphed, graphed.opened()
        ctx.versions = graphed.saved_versions
        ctx.owners = [_owner(tensor) for tensor in tensors]
        inner = (one for one in tensors if one.requires_grad and not one.is_leaf)
        ctx.inner = [*map(weakref.ref, inner)]
        ctx.set_materialize_grads(False)
        if graphed._constant:
            ctx.mark_non_differentiable(*(outputs[place] for place in graphed._constant))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.call.use(ctx.graphed.name)
        if ctx.versions != ctx.graphed.saved_versions:
            raise StateError(
                "one of the variables needed for gradient computation has been modified by an"
                f" inplace operation: a result of {ctx.graphed.name}, which its backward pass"
                " reads. Write to a copy of it, as y = y * 2 instead of y.mul_(2)"
            )
        try:
            with torch.no_grad():
                found = ctx.graphed.backward(ctx.owners, grads)
        finally:
            ctx.call.end()
        if torch.is_grad_enabled():
            # A second derivative (create_graph=True) would miss everything that the graph computes.
            leaves = [owner for owner in ctx.owners if isinstance(owner, torch.Tensor)]
            # Through these, or where they are gone through the leaves behind them.
            inner = [one for one in (reference() for reference in ctx.inner) if one is not None]
            behind = leaves_behind_node(ctx) if len(inner) < len(ctx.inner) else []
            sources = (torch.zeros((), requires_grad=True), *grads, *leaves, *inner, *behind)
            sources += ctx.graphed._parameters
            found = _NoSecond.apply(ctx.graphed.name, len(found), *found, *sources)  # type: ignore[no-untyped-call]
        return (None, *found)


class _NoSecond(torch.autograd.Function):
    """A node that passes gradients on and refuses to be differentiated by their dependencies."""

    @staticmethod
    def forward(
        ctx: Any, name: str, count: int, *tensors: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        ctx.name = name
        return tuple(None if grad is None else grad.view_as(grad) for grad in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_grads: torch.Tensor | None) -> None:
        raise StateError(
            f"double backward through {ctx.name}, which is graphed: the graph of its backward pass"
            " has no derivative. Call the original function"
        )


def _owner(tensor: torch.Tensor) -> torch.Tensor | bool:
    """Return the tensor if it is a leaf; otherwise True to copy its gradient, or False.

    Another graphed callable copies its gradients itself. Other operators may pass a gradient on
    unchanged, as ``view`` and ``+`` do, until it becomes the ``.grad`` of a leaf that is unknown
    here.
    """
    if not tensor.requires_grad:
        return False
    if tensor.is_leaf:
        return tensor
    return not isinstance(getattr(tensor.grad_fn, "graphed", None), Graphed)


def _sum(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Add two gradients; torch adds a sparse one to a dense one only in that order."""
    return other + one if one.is_sparse else one + other


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
