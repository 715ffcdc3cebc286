"""torch's compiler Inductor, with another manager of CUDA graphs.

Inductor hands each function that it wants captured to one function of its own. That one, and the
one that finds the manager of graphs, ask here for a manager first; there is one only while a
function is compiled for it, so that others' graphs stay torch's.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from cgraph._torch.private_names import lacks, of_operators
from cgraph._torch.tensors import clone_with_strides

__all__ = [
    "GraphManager",
    "call_at_reset",
    "compile_interpreted",
    "compile_with_inductor",
    "first_line_of",
    "realigned",
]


class GraphManager(Protocol):
    """A manager of the graphs of compiled functions."""

    def cudagraphify(
        self,
        model: Callable[[list[Any]], Any],
        *,
        device_index: int,
        is_backward: bool,
        is_inference: bool,
        static_input_idxs: Sequence[int] = (),
        mutated_input_idxs: Sequence[int] = (),
        **_: Any,
    ) -> Any:
        """Return what is called instead of a function that takes, and empties, a list.

        The keywords are those of ``torch._inductor.compile_fx.cudagraphify``.
        """

    def set_running_backward(self, device_index: int) -> None:
        """Note that a backward pass runs that is not captured."""

    @property
    def parts(self) -> int:
        """The number of functions that it was given."""

    def skip(self, reason: str) -> None:
        """Note that a graph, or a part of one, is not captured."""


_manager: contextvars.ContextVar[GraphManager | None] = contextvars.ContextVar(
    "cgraph_manager", default=None
)


def compile_with_inductor(
    graph_module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    manager: GraphManager,
) -> Callable[..., Any]:
    """Compile a graph by Inductor, in parts that can be captured.

    Args:
        graph_module: The graph.
        inputs: Its example inputs.
        manager: Gets the parts. It is told why a graph has none.
    """
    compiler = _seam()
    config: Any = importlib.import_module("torch._inductor.config")
    partition = not config.cpp_wrapper
    patches = {"triton.cudagraphs": True, "graph_partition": partition}

    @functools.wraps(compiler.compile_fx_inner)
    def inner_compile(*args: Any, **kwargs: Any) -> Any:
        with _managed_by(manager):
            before = manager.parts
            made = compiler.compile_fx_inner(*args, **kwargs)
            if manager.parts == before and "cuda" in getattr(made, "device_types", ()):
                manager.skip(_reason_of(made))
            return made

    with _managed_by(manager):
        found: Callable[..., Any] = compiler.compile_fx(
            graph_module, inputs, inner_compile=inner_compile, config_patches=patches
        )
    return found


def compile_interpreted(
    graph_module: torch.fx.GraphModule, inputs: Sequence[Any], manager: GraphManager
) -> Callable[..., Any]:
    """Compile a graph as Inductor would, up to the code: an interpreter runs its operators.

    Args:
        graph_module: The graph.
        inputs: Its example inputs.
        manager: Gets the graph of the forward pass, and that of the backward pass.
    """
    compiler: Any = importlib.import_module("torch._inductor.compile_fx")

    def inner_compile(graph: torch.fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        def run(args: list[Any]) -> Any:
            # An interpreter keeps its last results.
            return torch.fx.Interpreter(graph).boxed_run(args)

        refused = _data_dependent(graph)
        if refused is not None:
            manager.skip(f"{refused} needs values of the device on the host")
            vars(run)["_boxed_call"] = True
            return run
        return manager.cudagraphify(
            run,
            static_input_idxs=tuple(kwargs.get("static_input_idxs") or ()),
            device_index=0,
            is_backward=bool(kwargs.get("is_backward")),
            is_inference=bool(kwargs.get("is_inference")),
            mutated_input_idxs=_mutated(graph),
        )

    caches: Any = importlib.import_module("torch._functorch.config")
    with caches.patch(enable_autograd_cache=False):
        found: Callable[..., Any] = compiler.compile_fx(
            graph_module, inputs, inner_compile=inner_compile
        )
    return found


def realigned(
    model: Callable[[list[Any]], Any], mutated: Sequence[int]
) -> Callable[[list[Any]], Any]:
    """Return a function that gives copies of its inputs that are not aligned to another one.

    Inductor's code takes inputs for aligned, as those of a captured call are.

    Args:
        model: The other function; it takes a list, which it empties.
        mutated: The places of inputs that it writes.
    """

    def run(inputs: list[Any]) -> Any:
        copies = []
        for place, one in enumerate(inputs):
            if isinstance(one, torch.Tensor) and one.data_ptr() % _ALIGNMENT:
                inputs[place] = clone_with_strides(one)
                if place in mutated:
                    copies.append((one, inputs[place]))
        found = model(inputs)
        for one, copy in copies:
            one.copy_(copy)
        return found

    return run


# In bytes; what Inductor's kernels for vectors of elements need.
_ALIGNMENT = 16


def first_line_of(graph_module: torch.fx.GraphModule) -> str | None:
    """Return the line of the user's code that a graph of Dynamo's begins with, if it is known."""
    for node in graph_module.graph.nodes:
        lines = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', node.stack_trace or "")
        if lines:
            file, number, function = lines[-1]
            return f"{function} ({os.path.basename(file)}:{number})"
    return None


@contextlib.contextmanager
def _managed_by(manager: GraphManager) -> Iterator[None]:
    before = _manager.set(manager)
    try:
        yield
    finally:
        _manager.reset(before)


@functools.cache
def _seam() -> Any:
    """Let Inductor ask for a manager; return the module that compiles."""
    compiler: Any = importlib.import_module("torch._inductor.compile_fx")
    trees: Any = importlib.import_module("torch._inductor.cudagraph_trees")
    for module, name in ((compiler, "cudagraphify"), (trees, "get_manager")):
        if not hasattr(module, name):
            raise lacks(f"{module.__name__}.{name}")
    cudagraphify, get_manager = compiler.cudagraphify, trees.get_manager

    @functools.wraps(cudagraphify)
    def asked(model: Any, *args: Any, **kwargs: Any) -> Any:
        manager = _manager.get()
        if manager is None:
            return cudagraphify(model, *args, **kwargs)
        if args:
            kwargs["static_input_idxs"] = args[0]
        return manager.cudagraphify(model, **kwargs)

    @functools.wraps(get_manager)
    def found(device_index: int, *args: Any, **kwargs: Any) -> Any:
        manager = _manager.get()
        if manager is None:
            return get_manager(device_index, *args, **kwargs)
        return _OfDevice(manager, device_index)

    compiler.cudagraphify, trees.get_manager = asked, found
    return compiler


class _OfDevice:
    """A stand-in for torch's manager of a device, which Inductor tells of backward passes."""

    def __init__(self, manager: GraphManager, device_index: int) -> None:
        self._manager, self._device_index = manager, device_index

    def set_to_running_backward(self) -> None:
        self._manager.set_running_backward(self._device_index)


