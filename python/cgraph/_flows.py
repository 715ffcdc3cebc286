"""How gradients get back through the breaks of a captured function.

In eager the history of a result leads through the break. Here each call of the break has a history
of its own, which begins with its arguments, and the captured one has a node in its place. Where the
captured backward pass comes to that node, it has a break as well, which runs back through the
history of the last call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cgraph import _torch
from cgraph._history import leaves_behind, nodes_behind
from cgraph._torch import tree_flatten, tree_unflatten
from cgraph.breaks import Breakable, in_backward_pass
from cgraph.errors import CallableError, CaptureError

__all__ = ["Flow", "no_way_back"]


class Flow:
    """A break whose calls have a history of their own.

    Args:
        fn: The function of the break.
        title: What errors call the break.
        arguments: Its first positional and keyword arguments.

    Attributes:
        anchor: A leaf that results depend on, also if no argument requires a gradient. Who asks for
            its gradient has the break run back for the parameters that it uses.
        divides: The capture of the backward pass; None as long as there is none.
    """

    def __init__(self, fn: Callable[..., Any], title: str, arguments: Any) -> None:
        self.anchor = torch.zeros((), requires_grad=True)
        self.divides: Breakable | None = None
        self._fn = fn
        self._title = title
        leaves = tree_flatten(arguments)[0]
        outer = {id(one): one for one in leaves if _requires_gradient(one)}
        self._outer = tuple(outer.values())
        numbers = {number: index for index, number in enumerate(outer)}
        # Which of them a leaf of the arguments is; None for one that requires no gradient.
        self._indices = [numbers.get(id(leaf)) for leaf in leaves]
        self._begun = _torch.autograd_sequence()
        # The results that require gradients, by their places among the leaves.
        self._results: dict[int, torch.Tensor] = {}
        self._connected: tuple[int, ...] | None = None
        self._inner: dict[int, torch.Tensor] = {}
        self._found: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the break; the results have a history that begins with the arguments.

        Raises:
            CaptureError: It begins elsewhere, or a result requires a gradient that required none in
                the first call.
        """
        leaves, spec = tree_flatten((args, kwargs))
        self._inner = inner = {}
        for place, index in enumerate(self._indices):
            if index is not None:
                if index not in inner:
                    inner[index] = leaves[place].detach().requires_grad_()
                leaves[place] = inner[index]
        args, kwargs = tree_unflatten(leaves, spec)
        result = self._fn(*args, **kwargs)
        found = tree_flatten(result)[0]
        self._results = {
            place: leaf for place, leaf in enumerate(found) if _requires_gradient(leaf)
        }
        if self._connected is None:
            self._connected = tuple(self._results)
            nodes = nodes_behind(self._results.values())
            if any(_torch.sequence_of(node) < self._begun for node in nodes):
                raise CaptureError(
                    f"the break {self._title} has used a tensor that was computed before it and"
                    " requires a gradient, and which is no argument: pass it as an argument"
                )
        elif not self._results.keys() <= set(self._connected):
            raise CaptureError(
                f"the break {self._title} has returned a tensor that requires a gradient where the"
                " capture had one that requires none: let it require one in each call, or detach it"
            )
        return result

    def connected(self, result: Any) -> Any:
        """The first result, as the code behind the break gets it, with the node in its history.

        Args:
            result: What was made of the first result, in the same containers, without history.
        """
        outer, self._outer = self._outer, ()
        if not self._connected:
            return result
        leaves, spec = tree_flatten(result)
        ends = (leaves[place] for place in self._connected)
        made = _torch.apply(_Node, self, *ends, self.anchor, *outer)
        for place, end in zip(self._connected, made, strict=True):
            leaves[place] = end
        return tree_unflatten(leaves, spec)

    def require_known(self, parameters: Sequence[torch.Tensor]) -> None:
        """Refuse a break that has used a leaf which gets no gradient; forgets what it has found.

        Args:
            parameters: Those that get gradients.

        Raises:
            CallableError: It has.
        """
        known = {id(one) for one in parameters}
        for leaf, _ in self.taken():
            if id(leaf) not in known:
                raise no_way_back(f"the break {self._title}", leaf)

    def taken(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Leaves that the break has found elsewhere than in its arguments, and their gradients.

        Those of the last backward pass; they are given once.
        """
        found, self._found = self._found, []
        return found

    def back(self, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run back through the last call: gradients of results in, those of arguments out."""
        results, self._results = self._results, {}
        inner = [one for _, one in sorted(self._inner.items())]
        self._inner = {}
        own = {id(one) for one in inner}
        ends = list(results.values())
        leaves = {id(one): one for one in (*leaves_behind(ends), *ends) if one.is_leaf}
        behind = [one for number, one in leaves.items() if number not in own]
        pairs = zip(self._connected or (), gradients, strict=True)
        given = [gradient for place, gradient in pairs if place in results]
        found: Sequence[torch.Tensor | None] = [None] * (len(inner) + len(behind))
        if ends:
            # Hooks of leaves run when the gradients get to them, behind the graph's own node.
            with _torch.hooks_aside(behind):
                found = torch.autograd.grad(ends, (*inner, *behind), given, allow_unused=True)
        self._found = list(zip(behind, found[len(inner) :], strict=True))
        # What is handed on as it is lies where the next segment may write.
        taken = {_storage(gradient) for gradient in gradients}
        return tuple(
            torch.zeros_like(one)
            if gradient is None
            else gradient.clone()
            if gradient.layout is torch.strided and _storage(gradient) in taken
            else gradient
            for one, gradient in zip(inner, found[: len(inner)], strict=True)
        )

    def run_back(self, gradients: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Let the backward pass that is being captured have a break here.

        Raises:
            CaptureError: None is, or one that cannot be divided.
        """
        if self.divides is None:
            raise in_backward_pass(self._title)
        found: tuple[torch.Tensor, ...] = self.divides.run(
            self.back, f"gradients of {self._title}", gradients, {}
        )
        return found


def no_way_back(user: str, tensor: torch.Tensor) -> CallableError:
    """The error of something that requires a gradient of a tensor which would not get one."""
    return CallableError(
        f"{user} requires a gradient of a tensor of shape {list(tensor.shape)} that is no argument"
        " and in no module that the function names: make it a parameter of one, pass it as an"
        " argument, or call under torch.no_grad()"
    )


class _Node(torch.autograd.Function):
    """Stands for a break in the captured history."""

    @staticmethod
    def forward(ctx: Any, flow: Flow, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.flow = flow
        ctx.count = len(flow._connected or ())
        return tuple(one.detach() for one in tensors[: ctx.count])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # None for the flow, the results and the anchor.
        return (*(None,) * (ctx.count + 2), *ctx.flow.run_back(gradients))


def _requires_gradient(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
