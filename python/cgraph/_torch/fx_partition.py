"""Parts of graphs that captures can have, and the inputs that a graph writes."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree

from cgraph._torch.compiled_graphs import operator_refusal, value_of
from cgraph._torch.private_names import FakeTensorMode

__all__ = [
    "are_shared",
    "free_sizes",
    "is_of_aten",
    "know_shapes",
    "partition_graph",
    "reads_whole_storage",
    "why_not_captured",
    "writes_besides_copies",
    "written_inputs",
]


def know_shapes(graph_module: torch.fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Note the tensors without contents of a graph's nodes, unless its compiler has done so.

    Args:
        graph_module: The graph.
        inputs: Its inputs.
    """
    if not any(value_of(node) is not None for node in graph_module.graph.nodes):
        shapes: Any = importlib.import_module("torch.fx.passes.fake_tensor_prop")
        symbols: Any = importlib.import_module("torch.fx.experimental.symbolic_shapes")
        mode = FakeTensorMode(shape_env=symbols.ShapeEnv(), allow_non_fake_inputs=True)
        shapes.FakeTensorProp(graph_module, mode).propagate(*inputs)


def partition_graph(graph_module: torch.fx.GraphModule, device_type: str) -> None:
    """Make modules of the runs of operators that captures can have.

    All operators stay in their order, which random numbers depend on. Where there are several runs,
    copies into inputs stay between them: a run has copies of its inputs.

    Args:
        graph_module: The graph, which is changed.
        device_type: The type of the device of captures.
    """
    is_split = bool(why_not_captured(graph_module.graph, device_type))
    runs: list[list[torch.fx.Node]] = [[]]
    for node in graph_module.graph.nodes:
        if node.op != "call_function":
            continue
        if _refusal(node, device_type) is None and not (is_split and _is_copy_to_input(node)):
            runs[-1].append(node)
        elif runs[-1]:
            runs.append([])
    runs = [run for run in runs if any(node.target is not operator.getitem for node in run)]
    for number, run in enumerate(runs):
        _fuse(graph_module, run, f"captured_{number}")
    graph_module.graph.lint()
    graph_module.recompile()


def _fuse(graph_module: torch.fx.GraphModule, run: list[torch.fx.Node], name: str) -> None:
    """Make a module of operators that follow each other, and call it in their place."""
    inside = set(run)
    used = (one for node in run for one in node.all_input_nodes if one not in inside)
    inputs = list(dict.fromkeys(used))
    outputs = [node for node in run if any(user not in inside for user in node.users)]
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = {**node.meta}
    for node in run:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    graph_module.add_submodule(name, torch.fx.GraphModule(graph_module, graph))
    with graph_module.graph.inserting_before(run[-1].next):
        call = graph_module.graph.call_module(name, tuple(inputs))
        for place, node in enumerate(outputs):
            result = graph_module.graph.call_function(operator.getitem, (call, place))
            result.meta = {**node.meta}
            node.replace_all_uses_with(result, lambda user: user not in inside)
    for node in reversed(run):
        graph_module.graph.erase_node(node)


def free_sizes(graph: torch.fx.Graph) -> list[tuple[int, int]]:
    """Return which sizes of its inputs a graph leaves open, each once: the input, the dimension.

    Sizes that are inputs themselves are not among them.
    """
    values = [value_of(node) for node in graph.nodes if node.op == "placeholder"]
    known = {str(one) for one in values if isinstance(one, torch.SymInt)}
    found: dict[str, tuple[int, int]] = {}
    for place, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            for dimension, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt) and str(size) not in known:
                    found.setdefault(str(size), (place, dimension))
    return list(found.values())


def is_of_aten(graph: torch.fx.Graph) -> bool:
    """Return whether a graph calls only operators, whose schemas say what they write.

    Functions of numbers may be there, too.
    """
    known = (torch._ops.OpOverload, torch._ops.HigherOrderOperator)
    calls = (node for node in graph.nodes if node.op in _CALLS)
    others = (
        node
        for node in calls
        if not isinstance(node.target, known) and node.target is not operator.getitem
    )
    values = (value_of(one) for node in others for one in node.all_input_nodes)
    return not any(one is None or isinstance(one, torch.Tensor) for one in values)


def are_shared(graph: torch.fx.Graph, device_type: str) -> bool:
    """Return whether tensors of a graph are on more than one device of a type."""
    leaves = (leaf for node in graph.nodes for leaf in _pytree.tree_leaves(value_of(node)))
    devices = {leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)}
    return sum(device.type == device_type for device in devices) > 1


