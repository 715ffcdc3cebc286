"""CUDA graphs for PyTorch: the names of ``torch.cuda``, on a Rust core.

>>> import torch, cgraph
>>> with cgraph.sim.use():  # without a GPU; leave it out to use CUDA
...     x, graph = torch.ones(4), cgraph.CUDAGraph()
...     with cgraph.graph(graph):
...         y = x * 2
...     _ = x.fill_(21)
...     graph.replay()
...     print(y)
tensor([42., 42., 42., 42.])
"""

import atexit as _atexit

from cgraph import errors, labels, sim
from cgraph._core import begin_exit as _begin_exit
from cgraph._core import version as _version
from cgraph.errors import CgraphError
from cgraph.graphs import CUDAGraph, graph, graph_pool_handle, is_current_stream_capturing
from cgraph.labels import annotate

__all__ = [
    "CUDAGraph",
    "CgraphError",
    "annotate",
    "errors",
    "graph",
    "graph_pool_handle",
    "is_current_stream_capturing",
    "labels",
    "sim",
]
__version__ = _version()

# The interpreter tears objects down in no order that a driver could bear.
_atexit.register(_begin_exit)
