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

from cgraph import errors, sim
from cgraph._core import begin_exit as _begin_exit
from cgraph._core import version as _version
from cgraph.data import export_dot, export_graph_data, graph_data
from cgraph.errors import CgraphError
from cgraph.graphs import CUDAGraph, graph, graph_pool_handle, is_current_stream_capturing

__all__ = [
    "CUDAGraph",
    "CgraphError",
    "errors",
    "export_dot",
    "export_graph_data",
    "graph",
    "graph_data",
    "graph_pool_handle",
    "is_current_stream_capturing",
    "sim",
]
__version__ = _version()

# The interpreter tears objects down in no order that a driver could bear.
_atexit.register(_begin_exit)