def _reason_of(made: Any) -> str:
    """Return why Inductor wants nothing captured of a graph."""
    reasons = getattr(getattr(made, "cudagraph_info", None), "cudagraph_fail_reasons", None)
    reason = getattr(made, "disabled_cudagraphs_reason", None) or ", ".join(reasons or ())
    return reason or "Inductor finds no part of it that can be captured"


def _data_dependent(graph: torch.fx.GraphModule) -> str | None:
    """Return an operator of a graph that no capture of its operators can have; None without."""
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        tags = getattr(node.target, "tags", ())
        if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}.intersection(tags):
            return str(node.target)
        if isinstance(node.target, of_operators.HigherOrderOperator):
            return str(node.target)
    return None


def call_at_reset(reset: Callable[[], None]) -> None:
    """Call a function in each ``torch.compiler.reset()`` from here on, before torch's own work."""
    trees: Any = importlib.import_module("torch._inductor.cudagraph_trees")
    of_trees = trees.reset_cudagraph_trees

    @functools.wraps(of_trees)
    def both() -> None:
        reset()
        of_trees()

    trees.reset_cudagraph_trees = both


def _mutated(graph: torch.fx.GraphModule) -> tuple[int, ...]:
    """Return the places of the inputs that a functional graph writes, at its end."""
    places = [one for one in graph.graph.nodes if one.op == "placeholder"]
    written = {
        one.args[0]
        for one in graph.graph.nodes
        if one.target is torch.ops.aten.copy_.default and one.args[0] in places
    }
    return tuple(place for place, one in enumerate(places) if one in written)
