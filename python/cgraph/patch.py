"""``patch_torch``: the names of ``torch.cuda`` become cgraph's, for code that cannot be changed.

Inductor's trees, servers and libraries look their graphs up in ``torch.cuda`` when they make one.

>>> import torch, cgraph
>>> with cgraph.sim.use(), cgraph.patch_torch():
...     x, graph = torch.ones(4), torch.cuda.CUDAGraph()
...     with torch.cuda.graph(graph):
...         y = x * 2
...     graph.replay()
...     print(isinstance(graph, cgraph.CUDAGraph), y)
True tensor([2., 2., 2., 2.])
>>> torch.cuda.CUDAGraph is cgraph.CUDAGraph
False
"""

from __future__ import annotations

import sys
import threading
from types import ModuleType
from typing import Any

import torch.cuda.graphs

from cgraph import _torch, callables, cudagraph, data, graphs, hooks
from cgraph.errors import StateError

__all__ = ["Patch", "patch_torch"]

_OF_CUDA: dict[str, Any] = {
    "CUDAGraph": cudagraph.CUDAGraph,
    "graph": graphs.graph,
    "graph_pool_handle": graphs.graph_pool_handle,
    "is_current_stream_capturing": graphs.is_current_stream_capturing,
    "make_graphed_callables": callables.make_graphed_callables,
    "export_dot": data.export_dot,
    "export_graph_data": data.export_graph_data,
}
_OF_GRAPHS: dict[str, Any] = {**_OF_CUDA, **{name: getattr(hooks, name) for name in hooks.__all__}}

_MISSING: Any = object()


class Patch:
    """The result of :func:`patch_torch`: a context whose exit undoes the patch."""

    def __init__(self, *, trees: bool = False) -> None:
        self._in_force = False
        with _lock:
            _install()
            self._in_force = True
            self._takes_trees = False
            try:
                if trees:
                    _take_trees(1)
                    self._takes_trees = True
            except BaseException:
                self.undo()
                raise

    def undo(self) -> None:
        """Undo the patch, in any order among others; a second time does nothing.

        Undoing the last patch restores all names, except names that others have bound to something
        new since then.
        """
        with _lock:
            if self._in_force:
                self._in_force = False
                if self._takes_trees:
                    _take_trees(-1)
                _remove()

    def __copy__(self) -> Patch:
        """Return the patch itself: one patch is undone once."""
        return self

    def __deepcopy__(self, memo: object) -> Patch:
        """Return the patch itself, as for a copy."""
        return self

    def __enter__(self) -> Patch:
        """Return the patch, which is in force since it was made."""
        if not self._in_force:
            raise StateError("the patch was taken back: call patch_torch() again")
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()


def patch_torch(*, trees: bool = False) -> Patch:
    """Make the names of ``torch.cuda`` cgraph's from now on, in all threads.

    These are ``CUDAGraph``, ``graph``, ``graph_pool_handle``, ``is_current_stream_capturing``,
    ``make_graphed_callables``, ``export_dot`` and ``export_graph_data`` in ``torch.cuda`` and
    ``torch.cuda.graphs``, and the ``register_graph_…_hook`` functions in the latter, also where
    this torch lacks some of them. Modules that imported one of them by name (``from torch.cuda
    import CUDAGraph``) get cgraph's too.

    With ``trees``, the graphs of ``torch.compile(mode="reduce-overhead")``, and of other modes and
    backends that use torch's CUDAGraph Trees, are cgraph's graph trees, from the next compilation
    on.

    Without further use, torch stays patched; use the result in a ``with`` statement or call
    :meth:`Patch.undo`, and everything is as before, including names that did not exist. Torch's
    compiler goes on asking cgraph for a manager of graphs, and gets none.

    Graphs and pools that were made before go on working: ``torch.cuda.graph`` captures into a
    ``CUDAGraph`` of torch's own as before. So do cgraph's after the patch was undone.

    Other references are not found: attributes of classes and objects, default arguments, local
    variables. A module imported while torch is patched that took a name from it keeps cgraph's.
    Hooks registered through torch's own functions before see only torch's own graphs.
    """
    return Patch(trees=trees)


_lock = threading.RLock()
_patches = 0
_patches_of_trees = 0
_changes: list[tuple[Any, str, Any, Any]] = []
"""The changed names: the owner, the name, the old value (or ``_MISSING``), and the new one."""


def _install() -> None:
    global _patches
    with _lock:
        if _patches == 0:
            try:
                _change_all()
            except BaseException:
                _restore()
                raise
        _patches += 1


def _remove() -> None:
    global _patches
    _patches -= 1
    if _patches == 0:
        _restore()


def _take_trees(count: int) -> None:
    """Note so many more patches that take the graphs of torch's compiler."""
    from cgraph._trees.backend import take_graphs_of_torch

    global _patches_of_trees
    if (_patches_of_trees == 0) != (_patches_of_trees + count == 0):
        take_graphs_of_torch(takes=count > 0)
    _patches_of_trees += count


def _change_all() -> None:
    home = vars(torch.cuda.graphs)
    originals = {name: home[name] for name in _OF_GRAPHS if name in home}
    graphs.graph._of_torch = originals["graph"]
    for name, function in _torch.current_graph_lookup().items():
        _change(cudagraph.CUDAGraph, name, function)
    for name, ours in _OF_CUDA.items():
        _change(torch.cuda, name, ours)
    for name, ours in _OF_GRAPHS.items():
        _change(torch.cuda.graphs, name, ours)
    # Only names that torch.cuda.graphs defines: a name there that someone has bound to, say, None
    # must not become ours wherever there is a None.
    ours_by_id = {
        id(original): _OF_GRAPHS[name]
        for name, original in originals.items()
        if getattr(original, "__module__", None) == torch.cuda.graphs.__name__
    }
    for path, module in list(sys.modules.items()):
        if issubclass(type(module), ModuleType) and path.partition(".")[0] != "cgraph":
            for name, value in list(_names(module).items()):
                if id(value) in ours_by_id:
                    _change(module, name, ours_by_id[id(value)])
    _torch.share_tracing_rules((originals[name], _OF_GRAPHS[name]) for name in originals)


def _restore() -> None:
    functions = [(before, ours) for _, _, before, ours in _changes if before is not _MISSING]
    while _changes:
        owner, name, before, ours = _changes.pop()
        if _names(owner).get(name) is ours:
            _bind(owner, name, before)
    graphs.graph._of_torch = None
    _torch.share_tracing_rules(functions)


def _change(owner: Any, name: str, ours: Any) -> None:
    _changes.append((owner, name, _names(owner).get(name, _MISSING), ours))
    _bind(owner, name, ours)


def _bind(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, type):
        delattr(owner, name) if value is _MISSING else setattr(owner, name, value)
    elif value is _MISSING:
        del _names(owner)[name]
    else:
        _names(owner)[name] = value


def _names(owner: Any) -> Any:
    """Return the dictionary of a module or class; loads no lazy module and runs no code of it."""
    return object.__getattribute__(owner, "__dict__")
