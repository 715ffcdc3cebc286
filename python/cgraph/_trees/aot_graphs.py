"""AOTAutograd's graphs in captures: what they write, their parts, and these as modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cgraph import _driver, _torch
from cgraph._trees.graph_module import CudaGraphModule
from cgraph._trees.options import TreeOptions
from cgraph._trees.skips import Why, note_skip, skip
from cgraph.errors import ArgumentError

__all__ = [
    "apply_cuda_graphs",
    "cloner",
    "cudagraphs",
    "find_input_mutations",
    "partition_cudagraphs",
]


def cloner(value: Any) -> Any:
    """Return a clone of a tensor; anything else as it is."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def find_input_mutations(g: torch.fx.Graph) -> set[int]:
    """Return the places of the inputs that a graph writes, or whose memory it writes.

    Nodes have their tensors without contents in ``meta["val"]``. What an operator writes is in its
    schema; tensors in lists and views count.
    """
    return _torch.written_inputs(g)


def partition_cudagraphs(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> torch.fx.GraphModule:
    """Make modules of those operators of a graph that a capture can have; change and return it.

    The others stay in the graph between them: operators with tensors on the host, those whose
    results depend on values, and those with the tag ``cudagraph_unsafe``.

    Args:
        gm: The graph; it writes to no input.
        inputs: Its inputs, for the shapes of what it computes.

    Raises:
        ArgumentError: It writes to an input, which an operator of another part may read before.
    """
    written = find_input_mutations(gm.graph)
    if written:
        raise ArgumentError(
            f"the graph writes to its inputs {sorted(written)}, expected none that it writes: let"
            " AOTAutograd make it functional"
        )
    return _torch.partition_graph(gm, inputs, _driver.current().device_type)


def apply_cuda_graphs(
    gm: torch.fx.GraphModule,
    *,
    statics: Sequence[int] = (),
    name: str = "a graph module",
    mode: str = "inference",
    options: TreeOptions | None = None,
) -> None:
    """Replace each module that a graph calls by a :class:`CudaGraphModule`; change nothing else.

    Args:
        gm: The graph, whose calls of modules have no keyword arguments.
        statics: The places of its inputs that stay where they are.
        name: Its name, for people.
        mode: As of :class:`CudaGraphModule`.
        options: As of :class:`CudaGraphModule`.

    Raises:
        ArgumentError: A call of a module has a keyword argument.
    """
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    in_place = {inputs[place] for place in statics}
    calls = [node for node in gm.graph.nodes if node.op == "call_module"]
    for number, node in enumerate(calls):
        if node.kwargs:
            raise ArgumentError(f"{node.target} is called with {node.kwargs}, expected no keywords")
        module = gm.get_submodule(node.target)
        graph = getattr(module, "graph", None)
        made = CudaGraphModule(
            module,
            set() if graph is None else find_input_mutations(graph),
            sizes=[] if graph is None else _torch.free_sizes(graph),
            statics=[place for place, one in enumerate(node.args) if one in in_place],
            name=name + (f", part {number}" if number else ""),
            mode=mode,
            options=options,
        )
        gm.set_submodule(node.target, made)


def cudagraphs(
    model: torch.fx.GraphModule,
    inputs: Sequence[Any],
    *,
    statics: Sequence[int] = (),
    name: str = "a graph module",
    mode: str = "inference",
    options: TreeOptions | None = None,
) -> torch.fx.GraphModule:
    """Let a graph run in captures as far as these can have its operators; change and return it.

    A graph that writes to its inputs, and has operators that no capture can have, stays as it is.

    Args:
        model: The graph.
        inputs: Its inputs, for the shapes of what it computes.
        statics: The places of inputs that stay where they are.
        name: Its name, for people.
        mode: As of :class:`CudaGraphModule`.
        options: As of :class:`CudaGraphModule`.

    Raises:
        CaptureError: There is an operator that no capture can have, and the options say ``strict``.

    >>> import torch, cgraph
    >>> from torch.fx.experimental.proxy_tensor import make_fx
    >>> with cgraph.sim.use():
    ...     x = torch.ones(3)
    ...     fast = cgraph.aot.cudagraphs(make_fx(lambda x: x.sin() + 1)(x), [x])
    ...     results = [fast(x * n) for n in range(4)]
    ...     print(torch.equal(results[2], (x * 2).sin() + 1))
    True
    """
    settings = TreeOptions.of(None) if options is None else options
    device_type = _driver.current().device_type
    refused = _torch.why_not_captured(model.graph, device_type)
    for reason in refused:
        note_skip(name, reason)
    if refused and settings.strict:
        skip(name, Why(refused[0]), settings)
    if refused and find_input_mutations(model.graph):
        skip(name, Why(f"{refused[0]}, in a graph that writes to its inputs"), settings)
        return model
    parts = _torch.partition_graph(model, inputs, device_type)
    apply_cuda_graphs(parts, statics=statics, name=name, mode=mode, options=settings)
    return parts
