"""Nodes of Dynamo's graphs: their values, names, and what they compute."""

from __future__ import annotations

import operator
import re
from typing import Any

import torch

__all__ = [
    "codes_of",
    "example_inputs",
    "example_of",
    "form_of_graph",
    "form_of_input",
    "is_operator",
    "is_sequence",
    "name_of_function",
    "names_of_call",
    "only_overload",
    "traced_files",
]


def example_of(node: torch.fx.Node) -> Any:
    """Return the value without contents that Dynamo has found for a node; None if it has not."""
    return node.meta.get("example_value")


def example_inputs(graph: torch.fx.Graph) -> list[Any]:
    """Return the values without contents of a graph's inputs."""
    return [example_of(one) for one in graph.find_nodes(op="placeholder")]


def is_operator(value: object) -> bool:
    """Return whether a value is an operator of torch's, with or without its overloads."""
    return isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))


def is_sequence(node: Any) -> bool:
    """Return whether a call returns several values, and not a tensor to be indexed."""
    value = example_of(node)
    if value is None:
        value = node.meta.get("val")
    return isinstance(value, (tuple, list))


def names_of_call(node: torch.fx.Node) -> set[str]:
    """Return the names of what a node calls."""
    target = node.target
    if node.op == "call_method":
        return {f"torch.Tensor.{target}"}
    if node.op != "call_function":
        return set()
    if isinstance(target, torch._ops.OpOverload):
        return {str(target), str(target.overloadpacket)}
    if isinstance(target, torch._ops.OpOverloadPacket):
        return {str(target), *(f"{target}.{one}" for one in target.overloads())}
    names = {name_of_function(target), getattr(target, "__name__", None)}
    return {str(one) for one in names if one}


def name_of_function(function: Any) -> str | None:
    """Return the full name of a function, as torch tells it if it is one of torch's."""
    if public := torch.overrides.resolve_name(function):
        return str(public)
    name, module = getattr(function, "__qualname__", None), getattr(function, "__module__", None)
    return None if name is None else f"{module}.{name}" if module else str(name)


def only_overload(target: Any) -> Any:
    """Return the only overload of an operator, which takes less time to call; None if none."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        overloads = target.overloads()
        return getattr(target, overloads[0]) if len(overloads) == 1 else None
    return target if isinstance(target, torch._ops.OpOverload) else None


def form_of_graph(graph_module: torch.fx.GraphModule) -> str | None:
    """Return what a graph of Dynamo's computes of its inputs, whatever these are called.

    None if the graph does not tell all of that: it holds tensors, calls modules, launches kernels
    of the user's, or calls code of the user's that a compiler goes into. Graphs inside of it, as
    the branches of ``torch.cond``, belong to it.
    """
    numbers: dict[torch.fx.Node, int] = {}
    storages: dict[int, int] = {}
    lines = []
    for number, node in enumerate(graph_module.graph.nodes):
        numbers[node] = number
        if node.op == "get_attr":
            inner = operator.attrgetter(str(node.target))(graph_module)
            form = form_of_graph(inner) if isinstance(inner, torch.fx.GraphModule) else None
            if form is None:
                return None
            lines.append(f"get_attr {{{form}}}")
            continue
        if node.op == "call_module" or not _is_of_torch(node):
            return None
        given: Any = torch.fx.map_arg((node.args, node.kwargs), lambda one: _Number(numbers[one]))
        if node.op == "placeholder":
            value = example_of(node)
            given = form_of_input(value)
            if isinstance(value, torch.Tensor):
                # Inputs that share memory are not compiled as others are.
                shared = storages.setdefault(value.untyped_storage()._cdata, number)
                given = given, _Number(shared)
            target = ""
        else:
            target = f"{getattr(node.target, '__module__', '')} {node.target}"
        lines.append(f"{node.op} {target} {given}")
    return "\n".join(lines)


def form_of_input(value: Any) -> tuple[Any, ...]:
    """Return what compiled code depends on of an input."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__, str(value)
    layout = tuple(value.shape), value.stride(), value.storage_offset()
    return *layout, value.dtype, value.device, type(value), value.requires_grad


def _is_of_torch(node: torch.fx.Node) -> bool:
    """Return whether a node calls nothing whose code a compiler takes from the user's files."""
    target = node.target
    if node.op != "call_function":
        return True
    if "triton_kernel_wrapper" in str(target):
        return False
    if isinstance(target, torch._ops.OpOverloadPacket):
        return all(_is_whole(getattr(target, one)) for one in target.overloads())
    if isinstance(target, torch._ops.OpOverload):
        return _is_whole(target)
    module = str(getattr(target, "__module__", None) or "torch")
    return module.partition(".")[0] in _KNOWN


def _is_whole(op: torch._ops.OpOverload) -> bool:
    """Return whether an operator is torch's, or one that compiled code calls by its name."""
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    return op.namespace in _NAMESPACES or not op.has_kernel_for_dispatch_key(composite)


_KNOWN = ("_operator", "builtins", "math", "operator", "torch")
_NAMESPACES = ("aten", "prim", "prims")


class _Number(int):
    """The number of a node among arguments, which may be numbers, too."""

    def __repr__(self) -> str:
        return f"%{int(self)}"


def traced_files(graph_module: torch.fx.GraphModule) -> set[str]:
    """Return the source files that Dynamo's nodes come from."""
    nodes = (node for one in _graphs_in(graph_module) for node in one.graph.nodes)
    traces = (str(node.meta.get("stack_trace") or "") for node in nodes)
    return {path for trace in traces for path in _FILES.findall(trace)}


def codes_of(graph_module: torch.fx.GraphModule) -> list[str]:
    """Return the code of a graph, and that of each graph inside of it."""
    return [one.code for one in _graphs_in(graph_module)]


def _graphs_in(graph_module: torch.fx.GraphModule) -> list[torch.fx.GraphModule]:
    modules = graph_module.modules()
    return [one for one in modules if isinstance(one, torch.fx.GraphModule)]


_FILES = re.compile(r'File "([^"]+)", line \d+')
