"""Compilation of parts of a graph of Dynamo's, outside of its own backends."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from cgraph._torch.private_names import FakeTensor, PrivateNames

__all__ = [
    "compile_standalone",
    "example_of",
    "mark_open_size",
    "open_sizes",
    "recompile_reason",
]


def compile_standalone(
    graph_module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    options: Mapping[str, Any],
) -> Callable[..., Any]:
    """Compile a graph by Inductor; return a function of its inputs.

    Args:
        graph_module: The graph, which stays as it is.
        inputs: Its inputs: those of a call or, so that sizes that are symbols stay open, those
            without contents that its nodes know.
        options: Options of Inductor.
    """
    compile_ = _inductor.standalone_compile
    keywords: dict[str, Any] = {}
    if "donate_graph_module" in inspect.signature(compile_).parameters:
        keywords["donate_graph_module"] = False
    shapes = "from_example_inputs"
    with ExitStack() as inside:
        mode = next((one.fake_mode for one in inputs if isinstance(one, FakeTensor)), None)
        if mode is not None:
            # That of Dynamo's own context may be another one than the inputs have.
            shapes = "from_tracing_context"
            inside.enter_context(_guards.tracing(_guards.TracingContext(mode)))
        made: Callable[..., Any] = compile_(
            graph_module,
            list(inputs),
            dynamic_shapes=shapes,
            options={"config_patches": {"triton.cudagraphs": False, **options}},
            **keywords,
        )
    return made


def example_of(node: torch.fx.Node) -> Any:
    """Return the value without contents that Dynamo has found for a node; None if it has not."""
    return node.meta.get("example_value")


def mark_open_size(tensor: torch.Tensor, dim: int) -> None:
    """Let Dynamo keep a size open, for 1 as well as for others."""
    _decorators.mark_unbacked(tensor, dim)


def open_sizes(size: int | torch.SymInt) -> set[Any]:
    """Return the symbols that a size depends on."""
    found: set[Any] = _symbolic_shapes.free_symbols(size)
    return found


def recompile_reason() -> str | None:
    """Return why Dynamo compiles code again, during that; None at the first time."""
    utils: Any = importlib.import_module("torch._dynamo.utils")
    context = getattr(utils, "get_metrics_context", None)
    found = None if context is None else getattr(context(), "_metrics", {})
    reason = (found or {}).get("recompile_reason")
    return None if reason is None else str(reason)


_inductor = PrivateNames("torch._inductor")
_guards = PrivateNames("torch._guards")
_symbolic_shapes = PrivateNames("torch.fx.experimental.symbolic_shapes")
_decorators = PrivateNames("torch._dynamo.decorators")
