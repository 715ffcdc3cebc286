"""Facts of torch's compiler: where graphs begin, their inputs, what runs beside captured parts."""

from __future__ import annotations

import ast
import importlib
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from cgraph._torch.private_names import of_modes, of_operators

__all__ = [
    "configured_of_inductor",
    "count_of_frames",
    "count_of_skips",
    "count_skip",
    "described_input",
    "first_line_of",
    "foreign_operators",
    "inputs_of",
    "line_of_first",
    "names_of_inputs",
    "reason_without_trace",
    "work_between_parts",
]


def configured_of_inductor(name: str) -> Any:
    """Return a value of Inductor's configuration; None if it is not loaded, or has none."""
    found: Any = sys.modules.get("torch._inductor.config")
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def count_of_frames() -> int:
    """Return the number of functions that torch's compiler has looked at since its last reset."""
    return int(_counters("frames").get("total", 0))


def count_of_skips() -> int:
    """Return torch's number of graphs that were not captured."""
    return int(_counters("inductor").get("cudagraph_skips", 0))


def _counters(name: str) -> Mapping[str, int]:
    utils: Any = sys.modules.get("torch._dynamo.utils")
    return {} if utils is None else utils.counters[name]


def count_skip() -> None:
    """Add to torch's number of graphs that were not captured, once its compiler is loaded."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    if utils is not None:
        utils.counters["inductor"]["cudagraph_skips"] += 1


def first_line_of(graph_module: torch.fx.GraphModule) -> str | None:
    """Return the line of the user's code that a graph of Dynamo's begins with, if it is known."""
    return line_of_first([node.stack_trace for node in graph_module.graph.nodes])


def line_of_first(traces: Sequence[str | None]) -> str | None:
    """Return the last line of the first stack trace that has one."""
    return next((line for line in map(_line_of, traces) if line), None)


def inputs_of(graph: torch.fx.Graph) -> Sequence[Any]:
    """Return what Inductor keeps of the inputs of a graph: their names, and where they are used."""
    utils: Any = importlib.import_module("torch._inductor.cudagraph_utils")
    found: Sequence[Any] = utils.get_placeholder_info(graph)
    return found


def names_of_inputs(graph: torch.fx.Graph, inputs: Sequence[Any]) -> list[str]:
    """Return what users call the inputs of a graph of Dynamo's; nothing if others follow from it.

    Args:
        graph: The graph.
        inputs: Its example inputs: each of them that wraps several becomes these.
    """
    if any(of_modes.is_traceable_wrapper_subclass(one) for one in inputs):
        return []
    return [_name_by_source(node) for node in graph.find_nodes(op="placeholder")]


def foreign_operators(graph: torch.fx.Graph) -> list[str]:
    """Return the operators of a graph that are not torch's own, each once."""
    targets = (getattr(one.target, "overloadpacket", one.target) for one in graph.nodes)
    names = [getattr(one, "_qualified_op_name", "aten::") for one in targets]
    return list(dict.fromkeys(one for one in names if one.partition("::")[0] not in _OF_TORCH))


_OF_TORCH = ("aten", "prim", "prims", "inductor", "_inductor_test", "rngprims", "torchvision")


