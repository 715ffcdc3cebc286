"""The captured passes of a callable."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from cgraph import _driver, _torch
from cgraph._autograd.gradients import with_own_memory
from cgraph._autograd.history import nodes_behind
from cgraph._autograd.pool_order import PoolOrder
from cgraph._breaks.outer_flows import OuterFlow, live_results
from cgraph._callables.graphed import reached
from cgraph._callables.sample import Sample
from cgraph._captures.capture_options import CaptureOptions
from cgraph._driver import Pool
from cgraph.cudagraph import CUDAGraph
from cgraph.errors import CallableError, add_note
from cgraph.graphs import graph
from cgraph.segments import SegmentedGraph

__all__ = [
    "Captures",
    "DividedCaptures",
    "Pass",
    "name_of",
    "parameters_of",
    "pass_inputs",
    "warm_up",
    "without_hooks",
]


def warm_up(function: Any, sample: Sample, iterations: int, allow_unused: bool) -> None:
    """Run forward and backward, so that nothing is set up inside the captures."""
    inputs = pass_inputs(function, sample)
    for _ in range(iterations):
        outputs = [o for o in _torch.tree_iter(sample.call(function)) if _needs_grad(o)]
        if outputs:
            grads = tuple(torch.empty_like(output) for output in outputs)
            _gradients(function, outputs, inputs, grads, allow_unused)


def pass_inputs(function: Any, sample: Sample) -> tuple[torch.Tensor, ...]:
    """List all that gradients may be asked for."""
    return (*sample.tensors, *parameters_of(function))


@contextmanager
def without_hooks(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Run a block in which no hook of a tensor is called: those of leaves run at accumulation."""
    hooked = [(one, one._backward_hooks) for one in tensors if one._backward_hooks]
    for one, _ in hooked:
        one._backward_hooks = None
    try:
        yield
    finally:
        for one, hooks in hooked:
            one._backward_hooks = hooks


class Pass:
    """The captured passes of one callable.

    Attributes:
        forward: The graph of the forward pass.
        backward: The graph of the backward pass; None where no output needs one.
        order: The order of the graphs of their pool.
        sample: The arguments of the capture.
        parameters: The module's parameters that require a gradient.
        frozen: The module's parameters that do not.
        outputs: The leaves of what the callable returned.
        spec: Their structure.
        grad_outputs: The memory from which the backward pass reads the gradients of the outputs.
        grad_inputs: The memory where it leaves those of the inputs and parameters.
        reached: For each output the indices of the tensors that it depends on.
        flows: The flows of gradients through the breaks of the forward pass.
        live: For each output the results of breaks that it depends on.
        saved: The indices of outputs that the backward pass reads.
        records: True if gradients were recorded at the capture.
        function: Kept alive with the objects that it refers to; None for a module.
    """

    def __init__(
        self,
        function: Any,
        forward: SegmentedGraph,
        order: PoolOrder,
        sample: Sample,
        result: Any,
        flows: Sequence[OuterFlow],
    ) -> None:
        self.name = name_of(function)
        self.function = None if isinstance(function, torch.nn.Module) else function
        self.forward = forward
        self.backward: SegmentedGraph | None = None
        self.flows = flows
        self.order = order
        self.forward_number = order.number()
        self.backward_number = 0
        self.sample = sample
        self.parameters = tuple(p for p in parameters_of(function) if p.requires_grad)
        self.frozen = tuple(p for p in parameters_of(function) if not p.requires_grad)
        self.outputs, self.spec = _torch.tree_flatten(result)
        self.grad_outputs: list[torch.Tensor | None] = [None] * len(self.outputs)
        self.grad_inputs: list[torch.Tensor | None] = [None] * len(self.pass_inputs)
        self.reached: list[frozenset[int]] = []
        self.live: list[frozenset[tuple[OuterFlow, int]]] = []
        self.saved: list[int] = []
        self.records = torch.is_grad_enabled()

    @property
    def pass_inputs(self) -> tuple[torch.Tensor, ...]:
        """All tensors that may get gradients."""
        return (*self.sample.tensors, *self.parameters)

    def forget_history(self) -> None:
        """Keep the outputs alone: autograd's nodes may refer to anything.

        Its AccumulateGrad nodes belong to the capturing stream, too: each backward pass would have
        to wait for that.
        """
        self.outputs = [o.detach() if isinstance(o, torch.Tensor) else o for o in self.outputs]


