"""Compilation of parts of a graph of Dynamo's, outside of its own backends."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from cgraph._torch.private_names import FakeTensor, PrivateNames, lacks

__all__ = [
    "compile_standalone",
    "compiled_of",
    "compiler_errors",
    "compiler_state",
    "device_names",
    "fix_unmarked_sizes",
    "last_graph_break",
    "mark_open_size",
    "open_sizes",
    "rank",
    "recompile_reason",
    "seconds_of_tracing",
    "size_guards",
    "stored_bytes",
]


def seconds_of_tracing() -> float | None:
    """Return how long Dynamo's compilation has taken so far, in a backend; None if unknown."""
    current = getattr(sys.modules.get("torch._dynamo.utils"), "get_metrics_context", None)
    context: Any = None if current is None else current()
    began = getattr(context, "_start_time_ns", 0)
    return (time.time_ns() - began) / 1e9 if began and context.in_progress() else None


def compiler_errors() -> tuple[type[BaseException], ...]:
    """Return the errors with which Inductor fails at a graph."""
    exc: Any = sys.modules.get("torch._inductor.exc")
    found = getattr(exc, "InductorError", None)
    return () if found is None else (found,)


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


def stored_bytes(compiled: Callable[..., Any]) -> bytes | None:
    """Return the bytes of what :func:`compile_standalone` has made; None if torch has none."""
    save = getattr(compiled, "save", None)
    if save is None or not getattr(compiled, "is_saveable", lambda: True)():
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "piece")
        try:
            save(path=path, format="binary")
        except (AssertionError, RuntimeError):
            # torch says that its compiler has left nothing to keep.
            return None
        with open(path, "rb") as file:
            return file.read()


def compiled_of(code: bytes) -> Callable[..., Any]:
    """Return the function of these bytes, whose result is a sequence."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "piece")
        with open(path, "wb") as file:
            file.write(code)
        # The function of the same name hides the module among its parent's attributes.
        module: Any = importlib.import_module("torch._inductor.standalone_compile")
        if not hasattr(module, "CompiledArtifact"):
            raise lacks("torch._inductor.standalone_compile.CompiledArtifact")
        made: Callable[..., Any] = module.CompiledArtifact.load(path=path, format="binary")
        return made


def size_guards(inputs: Sequence[Any]) -> list[Any]:
    """Return the conditions on open sizes that are taken for true, in the order of their making."""
    mode = next((one.fake_mode for one in inputs if isinstance(one, FakeTensor)), None)
    env = None if mode is None else mode.shape_env
    return [] if env is None else [one.expr for one in env.guards]


def compiler_state() -> tuple[Any, ...]:
    """Return the configuration of Inductor, and the modes of torch that its code depends on."""
    options = _config.save_config_portable()
    modes = (
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in ("cpu", "cuda")
        ],
    )
    return sorted((name, repr(value)) for name, value in options.items()), repr(modes)


def device_names() -> tuple[Any, ...]:
    """Return the name of the current GPU and of its architecture, and the version of CUDA."""
    if not torch.cuda.is_available():
        return ("cpu",)
    return torch.cuda.get_device_name(), torch.cuda.get_device_capability(), torch.version.cuda


def rank() -> int:
    """Return the rank of this process among those that work together; 0 if it is alone.

    Raises:
        ValueError: ``RANK`` is no number.
    """
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    given = os.environ.get("RANK", "0") or "0"
    if not given.isdecimal():
        raise ValueError(f"RANK is {given!r:.80}, expected a number")
    return int(given)


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


def fix_unmarked_sizes(values: Sequence[Any]) -> None:
    """Let sizes that Dynamo has opened by itself be those of this call, if one is marked.

    Args:
        values: The example inputs of a graph, these sizes among them.
    """
    sizes = [one for one in values if isinstance(one, torch.SymInt)]
    others = [one for one in sizes if not _symbolic_shapes.free_unbacked_symbols(one)]
    if len(others) < len(sizes):
        for one in others:
            # Dynamo compares it in later calls.
            int(one)


def last_graph_break() -> str | None:
    """Return why Dynamo has broken a graph the last time, and in which line; None if it has not."""
    utils: Any = importlib.import_module("torch._dynamo.utils")
    reasons = getattr(utils, "graph_break_reasons", None)
    if not reasons:
        return None
    last = reasons[-1]
    stack = getattr(last, "user_stack", None) or ()
    where = f", in line {stack[-1].lineno} of {stack[-1].filename}" if stack else ""
    return f"{str(last.reason).strip().splitlines()[0]}{where}"


_config = PrivateNames("torch._inductor.config")
_inductor = PrivateNames("torch._inductor")
_guards = PrivateNames("torch._guards")
_symbolic_shapes = PrivateNames("torch.fx.experimental.symbolic_shapes")
_decorators = PrivateNames("torch._dynamo.decorators")
