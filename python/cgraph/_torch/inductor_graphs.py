"""Where Inductor asks for its manager of CUDA graphs, and others may answer.

Inductor hands each function that it wants captured to one function of its own. That one, and the
one that finds the manager of graphs, ask here for a manager first. There is one only while a
function is compiled for it, so that others' graphs stay torch's, or one that takes all graphs.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from cgraph._torch.private_names import lacks

__all__ = ["GraphManager", "call_at_reset", "take_all_graphs"]


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
def managed_by(manager: GraphManager) -> Iterator[None]:
    """Give all graphs that are compiled in a ``with`` block to a manager."""
    before = _manager.set(manager)
    try:
        yield
    finally:
        _manager.reset(before)


@functools.cache
def compiler_asks() -> Any:
    """Let Inductor ask for a manager; return the module that compiles."""
    compiler: Any = importlib.import_module("torch._inductor.compile_fx")
    trees: Any = importlib.import_module("torch._inductor.cudagraph_trees")
    names = (compiler, "cudagraphify"), (trees, "get_manager"), (trees, "cudagraphify_impl")
    for module, name in names:
        if not hasattr(module, name):
            raise lacks(f"{module.__name__}.{name}")
    cudagraphify, get_manager = compiler.cudagraphify, trees.get_manager
    of_trees = trees.cudagraphify_impl

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
    return compiler


def call_at_reset(reset: Callable[[], None]) -> None:
    """Call a function in each ``torch.compiler.reset()`` from here on, before torch's own work."""
    trees: Any = importlib.import_module("torch._inductor.cudagraph_trees")
    of_trees = trees.reset_cudagraph_trees

    @functools.wraps(of_trees)
    def both() -> None:
        reset()
        of_trees()

    trees.reset_cudagraph_trees = both


class _OfDevice:
    """A stand-in for torch's manager of a device, which Inductor tells of backward passes."""

    def __init__(self, manager: GraphManager, device_index: int) -> None:
        self._manager, self._device_index = manager, device_index

    def set_to_running_backward(self) -> None:
        self._manager.set_running_backward(self._device_index)
