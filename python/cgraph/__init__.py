"""CUDA graphs for PyTorch: functions that are replays, and the names of ``torch.cuda``.

>>> import torch, cgraph
>>> @cgraph.graphed
... def step(x):
...     return (x * 2).sum()
>>> with cgraph.sim.use():  # without a GPU; leave it out to use CUDA
...     for n in range(3):
...         y = step(torch.full((4,), float(n)))
...     print(y, step.report().replays)
tensor(16.) 2

Take ``graphed`` for functions and modules, ``torch.compile(backend="cgraph")`` for compiled ones,
``GraphLadder`` and ``piecewise`` for servers, ``CUDAGraph`` and ``graph`` for captures by hand,
``patch_torch`` for code that uses torch's; ``explain``, ``report``, ``memory`` and ``view`` to see
what they do.
"""

import atexit as _atexit
import os as _os
import sysconfig as _sysconfig

if _sysconfig.get_config_var("Py_GIL_DISABLED"):
    raise ImportError(
        "cgraph needs a Python with the GIL: use python3 instead of the free-threaded python3t"
    )

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

from cgraph import _driver, errors, hooks, labels, sim
from cgraph._captures.footprint import record_memory
from cgraph._core import begin_exit as _begin_exit
from cgraph._core import begin_forked as _begin_forked
from cgraph._core import version as _version
from cgraph.callables import make_graphed_callables
from cgraph.causes import Cause
from cgraph.cudagraph import CUDAGraph
from cgraph.cudagraph import end_all as _end_all
from cgraph.data import export_dot, export_graph_data, graph_data
from cgraph.errors import CgraphError, CgraphWarning
from cgraph.graphs import capture_scope, graph, graph_pool_handle, is_current_stream_capturing
from cgraph.hooks import (
    register_graph_capture_end_hook,
    register_graph_capture_start_hook,
    register_graph_destroy_hook,
    register_graph_instantiate_hook,
    register_graph_replay_end_hook,
    register_graph_replay_start_hook,
)
from cgraph.labels import annotate
from cgraph.mempool import MemPool
from cgraph.patch import patch_torch

__all__ = [
    "CUDAGraph",
    "Cause",
    "CgraphError",
    "CgraphWarning",
    "GraphLadder",
    "MemPool",
    "SegmentedGraph",
    "annotate",
    "aot",
    "capture_scope",
    "dry_run",
    "dry_run_shared",
    "eager_break",
    "errors",
    "explain",
    "export_dot",
    "export_graph_data",
    "graph",
    "graph_data",
    "graph_pool_handle",
    "graphed",
    "hooks",
    "is_current_stream_capturing",
    "labels",
    "load",
    "load_kernels",
    "loop",
    "make_graphed_callables",
    "memory",
    "metrics",
    "patch_torch",
    "picture",
    "piecewise",
    "record_images",
    "record_memory",
    "register_graph_capture_end_hook",
    "register_graph_capture_start_hook",
    "register_graph_destroy_hook",
    "register_graph_instantiate_hook",
    "register_graph_replay_end_hook",
    "register_graph_replay_start_hook",
    "report",
    "save",
    "sim",
    "trees",
    "view",
    "weak_ref",
    "when",
]
__version__ = _version()

_ON_FIRST_USE = {
    "GraphLadder": "cgraph.graph_ladder",
    "SegmentedGraph": "cgraph.segments",
    "dry_run": "cgraph.dryrun",
    "dry_run_shared": "cgraph.dryrun",
    "eager_break": "cgraph.breaks",
    "explain": "cgraph.explanation",
    "graphed": "cgraph.functions",
    "load": "cgraph.saved",
    "load_kernels": "cgraph.saved",
    "loop": "cgraph.loops",
    "memory": "cgraph.ledger",
    "metrics": "cgraph.counts",
    "record_images": "cgraph.saved",
    "report": "cgraph.functions",
    "save": "cgraph.saved",
    "view": "cgraph.viewer",
    "weak_ref": "cgraph.weak_refs",
    "when": "cgraph.loops",
}

if _TYPE_CHECKING:
    from cgraph import aot, picture, piecewise, trees
    from cgraph.breaks import eager_break
    from cgraph.counts import metrics
    from cgraph.dryrun import dry_run, dry_run_shared
    from cgraph.explanation import explain
    from cgraph.functions import graphed, report
    from cgraph.graph_ladder import GraphLadder
    from cgraph.ledger import memory
    from cgraph.loops import loop, when
    from cgraph.saved import load, load_kernels, record_images, save
    from cgraph.segments import SegmentedGraph
    from cgraph.viewer import view
    from cgraph.weak_refs import weak_ref
else:

    def __getattr__(name: str) -> object:
        """Import a name on first use, as many programs never need it."""
        if name in ("aot", "picture", "piecewise", "trees"):
            return _import_module(f"cgraph.{name}")
        if name not in _ON_FIRST_USE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = _ON_FIRST_USE[name]
        found = _import_module(module)
        # All of its names: a step that is the first to use one would change it.
        globals().update(
            {one: getattr(found, one) for one, of in _ON_FIRST_USE.items() if of == module}
        )
        return globals()[name]

    def __dir__() -> list[str]:
        """Return all names, also those that are imported on first use."""
        return sorted({*__all__, *(one for one in globals() if one.startswith("__"))})


def _cuda() -> _driver.Driver:
    """Import the parts that only CUDA needs, on first use."""
    from cgraph._captures.cuda import Cuda

    return Cuda()


_driver.register("cuda", _cuda)
_driver.register("sim", sim.make_default)

# The interpreter destroys objects in an order that no driver could bear. Functions run in the
# reverse order of their registration: the callbacks still find everything usable.
_atexit.register(_begin_exit)
_atexit.register(_end_all)
_os.register_at_fork(after_in_child=_begin_forked)
