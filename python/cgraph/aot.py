"""AOTAutograd's graphs in captures, one operator after another, without generated code.

``torch.compile(backend="cgraph_aot")`` does all of this; the functions are its steps, for graphs
that come from elsewhere, as of ``make_fx``.
"""

from __future__ import annotations

from cgraph._trees.aot_graphs import (
    apply_cuda_graphs,
    cloner,
    cudagraphs,
    find_input_mutations,
    partition_cudagraphs,
)
from cgraph._trees.graph_module import CudaGraphModule

__all__ = [
    "CudaGraphModule",
    "apply_cuda_graphs",
    "cloner",
    "cudagraphs",
    "find_input_mutations",
    "partition_cudagraphs",
]
