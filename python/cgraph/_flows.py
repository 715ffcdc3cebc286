"""How gradients get back through the breaks of a captured function.

In eager the history of a result leads through the break. Here each call of the break has a history
of its own, which begins with its arguments, and the captured one has a node in its place. Where the
captured backward pass comes to that node, it has a break as well, which runs back through the
history of the last call.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from cgraph import _torch
from cgraph._gradients import with_own_memory
from cgraph._history import leaves_behind, nodes_behind
from cgraph._torch import tree_flatten, tree_unflatten
from cgraph.breaks import Breakable, in_backward_pass
from cgraph.errors import CallableError, CaptureError

__all__ = ["Flow", "live_results", "no_way_back"]


class Flow:
    """A break whose calls have a history of their own.

    Args:
        fn: The function of the break.
        name: What the break is called.
        place: The line that has called it.
        arguments: Its first positional and keyword arguments.

    Attributes:
        anchor: A leaf that results depend on, also if no argument requires a gradient. Who asks for
            its gradient has the break run back for the parameters that it uses.
        divides: The capture of the backward pass; None as long as there is none.
        live: Which of the results that require gradients are to get some in the next backward pass,
            by their numbers; None for all.
    """

    def __init__(self, fn: Callable[..., Any], name: str, place: str, arguments: Any) -> None:
        self.anchor = torch.zeros((), requires_grad=True)
        self.divides: Breakable | None = None
        self.live: frozenset[int] | None = None
        self._fn = fn
        self._name, self._title = name, f"{name} ({place})"
        leaves = tree_flatten(arguments)[0]
        # These are found where the history ends, as others that the break uses.
        self._parameters: dict[int, torch.Tensor] = {
            place: leaf for place, leaf in enumerate(leaves) if isinstance(leaf, torch.nn.Parameter)
        }
        inputs = (one for one in leaves if not isinstance(one, torch.nn.Parameter))
        outer = {id(one): one for one in inputs if _requires_gradient(one)}
        self._outer = tuple(outer.values())
        numbers = {number: index for index, number in enumerate(outer)}
        # Containers take longer.
        self._is_flat = not arguments[1] and list(map(id, arguments[0])) == list(map(id, leaves))
        # Which of them a leaf of the arguments is; None for one that requires no gradient.
        self._indices = [numbers.get(id(leaf)) for leaf in leaves]
        self._begun = _torch.autograd_sequence()
        # The results that require gradients, by their places among the leaves.
        self._results: dict[int, torch.Tensor] = {}
        self._connected: tuple[int, ...] | None = None
        self._inner: dict[int, torch.Tensor] = {}
        self._references: list[weakref.ref[torch.Tensor]] = []
        self._guard = _Guard(self._title)
        self._found: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the break; the results have a history that begins with the arguments.

        Raises:
            CaptureError: It begins elsewhere, the break has registered a hook on an argument or
                given it a gradient, or a result requires a gradient that required none in the first
                call.
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
                f"the break {self._title} runs a backward pass to its arguments, which would get no"
                " further: ask for the gradients, by torch.autograd.grad()"
            )
        hooked = (hooks for one in inner.values() for hooks in _torch.hooks_of_leaf(one))
        if any(len(hooks or ()) > 1 for _, _, hooks in hooked):
            raise CaptureError(
                f"the break {self._title} has registered a hook on an argument, which would see the"
                " gradient of the break's own part alone: register it before the call"
            )
        found = [result] if isinstance(result, torch.Tensor) else tree_flatten(result)[0]
        self._results = {
            place: leaf for place, leaf in enumerate(found) if _requires_gradient(leaf)
        }
        if self._connected is None:
            self._references = [weakref.ref(one) for one in inner.values()]
            self._connected = tuple(self._results)
            nodes = nodes_behind(self._results.values())
            if any(_torch.sequence_of(node) < self._begun for node in nodes):
                raise CaptureError(
                    f"the break {self._title} has used a tensor that was computed before it, or on"
                    " another thread, and requires a gradient: pass it as an argument"
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
        # A break may record what it does where its caller does not.
        with torch.enable_grad():
            made = _torch.apply(_Node, self, *ends, self.anchor, *outer)
        for place, end in zip(self._connected, made, strict=True):
            leaves[place] = end
        return tree_unflatten(leaves, spec)

    def stand_for(self, parameters: Mapping[int, torch.Tensor]) -> None:
        """Give the break other parameters than those of the capture, found by their ``id``."""
        pairs = self._parameters.items()
        self._parameters = {place: parameters.get(id(one), one) for place, one in pairs}

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

    def back(self, *gradients: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Run back through the last call: gradients of results in, those of arguments out."""
        results, self._results, self._found = self._results, {}, []
        inner = [one for _, one in sorted(self._inner.items())]
        self._inner = {}
        live = self.live
        pairs = [
            (results[place], gradient)
            for number, (place, gradient) in enumerate(
                zip(self._connected or (), gradients, strict=True)
            )
            if gradient is not None and place in results and (live is None or number in live)
        ]
        ends, given = [end for end, _ in pairs], [gradient for _, gradient in pairs]
        own = {id(one) for one in inner}
        leaves = {id(one): one for one in (*leaves_behind(ends), *ends) if one.is_leaf}
        behind = [one for number, one in leaves.items() if number not in own]
        found: Sequence[torch.Tensor | None] = [None] * (len(inner) + len(behind))
        if ends:
            # Hooks of leaves run when the gradients get to them, behind the graph's own node.
            with self._guard.opened(), _torch.hooks_aside(behind):
                found = torch.autograd.grad(ends, (*inner, *behind), given, allow_unused=True)
        # What is handed on as it is lies where the next segment may write.
        found = with_own_memory(found, given)
        self._found = list(zip(behind, found[len(inner) :], strict=True))
        return tuple(
            torch.zeros_like(one) if gradient is None else gradient
            for one, gradient in zip(inner, found[: len(inner)], strict=True)
        )

    def require_forgotten(self) -> None:
        """Refuse a break that keeps what has the history of its call, after that was run back.

        Raises:
            CaptureError: It does.
        """
        self._results, self._inner = {}, {}
        if self._is_kept():
            gc.collect()
        if self._is_kept():
            raise CaptureError(
                f"the break {self._title} keeps an argument, or what it has computed of one, with"
                " its history, through which a gradient would not get back: keep it detached, or"
                " return it from the function"
            )

    def run_back(
        self, gradients: tuple[torch.Tensor | None, ...]
    ) -> tuple[torch.Tensor | None, ...]:
        """Let the backward pass that is being captured have a break here.

        Raises:
            CaptureError: None is, or one that cannot be divided.
        """
        if self.divides is None:
            raise in_backward_pass(self._title)
        found: tuple[torch.Tensor, ...] = self.divides.run(
            self.back, f"gradients of {self._name}", gradients, {}
        )
        return found

    def _is_kept(self) -> bool:
        return any(reference() is not None for reference in self._references)

    def _leaf(self, argument: torch.Tensor) -> torch.Tensor:
        leaf = argument.detach().requires_grad_()
        leaf.register_hook(self._guard)
        return leaf


