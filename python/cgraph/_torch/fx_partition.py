"""Parts of graphs that captures can have, and the inputs that a graph writes."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree

from cgraph._torch.compiled_graphs import is_data_dependent

__all__ = ["free_sizes", "partition_graph", "why_not_captured", "written_inputs"]


def partition_graph(
    graph_module: torch.fx.GraphModule, inputs: Sequence[Any], device_type: str
) -> torch.fx.GraphModule:
    """Make modules of the operators of a graph that captures can have; the others stay.

    Args:
        graph_module: The graph, which is changed.
        inputs: Its inputs, for the shapes of what it computes where these are not known.
        device_type: The type of the device of captures.
    """
    nodes = [node for node in graph_module.graph.nodes if node.op in ("placeholder", *_CALLS)]
    if not all(_has_value(node) for node in nodes):
        shapes: Any = importlib.import_module("torch.fx.passes.fake_tensor_prop")
        shapes.FakeTensorProp(graph_module).propagate(*inputs)
    passes: Any = importlib.import_module("torch.fx.passes.infra.partitioner")
    partitioner = passes.CapabilityBasedPartitioner(
        graph_module, _Capturable(device_type), allows_single_node_partition=True
    )
    found: torch.fx.GraphModule = partitioner.fuse_partitions(partitioner.propose_partitions())
    return found


def free_sizes(graph: torch.fx.Graph) -> list[tuple[int, int]]:
    """Return which sizes of its inputs a graph leaves open, each once: the input, the dimension.

    Sizes that are inputs themselves are not among them.
    """
    values = [_value(node) for node in graph.nodes if node.op == "placeholder"]
    known = {str(one) for one in values if isinstance(one, torch.SymInt)}
    found: dict[str, tuple[int, int]] = {}
    for place, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            for dimension, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt) and str(size) not in known:
                    found.setdefault(str(size), (place, dimension))
    return list(found.values())


def why_not_captured(graph: torch.fx.Graph, device_type: str) -> list[str]:
    """Return the operators of a graph that no capture can have, with the reason, each once."""
    calls = [node for node in graph.nodes if node.op in _CALLS]
    reasons = (_refusal(node, device_type) for node in calls)
    return list(dict.fromkeys(reason for reason in reasons if reason))


def written_inputs(graph: torch.fx.Graph) -> set[int]:
    """Return the places of the inputs that a graph writes, or whose memory it writes.

    An operator writes what its schema says, also in lists and through views.
    """
    places: dict[Any, set[int]] = {}
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    for place, node in enumerate(inputs):
        places.setdefault(_memory(node), set()).add(place)
    written = (one for node in graph.nodes for one in _written_by(node))
    return {place for one in written for place in places.get(_memory(one), ())}


_CALLS = ("call_function", "call_module", "call_method", "get_attr")


class _Capturable:
    """The nodes that captures can have, as torch's partitioner asks for them."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type

    def is_node_supported(
        self, submodules: Mapping[str, torch.nn.Module], node: torch.fx.Node
    ) -> bool:
        """Return whether a capture can have a node."""
        del submodules
        is_call = node.op == "call_function"
        return is_call and _refusal(node, self._device_type) is None


def _refusal(node: torch.fx.Node, device_type: str) -> str | None:
    """Return why no capture can have a node; None if it can."""
    if node.target is operator.getitem:
        # It stays with what makes the sequence.
        return _refusal(node.args[0], device_type)  # type: ignore[arg-type]
    if node.op != "call_function":
        return None
    if is_data_dependent(node) or _has_mask(node):
        return f"{node.target}, which needs values of the device on the host"
    if torch.Tag.cudagraph_unsafe in getattr(node.target, "tags", ()) or _is_unsafe(node):
        return f"{node.target}, which is marked as unsafe in CUDA graphs"
    for one in (*node.all_input_nodes, node):
        for value in _pytree.tree_leaves(_value(one)):
            if isinstance(value, torch.Tensor) and value.device.type != device_type:
                return f"{node.target}, which has a tensor on {value.device}"
    return None


def _is_unsafe(node: torch.fx.Node) -> bool:
    """Return whether torch, if it has a list of such, takes an operator for unsafe."""
    utils: Any = importlib.import_module("torch._inductor.utils")
    asked = getattr(utils, "is_cudagraph_unsafe_fx_node", None)
    return asked is not None and bool(asked(node))


def _has_mask(node: torch.fx.Node) -> bool:
    """Return whether an operator writes where a mask says, which it counts on the host."""
    packet = getattr(node.target, "overloadpacket", None)
    name = getattr(packet, "__name__", "")
    if not name.strip("_").removeprefix("unsafe_").startswith("index_put"):
        return False
    masks = (_value(one) for one in node.all_input_nodes)
    kinds = (torch.bool, torch.uint8)
    return any(isinstance(one, torch.Tensor) and one.dtype in kinds for one in masks)


def _written_by(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """Yield the nodes that a node's operator writes."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None:
        return
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            for one in _pytree.tree_leaves(given):
                if isinstance(one, torch.fx.Node):
                    yield one


def _memory(node: torch.fx.Node) -> Any:
    """Return what stands for the memory of a node's tensor; the node if that is not known."""
    value = _value(node)
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else node


def _has_value(node: torch.fx.Node) -> bool:
    return "val" in node.meta or "fake_result" in node.meta


def _value(node: torch.fx.Node) -> Any:
    """Return a node's tensor without contents, or a sequence of these; None if not known."""
    return node.meta.get("val", node.meta.get("fake_result"))