def reads_whole_storage(graph: torch.fx.Graph, *, is_split: bool) -> bool:
    """Return whether an operator counts from the begin of memory that a part's inputs have.

    Args:
        graph: The graph.
        is_split: It has several parts; the results of one are inputs of others.
    """
    memories = _memories(graph)
    of_inputs = {memories[node] for node in graph.nodes if node.op == "placeholder"}
    packets = ((getattr(node.target, "overloadpacket", None), node) for node in graph.nodes)
    return any(
        getattr(packet, "__name__", "").startswith("as_strided")
        and (is_split or memories[node.args[0]] in of_inputs)
        for packet, node in packets
    )


def why_not_captured(graph: torch.fx.Graph, device_type: str) -> list[str]:
    """Return the operators of a graph that no capture can have, with the reason, each once."""
    calls = [node for node in graph.nodes if node.op in _CALLS]
    reasons = (_refusal(node, device_type) for node in calls)
    return list(dict.fromkeys(reason for reason in reasons if reason))


def written_inputs(graph: torch.fx.Graph) -> set[int]:
    """Return the places of the inputs that a graph writes, or whose memory it writes.

    An operator writes what its schema says, also in lists and through views.
    """
    memories = _memories(graph)
    places: dict[Any, set[int]] = {}
    inputs = (node for node in graph.nodes if node.op == "placeholder")
    for place, node in enumerate(inputs):
        places.setdefault(memories[node], set()).add(place)
    written = (one for node in graph.nodes for one in _written_by(node))
    return {place for one in written for place in places.get(memories[one], ())}


def writes_besides_copies(graph: torch.fx.Graph) -> bool:
    """Return whether an operator writes to inputs that does more than copy into one of them."""
    memories = _memories(graph)
    inputs = {memories[node] for node in graph.nodes if node.op == "placeholder"}
    return any(
        memories[one] in inputs and not _is_copy_to_input(node)
        for node in graph.nodes
        for one in _written_by(node)
    )


def _is_copy_to_input(node: torch.fx.Node) -> bool:
    """Return whether a node copies into a whole input, as AOTAutograd's graphs do at their end."""
    to = node.args[0] if node.target is torch.ops.aten.copy_.default else None
    return isinstance(to, torch.fx.Node) and to.op == "placeholder"


_CALLS = ("call_function", "call_module", "call_method")


def _refusal(node: torch.fx.Node, device_type: str) -> str | None:
    """Return why no capture can have a node; None if it can."""
    if node.target is operator.getitem:
        # It stays with what makes the sequence.
        return _refusal(node.args[0], device_type)  # type: ignore[arg-type]
    if node.op != "call_function":
        return None
    if (reason := operator_refusal(node)) is not None:
        return reason
    if torch.Tag.cudagraph_unsafe in getattr(node.target, "tags", ()) or _is_unsafe(node):
        return f"{node.target}, which is marked as unsafe in CUDA graphs"
    shapes: Any = importlib.import_module("torch.fx.experimental.symbolic_shapes")
    for one in (*node.all_input_nodes, node):
        if shapes.free_unbacked_symbols(value_of(one)):
            return f"{node.target}, which has a size that depends on values"
        for value in _pytree.tree_leaves(value_of(one)):
            if isinstance(value, torch.Tensor) and value.device.type != device_type:
                return f"{node.target}, which has a tensor on {value.device}"
    return None


def _is_unsafe(node: torch.fx.Node) -> bool:
    """Return whether torch, if it has a list of such, takes an operator for unsafe."""
    utils: Any = importlib.import_module("torch._inductor.utils")
    asked = getattr(utils, "is_cudagraph_unsafe_fx_node", None)
    return asked is not None and bool(asked(node))


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


def _viewed_by(node: torch.fx.Node) -> torch.fx.Node | None:
    """Return the node whose memory a node's result has, as far as its schema says so."""
    if node.target is operator.getitem and isinstance(node.args[0], torch.fx.Node):
        return node.args[0]
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None:
        return None
    kept = {name for one in schema.returns if one.alias_info for name in one.alias_info.before_set}
    for argument, one in zip(schema.arguments, node.args, strict=False):
        shared = argument.alias_info
        # The second set says that a list of results has it.
        shares = shared is not None and (shared.before_set & kept or "*" in shared.after_set)
        if shares and isinstance(one, torch.fx.Node):
            return one
    return None


def _memories(graph: torch.fx.Graph) -> dict[torch.fx.Node, Any]:
    """Return what stands for the memory of each node's result: the same for views of it."""
    found: dict[torch.fx.Node, Any] = {}
    for node in graph.nodes:
        source = _viewed_by(node)
        found[node] = _memory(node) if source is None else found[source]
    return found


def _memory(node: torch.fx.Node) -> Any:
    """Return what stands for the memory of a node's tensor; the node if that is not known."""
    value = value_of(node)
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else node