def no_way_back(user: str, tensor: torch.Tensor) -> CallableError:
    """The error of something that requires a gradient of a tensor which would not get one."""
    return CallableError(
        f"{user} requires a gradient of a tensor of shape {list(tensor.shape)} that is no argument"
        " and in no module that the function names: make it a parameter of one, pass it as an"
        " argument, or call under torch.no_grad()"
    )


class _Guard:
    """The hook of arguments, which refuses gradients that come another way.

    It does not know the flow: autograd would keep that alive in a circle.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._is_open = False

    @contextmanager
    def opened(self) -> Iterator[None]:
        """A context in which gradients may come."""
        before, self._is_open = self._is_open, True
        try:
            yield
        finally:
            self._is_open = before

    def __call__(self, _: torch.Tensor) -> None:
        """A gradient has come."""
        if not self._is_open:
            raise CaptureError(
                f"a gradient got to an argument of the break {self._title} by what the break has"
                " kept, and cannot get further: return that from the function, or keep it detached"
            )


class _Node(torch.autograd.Function):
    """Stands for a break in the captured history."""

    @staticmethod
    def forward(ctx: Any, flow: Flow, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.flow = flow
        ctx.count = len(flow._connected or ())
        ctx.set_materialize_grads(False)
        return tuple(one.detach() for one in tensors[: ctx.count])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        # None for the flow, the results and the anchor.
        return (*(None,) * (ctx.count + 2), *ctx.flow.run_back(gradients))


def live_results(output: Any) -> set[tuple[Flow, int]]:
    """The results of breaks that an output of a captured function depends on, by their numbers."""
    if not _requires_gradient(output):
        return set()
    ends = [(output.grad_fn, output.output_nr)]
    ends += [end for node in nodes_behind([output]) for end in node.next_functions]
    flows = ((getattr(node, "flow", None), number) for node, number in ends)
    return {(flow, number) for flow, number in flows if isinstance(flow, Flow)}


def _requires_gradient(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad
