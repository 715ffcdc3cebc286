"""AOTAutograd's graphs in captures: what they write, their parts, and these as modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cgraph import _driver, _torch
from cgraph._given import require_type
from cgraph._reason import Reason
from cgraph._trees.graph_module import CudaGraphModule
from cgraph._trees.options import TreeOptions
from cgraph._trees.skips import note_skip, skip
from cgraph.causes import Cause
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
    require_type("g", g, torch.fx.Graph, "a torch.fx.Graph")
    return _torch.written_inputs(g)


def partition_cudagraphs(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> torch.fx.GraphModule:
    """Make modules of those operators of a graph that a capture can have; change and return it.

    The others stay in the graph between them: operators with tensors on the host, those whose
    results depend on values, and those with the tag ``cudagraph_unsafe``. All stay in their order.

    Args:
        gm: The graph.
        inputs: Its inputs, for the shapes of what it computes.

    Raises:
        ArgumentError: A graph of several parts writes to its inputs, which parts have copies of,
            otherwise than by ``copy_``.
    """
    require_type("gm", gm, torch.fx.GraphModule, "a torch.fx.GraphModule")
    device_type = _driver.current().device_type
    _torch.know_shapes(gm, inputs)
    is_split = bool(_torch.why_not_captured(gm.graph, device_type))
    if is_split and _torch.writes_besides_copies(gm.graph):
        written = sorted(find_input_mutations(gm.graph))
        raise ArgumentError(
            f"a graph of several parts writes to its inputs {written}, expected none that it writes"
            " but by copy_: let AOTAutograd make it functional"
        )
    _torch.partition_graph(gm, device_type)
    return gm


def apply_cuda_graphs(
    gm: torch.fx.GraphModule,
    *,
    statics: Sequence[int] = (),
    name: str = "a graph module",
    mode: str = "inference",
    options: Mapping[str, Any] | TreeOptions | None = None,
) -> None:
    """Replace each module that a graph calls by a :class:`CudaGraphModule`; change nothing else.

    Args:
        gm: The graph. The modules are graphs of ATen's operators, and called without keywords.
        statics: The places of its inputs that stay where they are.
        name: Its name, for people.
        mode: As of :class:`CudaGraphModule`.
        options: As of :class:`CudaGraphModule`.

    Raises:
        ArgumentError: A module, or a call of one, is not like that.
    """
    require_type("gm", gm, torch.fx.GraphModule, "a torch.fx.GraphModule")
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    in_place = {inputs[place] for place in statics}
    calls: dict[str, list[torch.fx.Node]] = {}
    for node in gm.graph.nodes:
        if node.op == "call_module":
            calls.setdefault(node.target, []).append(node)
    for number, (target, nodes) in enumerate(calls.items()):
        keywords = next((one.kwargs for one in nodes if one.kwargs), None)
        if keywords is not None:
            raise ArgumentError(f"{target} is called with {keywords}, expected no keywords")
        module = gm.get_submodule(target)
        if isinstance(module, CudaGraphModule):
            continue
        if not isinstance(module, torch.fx.GraphModule) or not _torch.is_of_aten(module.graph):
            raise ArgumentError(
                f"{target} is a {type(module).__name__}, expected a graph of ATen's operators,"
                " which say what they write: trace it by"
                " torch.fx.experimental.proxy_tensor.make_fx"
            )
        # Other calls have other arguments.
        places = enumerate(nodes[0].args) if len(nodes) == 1 else ()
        made = CudaGraphModule(
            module,
            find_input_mutations(module.graph),
            statics=[place for place, one in places if one in in_place],
            sizes=_torch.free_sizes(module.graph),
            name=name + (f", part {number}" if number else ""),
            mode=mode,
            options=options,
        )
        gm.set_submodule(target, made)


def cudagraphs(
    model: torch.fx.GraphModule,
    inputs: Sequence[Any],
    *,
    statics: Sequence[int] = (),
    name: str = "a graph module",
    mode: str = "inference",
    options: Mapping[str, Any] | TreeOptions | None = None,
) -> torch.fx.GraphModule:
    """Let a graph run in captures as far as these can have its operators; change and return it.

    It stays as it is, with an ``EagerWarning``, where parts would not do the same: if it writes to
    its inputs, otherwise than by ``copy_``, besides operators that no capture can have, calls
    ``as_strided`` of an input or between such operators, or works on several devices.

    Args:
        model: The graph, of ATen's operators.
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
    require_type("model", model, torch.fx.GraphModule, "a torch.fx.GraphModule")
    settings = TreeOptions.of(options)
    device_type = _driver.current().device_type
    _torch.know_shapes(model, inputs)
    refused = _torch.why_not_captured(model.graph, device_type)
    for reason in refused:
        note_skip(name, reason)
    if refused and settings.strict:
        skip(name, Reason(Cause.UNCAPTURED_OPERATOR, refused[0]), settings)
    whole = _why_left(model.graph, refused, device_type)
    if whole is not None:
        note_skip(name, whole)
        skip(name, Reason(Cause.UNCAPTURED_OPERATOR, whole), settings)
        return model
    parts = partition_cudagraphs(model, inputs)
    if refused and not any(node.op == "call_module" for node in parts.graph.nodes):
        skip(name, Reason(Cause.UNCAPTURED_OPERATOR, refused[0]), settings)
    apply_cuda_graphs(parts, statics=statics, name=name, mode=mode, options=settings)
    return parts


def _why_left(graph: torch.fx.Graph, refused: Sequence[str], device_type: str) -> str | None:
    """Return why a graph stays as it is; None if it does not."""
    if refused and _torch.writes_besides_copies(graph):
        return f"{refused[0]}, in a graph that writes to its inputs"
    if _torch.reads_whole_storage(graph, is_split=bool(refused)):
        return "as_strided, which counts from the begin of memory: copies of inputs begin elsewhere"
    if _torch.are_shared(graph, device_type):
        return "operators on several devices"
    return None
