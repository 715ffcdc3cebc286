"""Gradients through the breaks of a captured function.

In eager the history of a result leads through the break. Here each call of the break has a history
of its own, which begins with its arguments, and the captured history has a node in its place. Where
the captured backward pass comes to that node, it has a break as well, which runs back through the
history of the last call.

The backward pass of the function's result is captured after the function (``outer_flows.py``), a
backward pass inside the function with it (``inner_flows.py``).
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from cgraph import _torch
from cgraph._autograd.gradients import with_own_memory
from cgraph._autograd.history import leaves_behind, nodes_behind
from cgraph._reason import Reason
from cgraph._torch import tree_flatten, tree_unflatten
from cgraph.breaks import Breakable, Work, innermost
from cgraph.causes import Cause
from cgraph.errors import CallableError, CaptureError

__all__ = ["Flow", "no_way_back", "requires_gradient", "unreached"]


class Flow(ABC):
    """A break whose calls have a history of their own.

    Args:
        work: The work of the break.
        place: The line that has called it.
        arguments: Its first positional and keyword arguments.
        divides: The capture.

    Attributes:
        divides: The capture that is under way; None if there is none.
    """

    def __init__(self, work: Work, place: str, arguments: Any, divides: Breakable) -> None:
        self.divides: Breakable | None = divides
        self._fn = work.fn
        self._name, self._title = work.name, f"{work.name} ({place})"
        leaves = tree_flatten(arguments)[0]
        # These are found where the history ends, as are others that the break uses.
        self._parameters: dict[int, torch.Tensor] = {
            place: leaf for place, leaf in enumerate(leaves) if isinstance(leaf, torch.nn.Parameter)
        }
        inputs = (one for one in leaves if not isinstance(one, torch.nn.Parameter))
        outer = {id(one): one for one in inputs if requires_gradient(one)}
        self._outer = tuple(outer.values())
        numbers = {number: index for index, number in enumerate(outer)}
        # Containers take longer.
        self._is_flat = not arguments[1] and list(map(id, arguments[0])) == list(map(id, leaves))
        # Indices of leaves of the arguments; None for one that requires no gradient.
        self._indices = [numbers.get(id(leaf)) for leaf in leaves]
        self._begun = _torch.autograd_sequence()
        # The results that require gradients, by their places among the leaves.
        self._results: dict[int, torch.Tensor] = {}
        self._connected: tuple[int, ...] | None = None
        self._inner: dict[int, torch.Tensor] = {}
        self._guard = _Guard(self._title)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the break; the results have a history that begins with the arguments.

        Raises:
            CaptureError: The history begins elsewhere, the break has registered a hook on an
                argument or given it a gradient, or a result requires a gradient that required none
                in the first call.
        """
        leaves, spec = (list(args), None) if self._is_flat else tree_flatten((args, kwargs))
        self._inner = inner = {}
        for place, index in enumerate(self._indices):
            if index is not None:
                if index not in inner:
                    inner[index] = self._leaf(leaves[place])
                leaves[place] = inner[index]
        for place, parameter in self._parameters.items():
            leaves[place] = parameter
        # The break may ask for gradients itself.
        with self._guard.opened():
            if spec is None:
                result = self._fn(*leaves)
            else:
                args, kwargs = tree_unflatten(leaves, spec)
                result = self._fn(*args, **kwargs)
        if any(one.grad is not None for one in inner.values()):
            raise CaptureError(
                f"the break {self._title} runs a backward pass to its arguments, which would end"
                " there: compute the gradients with torch.autograd.grad()"
            )
        hooked = (hooks for one in inner.values() for hooks in _torch.hooks_of_leaf(one))
        if any(len(hooks or ()) > 1 for _, _, hooks in hooked):
            raise CaptureError(
                f"the break {self._title} has registered a hook on an argument, which would see the"
                " gradient of the break's own part alone: register it before the call"
            )
        found = [result] if isinstance(result, torch.Tensor) else tree_flatten(result)[0]
        self._results = {place: leaf for place, leaf in enumerate(found) if requires_gradient(leaf)}
        if self._connected is None:
            self._connected = tuple(self._results)
            self._look_at_first_call()
        elif not self._results.keys() <= set(self._connected):
            raise CaptureError(
                f"the break {self._title} has returned a tensor that requires a gradient where the"
                " capture had one that requires none: let it require one in each call, or detach it"
            )
        return result

    @property
    def is_connected(self) -> bool:
        """True if gradients get back through the first call, or may begin at its arguments."""
        return bool(self._connected) or any(index is not None for index in self._indices)

    def connected(self, result: Any) -> Any:
        """Return the first result for the code after the break, with the node in its history.

        Args:
            result: A copy of the first result, in the same containers, without history.
        """
        inputs, self._outer = self._inputs(), ()
        if not self._connected:
            return result
        leaves, spec = tree_flatten(result)
        ends = (leaves[place] for place in self._connected)
        # A break may record its operators where its caller does not.
        with torch.enable_grad():
            made = _torch.apply(_Node, self, *ends, *inputs)
        for place, end in zip(self._connected, made, strict=True):
            leaves[place] = end
        return tree_unflatten(leaves, spec)

    @abstractmethod
    def run_back(
        self, gradients: tuple[torch.Tensor | None, ...]
    ) -> tuple[torch.Tensor | None, ...]:
        """Let the backward pass that is being captured have a break here.

        Returns:
            Gradients of the tensors that :meth:`connected` has put before the node in the history.

        Raises:
            CaptureError: No backward pass is being captured, or it cannot be divided or has a
                history itself.
        """

    def settle(self) -> bool:
        """End the capture of the forward pass; return whether calls still need the flow."""
        return True

    @abstractmethod
    def _look_at_first_call(self) -> None:
        """Note the history of the first call."""

    @abstractmethod
    def _inputs(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors before the node in the history."""

    def _divided(
        self,
        back: Callable[..., Any],
        gradients: tuple[torch.Tensor | None, ...],
        refusal: str | None,
        stand_in: Callable[..., Any] | None = None,
    ) -> tuple[torch.Tensor | None, ...]:
        """Call ``back`` in a break of the backward pass, which fails if there is a refusal.

        ``stand_in`` is called instead where the capture runs nothing.
        """
        if self.divides is None:
            raise CaptureError(
                f"a gradient came to the break {self._title} after its capture had ended, and no"
                " replay would give it: run the backward pass inside of the captured function"
            )
        if refusal is None and torch.is_grad_enabled():
            refusal = (
                f"a backward pass with create_graph=True comes through the break {self._title},"
                " which has no second derivatives"
            )
        if refusal is not None:
            # Raise in the break, so that the capture fails even if someone catches it.
            back = stand_in = functools.partial(_refuse, refusal)
        name = f"gradients of {self._name}"
        work = Work(back, name, is_backward=True, stand_in=stand_in)
        # The capture shows this break like all others.
        capture = innermost() or self.divides
        found: tuple[torch.Tensor | None, ...] = capture.run(work, gradients, {})
        return found

    def _pairs(
        self, gradients: tuple[torch.Tensor | None, ...], live: frozenset[int] | None = None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the results of the last call that get gradients, and the gradients."""
        pairs = [
            (self._results[place], gradient)
            for number, (place, gradient) in enumerate(
                zip(self._connected or (), gradients, strict=True)
            )
            if gradient is not None and place in self._results and (live is None or number in live)
        ]
        return [end for end, _ in pairs], [gradient for _, gradient in pairs]

    def _arguments(self) -> list[torch.Tensor]:
        """Return the leaves that the last call got as arguments, each once."""
        return [one for _, one in sorted(self._inner.items())]

    def _leaves_behind(
        self, ends: Sequence[torch.Tensor], *, arguments: bool = False
    ) -> list[torch.Tensor]:
        """Return leaves that results depend on, with or without those that stand for arguments."""
        own = () if arguments else {id(one) for one in self._inner.values()}
        leaves = {id(one): one for one in (*leaves_behind(ends), *ends) if one.is_leaf}
        return [one for number, one in leaves.items() if number not in own]

    def _gradients(
        self,
        ends: Sequence[torch.Tensor],
        given: Sequence[torch.Tensor],
        inner: Sequence[torch.Tensor],
        behind: Sequence[torch.Tensor],
        keeps: bool,
    ) -> list[torch.Tensor | None]:
        """Return gradients of arguments and of leaves behind the results."""
        found: Sequence[torch.Tensor | None] = [None] * (len(inner) + len(behind))
        if ends:
            # Hooks of leaves run when the gradients get to them, after the graph's own node.
            with self._guard.opened(), _torch.hooks_aside(behind):
                found = torch.autograd.grad(
                    ends, (*inner, *behind), given, allow_unused=True, retain_graph=keeps
                )
        # Gradients that are passed on unchanged lie where the next segment may write.
        return with_own_memory(found, given)

    def _uses_older(self) -> str | None:
        """Return why a break that used what was recorded before is refused; None if it has not."""
        nodes = nodes_behind(self._results.values())
        if not any(_torch.sequence_of(node) < self._begun for node in nodes):
            return None
        return (
            f"the break {self._title} has used a tensor that was computed before it, or on"
            " another thread, and requires a gradient: pass it as an argument"
        )

    def _leaf(self, argument: torch.Tensor) -> torch.Tensor:
        leaf = argument.detach().requires_grad_()
        leaf.register_hook(self._guard)
        return leaf


def _refuse(reason: str, *_: torch.Tensor | None) -> None:
    raise CaptureError(reason)


def no_way_back(user: str, tensor: torch.Tensor) -> CallableError:
    """Return the error of a user that requires a gradient of a tensor that would not get one."""
    reason = unreached(user, tensor)
    return reason.given_to(CallableError(str(reason)))


def unreached(user: str, tensor: torch.Tensor) -> Reason:
    """Return the reason against a user that requires a gradient of a tensor that would get none."""
    return Reason(
        Cause.NO_GRADIENT,
        f"{user} requires a gradient of a tensor of shape {list(tensor.shape)} that is not an"
        " argument and in no module that the function names",
    )


class _Guard:
    """The hook of arguments, which refuses gradients that come another way.

    It does not know the flow: autograd would keep that alive in a cycle.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._is_open = False

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Let gradients come in the ``with`` block."""
        before, self._is_open = self._is_open, True
        try:
            yield
        finally:
            self._is_open = before

    def __call__(self, _: torch.Tensor) -> None:
        """Refuse a gradient outside of :meth:`opened`."""
        if not self._is_open:
            raise CaptureError(
                f"a gradient reached an argument of the break {self._title} by a tensor that the"
                " break has kept, and cannot get further: return that tensor from the function, or"
                " keep it detached"
            )


class _Node(torch.autograd.Function):
    """A node that stands for a break in the captured history."""

    @staticmethod
    def forward(ctx: Any, flow: Flow, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.flow = flow
        ctx.count = len(flow._connected or ())
        ctx.set_materialize_grads(False)
        return tuple(one.detach() for one in tensors[: ctx.count])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        # None for the flow and the results.
        return (*(None,) * (ctx.count + 1), *ctx.flow.run_back(gradients))


def requires_gradient(leaf: Any) -> bool:
    """Return whether a leaf of arguments or results is a tensor that requires a gradient."""
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad
