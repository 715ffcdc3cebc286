"""All uses of torch's private names, and an error if one of them is missing.

The rest of cgraph uses only torch's public names and the names in the ``__all__`` of this package's
modules. The simulator's tests ran with torch 2.8, 2.9, 2.11 and 2.15, the GPU's with 2.11.
"""

from __future__ import annotations

import os

import torch

from cgraph._torch.allocator_history import *
from cgraph._torch.allocator_use import *
from cgraph._torch.block_owners import *
from cgraph._torch.collectives import *
from cgraph._torch.compiled_graphs import *
from cgraph._torch.compiler import *
from cgraph._torch.containers import *
from cgraph._torch.cupti import *
from cgraph._torch.fake import *
from cgraph._torch.fx_partition import *
from cgraph._torch.generators import *
from cgraph._torch.graph_nodes import *
from cgraph._torch.host import *
from cgraph._torch.inductor import *
from cgraph._torch.inductor_graphs import *
from cgraph._torch.interception import *
from cgraph._torch.memory_pieces import *
from cgraph._torch.modes import *
from cgraph._torch.modules import *
from cgraph._torch.native import *
from cgraph._torch.pools import *
from cgraph._torch.private_names import TensorWeakRef as TensorWeakRef
from cgraph._torch.private_names import TorchDispatchMode as TorchDispatchMode
from cgraph._torch.private_names import lacks
from cgraph._torch.standalone import *
from cgraph._torch.tensors import *
from cgraph._torch.unowned import *
from cgraph.errors import NoDriverError, TorchError

_NEEDED = (
    "_CUDAGraph",
    "_cuda_attach_out_of_memory_observer",
    "_cuda_beginAllocateCurrentThreadToPool",
    "_cuda_clearCublasWorkspaces",
    "_cuda_customAllocator",
    "_cuda_endAllocateToPool",
    "_cuda_isCurrentStreamCapturing",
    "_cuda_memorySnapshot",
    "_cuda_releasePool",
    "_graph_pool_handle",
)


def require_cuda() -> None:
    """Raise unless this torch can host captures.

    Raises:
        NoDriverError: torch is built without CUDA.
        TorchError: torch lacks a name that cgraph uses, or its allocator cannot serve captures.
    """
    if not hasattr(torch._C, "_CudaStreamBase"):
        raise NoDriverError(
            f"torch {torch.__version__} is built without CUDA. Fix: install a CUDA build of torch"
            " 2.8 or newer, or choose the simulator by name (CGRAPH_DRIVER=sim, cgraph.sim.use())"
        )
    missing = [name for name in _NEEDED if not hasattr(torch._C, name)]
    if missing:
        raise lacks(f"torch._C.{missing[0]}")
    if torch.cuda.get_allocator_backend() == "cudaMallocAsync":
        raise TorchError(
            "torch's allocator is cudaMallocAsync, which has no pools for captures and ends the"
            " process at exit. Fix: take backend:cudaMallocAsync out of PYTORCH_CUDA_ALLOC_CONF (or"
            " PYTORCH_ALLOC_CONF)"
        )
    if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
        raise TorchError(
            f"PYTORCH_NO_CUDA_MEMORY_CACHING is {os.environ['PYTORCH_NO_CUDA_MEMORY_CACHING']!r}:"
            " without torch's caching allocator each allocation inside a capture fails. Fix: unset"
            " it"
        )
