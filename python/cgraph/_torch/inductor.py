"""torch's compilers Inductor and AOTAutograd, for graphs that others manage."""

from __future__ import annotations

import functools
import importlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from cgraph._torch.compiled_graphs import inputs_of, moving_operator, operator_refusal
from cgraph._torch.fx_partition import written_inputs
from cgraph._torch.inductor_graphs import GraphManager, compiler_asks, managed_by
from cgraph._torch.tensors import clone_with_strides
from cgraph.errors import CaptureError

__all__ = [
    "compile_interpreted",
    "compile_with_aot",
    "compile_with_inductor",
    "inductor_options",
    "realigned",
]


def compile_with_inductor(
    graph_module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    manager: GraphManager,
    options: Mapping[str, Any],
) -> Callable[..., Any]:
    """Compile a graph by Inductor, in parts that can be captured.

    Args:
        graph_module: The graph.
        inputs: Its example inputs.
        manager: Gets the parts. It is told why a graph has none.
        options: Values of Inductor's configuration.

    Raises:
        CaptureError: The compilation would end in another thread.
    """
    compiler = compiler_asks()
    utils: Any = importlib.import_module("torch._inductor.utils")
    _require_here(compiler)
    patches = {"graph_partition": _wants_parts(options), **options, "triton.cudagraphs": True}

    @functools.wraps(compiler.compile_fx_inner)
    def inner_compile(graph: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("is_backward") and "static_input_idxs" in kwargs:
            kwargs["static_input_idxs"] = _static_places(kwargs["static_input_idxs"])
        refused = moving_operator(graph.graph)
        if refused is None:
            with managed_by(manager):
                return compiler.compile_fx_inner(graph, *args, **kwargs)
        manager.skip(refused)
        kwargs["cudagraphs"] = utils.BoxedBool(False)
        with managed_by(None):
            return compiler.compile_fx_inner(graph, *args, **kwargs)

    with managed_by(manager), _known_to_caches(_marked(graph_module.graph)):
        found: Callable[..., Any] = compiler.compile_fx(
            graph_module, inputs, inner_compile=inner_compile, config_patches=patches
        )
    return found


def _wants_parts(options: Mapping[str, Any]) -> bool:
    """Return whether Inductor makes parts: unless users say no, also where torch does not."""
    config: Any = importlib.import_module("torch._inductor.config")
    if options.get("cpp_wrapper", config.cpp_wrapper):
        return False
    entry = getattr(config, "_config", {}).get("graph_partition")
    # A value that was patched for a while is set to the default then, as if a user had done it.
    is_other = config.graph_partition != getattr(entry, "default", None)
    by_user = is_other or "TORCHINDUCTOR_GRAPH_PARTITION" in os.environ
    return bool(config.graph_partition) if by_user else True


def _marked(graph: torch.fx.Graph) -> list[int]:
    """Return the places of the inputs of a graph of Dynamo's that users have marked as static.

    Weights and buffers of modules always are.
    """
    inputs = graph.find_nodes(op="placeholder")
    tensors = [one.meta.get("tensor_dict") or {} for one in inputs]
    of_modules = [bool(re.search("_(parameters|buffers)_", one.name)) for one in inputs]
    marks = [one.get("_dynamo_static_input_type") for one in tensors]
    return [place for place, mark in enumerate(marks) if mark and not of_modules[place]]


def _known_to_caches(places: Sequence[int]) -> AbstractContextManager[object]:
    """Let code from torch's caches have the same static inputs; their keys leave these out."""
    config: Any = importlib.import_module("torch.compiler.config")
    if not places or not hasattr(config, "cache_key_tag"):
        return nullcontext()
    tag = f"{config.cache_key_tag}cgraph:{places}"
    context: AbstractContextManager[object] = config.patch(cache_key_tag=tag)
    return context


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

        is_backward = bool(kwargs.get("is_backward"))
        refused = [reason for reason in map(operator_refusal, graph.graph.nodes) if reason]
        if refused:
            manager.skip(refused[0])
            return _uncaptured(run, manager, is_backward=is_backward)
        statics = kwargs.get("static_input_idxs") or ()
        statics = tuple(statics if is_backward else _static_places(statics))
        return manager.cudagraphify(
            run,
            static_input_idxs=statics,
            device_index=0,
            is_backward=is_backward,
            is_inference=bool(kwargs.get("is_inference")),
            mutated_input_idxs=sorted(written_inputs(graph.graph)),
            placeholders=inputs_of(graph.graph),
        )

    caches: Any = importlib.import_module("torch._functorch.config")
    with caches.patch(enable_autograd_cache=False):
        found: Callable[..., Any] = compiler.compile_fx(
            graph_module, inputs, inner_compile=inner_compile
        )
    return found


def compile_with_aot(
    graph_module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    compiler: Callable[[torch.fx.GraphModule, Sequence[Any], str, Sequence[int]], Any],
) -> Callable[..., Any]:
    """Compile the graphs that AOTAutograd makes of one.

    Args:
        graph_module: The graph.
        inputs: Its example inputs.
        compiler: Returns what is called with a graph's inputs; it is given the graph, its example
            inputs, ``"inference"``, ``"forward"`` or ``"backward"``, and the places of the inputs
            that stay where they are, or may do so in a backward pass.
    """
    common: Any = importlib.import_module("torch._dynamo.backends.common")
    utils: Any = importlib.import_module("torch._inductor.utils")
    functions: Any = importlib.import_module("functorch.compile")

    def boxed(mode: str) -> Callable[..., Any]:
        def compile_graph(graph: torch.fx.GraphModule, examples: Sequence[Any]) -> Any:
            statics: Sequence[int]
            if mode == "backward":
                statics = range(utils.count_tangents(graph))
            else:
                lifted = utils.num_fw_fixed_arguments(len(inputs), len(examples))
                statics = _static_places(range(lifted))
            return functions.make_boxed_func(compiler(graph, examples, mode, statics))

        return compile_graph

    made: Callable[..., Any] = common.aot_autograd(
        fw_compiler=boxed("forward"),
        bw_compiler=boxed("backward"),
        inference_compiler=boxed("inference"),
        # It saves weights, not their transposes: AOTAutograd sees their gradients in these alone.
        partition_fn=functions.min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )(graph_module, inputs)
    return made


def _static_places(others: Sequence[int]) -> Sequence[int]:
    """Return the places of the static inputs of the graph that is being compiled.

    Args:
        others: The places that its compiler has counted, for a torch that keeps none. Where an
            input wraps several tensors, these are wrong.
    """
    guards: Any = importlib.import_module("torch._guards")
    context = guards.TracingContext.try_get()
    found = getattr(getattr(context, "fw_metadata", None), "static_input_indices", None)
    return others if found is None else sorted(found)


def _uncaptured(
    model: Callable[[list[Any]], Any], manager: GraphManager, *, is_backward: bool
) -> Callable[[list[Any]], Any]:
    """Return a function that runs another one, of a backward pass perhaps, without a graph."""

    def run(inputs: list[Any]) -> Any:
        if is_backward:
            manager.set_running_backward(0)
        return model(inputs)

    # torch hands over the inputs as a list.
    vars(run)["_boxed_call"] = True
    return run


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
        # No name may keep an input, whose memory the function uses again.
        for place in [place for place, one in enumerate(inputs) if _is_misaligned(one)]:
            copy = clone_with_strides(inputs[place])
            if place in mutated:
                copies.append((inputs[place], copy))
            inputs[place] = copy
            del copy
        found = model(inputs)
        for one, copy in copies:
            one.copy_(copy)
        return found

    return run


def _is_misaligned(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.data_ptr() % _ALIGNMENT != 0


# In bytes; what Inductor's kernels for vectors of elements need.
_ALIGNMENT = 16


def inductor_options(mode: str | None = None) -> dict[str, Any]:
    """Return Inductor's options: all with their values, or those of a mode of ``torch.compile``.

    Raises:
        RuntimeError: torch knows no such mode.
    """
    inductor: Any = importlib.import_module("torch._inductor")
    if mode is None:
        config: Any = importlib.import_module("torch._inductor.config")
        found: dict[str, Any] = config.get_config_copy()
        return found
    return dict(inductor.list_mode_options(mode))


def _require_here(compiler: Any) -> None:
    """Raise if Inductor finishes a compilation in another thread, without a manager."""
    for word in ("async", "progressive"):
        if getattr(compiler, f"fx_compile_{word}", False):
            raise CaptureError(
                "TORCHINDUCTOR_FX_COMPILE_MODE is"
                f" {os.environ.get('TORCHINDUCTOR_FX_COMPILE_MODE')!r}: Inductor finishes a"
                " compilation in another thread, which finds no graph tree. Fix: unset it, or"
                " compile with another backend"
            )
