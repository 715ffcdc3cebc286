"""Where Inductor asks for its manager of CUDA graphs, and others may answer.

Inductor hands each function that it wants captured to one function of its own. That one, and the
one that finds the manager of graphs, ask here for a manager first. There is one only while a
function is compiled for it, so that others' graphs stay torch's, or one that takes all graphs.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from cgraph._torch.compiled_graphs import (
    count_of_skips,
    reason_without_trace,
    work_between_parts,
)
from cgraph._torch.private_names import lacks

__all__ = ["GraphManager", "call_at_reset", "let_managers_go", "take_all_graphs"]


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

    def skip(self, reason: str, *, is_counted: bool = False) -> None:
        """Tell that a graph is not captured; ``is_counted`` if torch has counted that."""

    def skip_between(self, reason: str) -> None:
        """Tell of work between the parts of a graph that is not captured."""


_manager: contextvars.ContextVar[GraphManager | None] = contextvars.ContextVar(
    "cgraph_manager", default=None
)


# The manager of graphs that no other one gets.
_of_all: list[GraphManager] = []


def take_all_graphs(manager: GraphManager | None) -> None:
    """Give all graphs that torch would make from here on to a manager; None ends that.

    These are Inductor's, and those of Dynamo's backend ``cudagraphs``.
    """
    compiler_asks()
    _of_all[:] = [] if manager is None else [manager]


@contextlib.contextmanager
def managed_by(manager: GraphManager | None) -> Iterator[None]:
    """Give all graphs that are compiled in a ``with`` block to a manager; None ends that."""
    before = _manager.set(manager)
    try:
        yield
    finally:
        _manager.reset(before)


@functools.cache
def compiler_asks() -> Any:
    """Let Inductor ask for a manager; return the module that compiles."""
    # Before Inductor imports it.
    trees = _module_of_trees()
    compiler: Any = importlib.import_module("torch._inductor.compile_fx")
    output: Any = importlib.import_module("torch._inductor.output_code")
    code: Any = getattr(output, "CompiledFxGraph", None)
    names = (compiler, "cudagraphify"), (trees, "get_manager"), (trees, "cudagraphify_impl")
    for owner, name in (*names, (code, "post_compile")):
        if not hasattr(owner, name):
            raise lacks(f"torch._inductor's {name}")
    cudagraphify, get_manager = compiler.cudagraphify, trees.get_manager
    of_trees = trees.cudagraphify_impl

    @functools.wraps(cudagraphify)
    def asked(model: Any, *args: Any, **kwargs: Any) -> Any:
        manager = _manager.get() or next(iter(_of_all), None)
        if manager is None:
            return cudagraphify(model, *args, **kwargs)
        if args:
            kwargs["static_input_idxs"] = args[0]
        return manager.cudagraphify(model, **kwargs)

    @functools.wraps(get_manager)
    def found(device_index: int, *args: Any, **kwargs: Any) -> Any:
        manager = _manager.get() or next(iter(_of_all), None)
        if manager is None:
            return get_manager(device_index, *args, **kwargs)
        return _OfDevice(manager, device_index)

    @functools.wraps(of_trees)
    def in_trees(model: Any, inputs: Any, static_input_idxs: Any, *args: Any, **kwargs: Any) -> Any:
        if not _of_all or args:
            return of_trees(model, inputs, static_input_idxs, *args, **kwargs)
        return _of_all[0].cudagraphify(model, static_input_idxs=static_input_idxs, **kwargs)

    compiler.cudagraphify, trees.get_manager, trees.cudagraphify_impl = asked, found, in_trees
    code.post_compile = _telling(code.post_compile)
    return compiler


def _telling(post_compile: Callable[..., None]) -> Callable[..., None]:
    """Return the last step of each compilation, also of one from a cache, with what follows it.

    Then the manager is told what is not captured.
    """

    @functools.wraps(post_compile)
    def followed(made: Any, *args: Any, **kwargs: Any) -> None:
        manager = _manager.get()
        before, skips = 0 if manager is None else manager.parts, count_of_skips()
        post_compile(made, *args, **kwargs)
        if manager is None or "cuda" not in made.device_types:
            return
        if manager.parts == before:
            manager.skip(_reason_of(made), is_counted=count_of_skips() > skips)
        else:
            for work in work_between_parts(made.source_code):
                manager.skip_between(f"{work}, between captured parts")

    return followed


def _reason_of(made: Any) -> str:
    """Return why Inductor wants nothing captured of a graph."""
    reasons = getattr(getattr(made, "cudagraph_info", None), "cudagraph_fail_reasons", None)
    reason = getattr(made, "disabled_cudagraphs_reason", None) or ", ".join(reasons or ())
    if reason:
        return reason_without_trace(reason)
    between = work_between_parts(made.source_code)
    return f"no part that can be captured{': ' if between else ''}{', '.join(between)}"


def call_at_reset(reset: Callable[[], None]) -> None:
    """Call a function in each ``torch.compiler.reset()`` from here on, before torch's own work."""
    trees = _module_of_trees()
    of_trees = trees.reset_cudagraph_trees

    @functools.wraps(of_trees)
    def both() -> None:
        reset()
        of_trees()

    trees.reset_cudagraph_trees = both


def let_managers_go() -> None:
    """Let torch's managers of graphs keep no pool of cgraph's beyond their end.

    torch's token of a pool is two numbers, which a manager may keep for as long as it likes.
    """
    manager: Any = getattr(sys.modules.get(_TREES), "CUDAGraphTreeManager", None)
    shutdown = getattr(manager, "shutdown", None)
    if shutdown is None or hasattr(shutdown, _LETS_GO):
        return

    @functools.wraps(shutdown)
    def ended(self: Any) -> None:
        shutdown(self)
        if isinstance(token := getattr(self, _TOKEN, None), tuple):
            setattr(self, _TOKEN, (token[0], token[1]))

    setattr(ended, _LETS_GO, True)
    manager.shutdown = ended


@functools.cache
def _module_of_trees() -> Any:
    """Import torch's module of graph trees, also inside a backward pass.

    The import hands objects to the thread whose references torch takes without having been given
    them: the end of a backward pass, which forgets them, would free them.
    """
    is_first = _TREES not in sys.modules
    trees: Any = importlib.import_module(_TREES)
    if is_first:
        for held in vars(getattr(trees, "local", None) or object).values():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
    return trees


_TREES = "torch._inductor.cudagraph_trees"
_TOKEN = "cuda_graphs_thread_pool"
_LETS_GO = "_cgraph_lets_go"


class _OfDevice:
    """A stand-in for torch's manager of a device, which Inductor tells of backward passes.

    Attributes:
        current_node: What Dynamo asks whether a gradient stays where it is.
    """

    def __init__(self, manager: GraphManager, device_index: int) -> None:
        self._manager, self._device_index = manager, device_index
        self.current_node = self

    def _is_cuda_graph_recorded_tensor(self, tensor: object) -> bool:
        """Return False: what is held when a step ends moves."""
        return False

    def set_to_running_backward(self) -> None:
        self._manager.set_running_backward(self._device_index)