def _name_by_source(node: torch.fx.Node) -> str:
    """Return an input as the user's code has it, such as ``self.layer.weight``."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    name = getattr(source, "name", None)
    name = name() if callable(name) else name
    if not isinstance(name, str):
        return node.name
    name = re.sub(r"\b[LG]\['(\w+)'\]", r"\1", name)
    return re.sub(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", r".\1", name)


def described_input(placeholders: Sequence[Any], place: int, names: Sequence[str] = ()) -> str:
    """Return an input's number, with its name and the line that uses it where these are known.

    Args:
        placeholders: What Inductor keeps of the inputs.
        place: The number.
        names: What users call the inputs of the whole graph.
    """
    if place >= len(placeholders):
        return f"input {place}"
    one = placeholders[place]
    name = getattr(one, "name", None)
    # The compiler numbers those of the whole graph.
    numbered = re.fullmatch(r"arg(\d+)_1|primals_(\d+)", name or "")
    if numbered is not None:
        number = int(numbered[1]) if numbered[1] else int(numbered[2]) - 1
        name = names[number] if number < len(names) else name
    traces = [one, *(getattr(one, "users", None) or ())]
    line = line_of_first([getattr(trace, "stack_trace", None) for trace in traces])
    return f"input {place}" + (f" ({name})" if name else "") + (f" of {line}" if line else "")


def _line_of(trace: str | None) -> str | None:
    """Return the last line of a stack trace."""
    lines = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', trace or "")
    if not lines:
        return None
    file, number, function = lines[-1]
    return f"{function} ({os.path.basename(file)}:{number})"


def operator_refusal(node: torch.fx.Node) -> str | None:
    """Return why no capture can have an operator, wherever its tensors are; None if it can."""
    if isinstance(node.target, of_operators.HigherOrderOperator):
        return f"{node.target}, which is a higher-order operator"
    if _needs_values(node):
        return f"{node.target}, which needs values of the device on the host"
    if _name_of(node) in _MOVING:
        return f"{node.target}, which gives an input other memory"
    return None


def moving_operator(graph: torch.fx.Graph) -> str | None:
    """Return the operator of a graph that gives an input other memory, with that; None without."""
    moving = (node for node in graph.nodes if _name_of(node) in _MOVING)
    return next(map(operator_refusal, moving), None)


# As ``tensor.data = other`` does; a replay would not.
_MOVING = ("set", "resize", "resize_storage_bytes")


def _needs_values(node: torch.fx.Node) -> bool:
    """Return whether an operator needs values of the device on the host, which no capture has."""
    if _name_of(node).removeprefix("unsafe_") in _BY_INDEX:
        # Elements that a mask selects are counted on the host.
        values = [value_of(one) for one in node.args[1] if isinstance(one, torch.fx.Node)]  # type: ignore[union-attr]
        return any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in values)
    dependent = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    return bool(dependent.intersection(getattr(node.target, "tags", ())))


_BY_INDEX = ("index", "index_put", "index_put_impl")


def _name_of(node: torch.fx.Node) -> str:
    """Return the name of a node's operator, without underscores around it; empty without one."""
    name: str = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
    return name.strip("_")


def value_of(node: Any) -> Any:
    """Return a node's tensor without contents, or a sequence of these; None if not known."""
    return node.meta.get("val", node.meta.get("fake_result"))


def reason_without_trace(reason: str) -> str:
    """Return Inductor's reason for no capture in one line, with the line of the user's code."""
    plain = re.sub(r"(skipping cudagraphs due to )+", "", reason)
    text, _, trace = plain.partition(" Found from")
    line = _line_of(trace)
    return text.strip().rstrip(".") + (f", in {line}" if line else "")


def work_between_parts(source: str) -> list[str]:
    """Return the operators that code of Inductor's runs on the device outside of captured parts.

    Copies between host and device count, and reads of single values.

    Args:
        source: The code; that of a graph in parts calls these from one function.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return []
    functions = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)]
    bodies = [one for one in functions if one.name == "call"]
    found = [text for one in bodies for text in _operators_in(one, on_device=False)]
    return list(dict.fromkeys(found))


def _operators_in(part: ast.AST, *, on_device: bool) -> Iterator[str]:
    """Yield the operators that code calls; only copies and reads where it selects no device."""
    for one in ast.iter_child_nodes(part):
        is_guard = isinstance(one, ast.With) and "_DeviceGuard" in ast.unparse(one.items[0])
        if isinstance(one, ast.Call):
            name = ast.unparse(one.func)
            last = name.rpartition(".")[2]
            if last in _READS:
                yield _READS[last]
            elif on_device and (_OPERATOR.match(name) or last == "run"):
                yield f"operator {name}"
        yield from _operators_in(one, on_device=on_device or is_guard)


_READS = {"copy_": "a copy between host and device", "item": "a read of a value by the host"}
_OPERATOR = re.compile(r"(torch\.ops|aten|extern_kernels|inductor_ops|_quantized)\.")
