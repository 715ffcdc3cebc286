"""Hooks that are called for every graph, for example by a profiler.

They run in the order of registration, before those of the graph itself. An exception of a hook goes
to ``sys.unraisablehook``: it breaks no graph and stops no other hook. ``handle.remove()``, or the
end of a ``with`` block over the handle, removes a hook.

>>> import torch, cgraph
>>> with cgraph.sim.use(), cgraph.register_graph_replay_end_hook(lambda graph: print("replayed")):
...     x, graph = torch.ones(4), cgraph.CUDAGraph()
...     with cgraph.graph(graph):
...         y = x * 2
...     graph.replay()
replayed
"""

from __future__ import annotations

from collections.abc import Callable

from cgraph import _core
from cgraph.cudagraph import Hook

__all__ = [
    "register_graph_capture_end_hook",
    "register_graph_capture_start_hook",
    "register_graph_destroy_hook",
    "register_graph_instantiate_hook",
    "register_graph_replay_end_hook",
    "register_graph_replay_start_hook",
]


def register_graph_capture_start_hook(fn: Hook) -> _core.HookHandle:
    """Call ``fn(graph)`` when a capture has begun: work that it enqueues becomes part of it."""
    return _core.register_for_all("capture_start", fn)


def register_graph_capture_end_hook(fn: Hook) -> _core.HookHandle:
    """Call ``fn(graph)`` when a capture has succeeded and its template is live."""
    return _core.register_for_all("capture_end", fn)


def register_graph_instantiate_hook(fn: Hook) -> _core.HookHandle:
    """Call ``fn(graph)`` after each instantiation."""
    return _core.register_for_all("instantiate", fn)


def register_graph_replay_start_hook(fn: Hook) -> _core.HookHandle:
    """Call ``fn(graph)`` before each launch."""
    return _core.register_for_all("replay_start", fn)


def register_graph_replay_end_hook(fn: Hook) -> _core.HookHandle:
    """Call ``fn(graph)`` when a replay is enqueued, not finished; also if the launch failed."""
    return _core.register_for_all("replay_end", fn)


def register_graph_destroy_hook(fn: Callable[[set[int]], object]) -> _core.HookHandle:
    """Call ``fn(graph_ids)`` when a captured graph is reset or dies, before its own callbacks.

    Args:
        fn: Gets the driver's numbers of the capture's template and execs, as profilers report them;
            an empty set where the driver gives none (before CUDA 13.1).
    """
    return _core.register_for_all("destroy", fn)