class Captures:
    """A maker of captured passes in one pool, on one stream.

    Args:
        pool: The pool.
        stream: The stream.
        mode: The capture error mode.
        annotations: True if nodes get annotations.
    """

    def __init__(self, pool: Pool, stream: Any, mode: str, annotations: bool = False) -> None:
        self._options: dict[str, Any] = {
            "pool": pool,
            "stream": stream,
            "capture_error_mode": mode,
        }
        self._annotations = annotations

    def forward(self, function: Any, sample: Sample) -> Pass:
        """Capture the forward pass."""
        made, result, flows = self._forward(functools.partial(sample.call, function), sample)
        for output in _torch.tree_iter(result):
            _check_output(name_of(function), output)
        order = PoolOrder.of((id(_driver.current()), *made.pool()))
        return Pass(function, made, order, sample, result, flows)

    def backward(self, one: Pass, allow_unused: bool) -> None:
        """Capture the backward pass, if there is one."""
        outputs = [output for output in one.outputs if _needs_grad(output)]
        if not outputs:
            return
        # The backward pass lets go what is saved.
        one.saved = _saved_among(one.outputs)
        grads = tuple(torch.zeros_like(output) for output in outputs)
        anchors = tuple(flow.anchor for flow in one.flows)

        def body() -> list[torch.Tensor | None]:
            pass_inputs = (*one.pass_inputs, *anchors)
            found = _gradients(one.name, outputs, pass_inputs, grads, allow_unused)
            found = found[: len(found) - len(anchors)]
            return with_own_memory(found, (*grads, *outputs, *one.pass_inputs))

        one.backward, own = self._backward(body, one, grads)
        one.backward_number = one.order.number()
        remaining = iter(grads)
        one.grad_outputs = [next(remaining) if _needs_grad(o) else None for o in one.outputs]
        one.reached = reached(one.outputs, one.pass_inputs)
        one.live = [frozenset(live_results(output)) for output in one.outputs]
        inputs = iter(own)
        one.grad_inputs = [next(inputs) if t.requires_grad else None for t in one.pass_inputs]
        one.forget_history()

    def _forward(
        self, body: Callable[[], Any], sample: Sample
    ) -> tuple[SegmentedGraph, Any, Sequence[OuterFlow]]:
        return *self._whole(body, sample.tensors), ()

    def _backward(
        self, body: Callable[[], Any], one: Pass, statics: tuple[torch.Tensor, ...]
    ) -> tuple[SegmentedGraph, Any]:
        return self._whole(body, statics)

    def _whole(
        self, body: Callable[[], Any], statics: tuple[torch.Tensor, ...]
    ) -> tuple[SegmentedGraph, Any]:
        made = CUDAGraph()
        made._options = CaptureOptions(statics=statics, is_weighed=True)
        with graph(made, **self._options, enable_annotations=self._annotations):
            result = body()
        return SegmentedGraph([made]), result


class DividedCaptures(Captures):
    """A maker of passes in segments, divided by the breaks of the forward pass."""

    def _forward(
        self, body: Callable[[], Any], sample: Sample
    ) -> tuple[SegmentedGraph, Any, Sequence[OuterFlow]]:
        return SegmentedGraph._forward(body, statics=sample.tensors, **self._options)

    def _backward(
        self, body: Callable[[], Any], one: Pass, statics: tuple[torch.Tensor, ...]
    ) -> tuple[SegmentedGraph, Any]:
        return SegmentedGraph._backward(body, one.flows, statics=statics, **self._options)


def _check_output(name: str, output: Any) -> None:
    """Raise if an output hides tensors."""
    if isinstance(output, torch.Tensor) or not hasattr(output, "__dict__"):
        return
    if any(isinstance(value, torch.Tensor) for value in vars(output).values()):
        raise CallableError(
            f"{name} returns a {type(output).__qualname__} with tensors in it, which pytree does"
            " not know: return tuples, lists, dicts, or a type that is registered with pytree"
        )


def _gradients(
    function: Callable[..., Any] | str,
    outputs: Sequence[torch.Tensor],
    pass_inputs: Sequence[torch.Tensor],
    grads: tuple[torch.Tensor, ...],
    allow_unused: bool,
) -> tuple[torch.Tensor | None, ...]:
    inputs = tuple(tensor for tensor in pass_inputs if tensor.requires_grad)
    if not inputs:
        raise CallableError(
            f"{name_of(function)}: its outputs require gradients, but none of its arguments and"
            " parameters does: pass the tensors to differentiate with respect to as arguments, or"
            " a module that owns them, or graph it under torch.no_grad()"
        )
    try:
        # Backward passes run outside of it, as torch requires, in the types of the forward pass.
        with _torch.without_autocast("cuda", "cpu"):
            return torch.autograd.grad(
                outputs, inputs, grads, only_inputs=True, allow_unused=allow_unused
            )
    except RuntimeError as error:
        if "allow_unused" in str(error):
            add_note(error, "cgraph: here that is make_graphed_callables(allow_unused_input=True)")
        if "through the graph a second time" in str(error):
            raise CallableError(
                f"{name_of(function)} runs a backward pass through its result, which then cannot"
                " run another one: return the loss detached, as loss.detach()"
            ) from error
        raise


def parameters_of(function: Any) -> tuple[torch.Tensor, ...]:
    """Return the parameters of a module; none for another callable."""
    return tuple(function.parameters()) if isinstance(function, torch.nn.Module) else ()


def _saved_among(outputs: Sequence[Any]) -> list[int]:
    """List the places of outputs whose memory autograd has saved for the backward pass."""
    tensors = [one for one in outputs if _needs_grad(one)]
    memories = _torch.memories_of(
        one for node in nodes_behind(tensors) for one in _torch.saved_by(node)
    )
    saved = {_torch.storage_id(one) for one in memories}
    return [
        place
        for place, one in enumerate(outputs)
        if isinstance(one, torch.Tensor)
        and (memory := _torch.memory_of(one)) is not None
        and _torch.storage_id(memory) in saved
    ]


def _needs_grad(output: Any) -> bool:
    return isinstance(output, torch.Tensor) and output.requires_grad


def name_of(function: Callable[..., Any] | str) -> str:
    """Return the name of a callable, for errors."""
    if isinstance(function, str):
        return function
    return getattr(function, "__qualname__", type(function).__qualname__)
