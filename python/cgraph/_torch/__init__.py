"""Everything that is private in torch: names, where they exist, and a message when one is gone.

The rest of cgraph uses only torch's public names and this package. The simulator's tests ran with
torch 2.8, 2.9, 2.11 and 2.15, the GPU's with 2.11.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import TensorWeakRef

from cgraph._torch.compiler import Bystander, Uncompiled, is_compiled_code
from cgraph._torch.fake import (
    CpuFakeMode,
    DataDependentOutputException,
    DynamicOutputShapeException,
    as_computed,
)
from cgraph._torch.followers import follower_keys, is_followed, is_traced_by_fx
from cgraph._torch.history import History
from cgraph._torch.host import (
    HostGraph,
    captured_draw,
    current_graph_lookup,
    current_raw_stream,
    current_stream,
    current_stream_source,
    end_draws,
    has_gpu,
    is_capturing,
    is_torch_graph,
    keep_from_tracing,
    keeps_state_of_captures,
    on_stream,
    quiet,
    share_tracing_rules,
)
from cgraph._torch.modes import (
    autocast_state,
    is_any_autocast_enabled,
    mode_functions,
    random_devices,
    signature,
    wait_between,
    without_autocast,
    without_autocast_cache,
    without_gradients,
)
from cgraph._torch.modules import (
    HOOKS_OF_LEAVES,
    OF_ITSELF,
    HooksOf,
    call_forward,
    follow_modules,
    hooks_aside,
    hooks_of,
    hooks_of_leaf,
    hooks_of_users,
    knows_its_weights,
    note_weights,
    steps_noted,
)
from cgraph._torch.native import fresh_functions, mode_addresses, tensor_reader
from cgraph._torch.pools import (
    PoolKeeper,
    PoolLease,
    allocated,
    allocator,
    clear_workspaces,
    empty_cache,
    end_routing,
    explain_refusals,
    new_pool_handle,
    outlive,
    pool_segments,
    release_outliving,
    takes_allocators,
)
from cgraph._torch.saved import TELLS_SPENT, is_spent
from cgraph._torch.tensors import (
    WeakStorage,
    apply,
    at_end_of_backward,
    autograd_sequence,
    backward_pass,
    base_of,
    bytes_of,
    capturable_on_cpu,
    copy_each,
    demangled,
    enter_mode,
    evaluating_node,
    form_of,
    forward_ad,
    generator_among,
    in_class,
    is_autograds_thread,
    is_same,
    keeps_history,
    layout_of,
    lazy_view,
    leaf_names,
    leave_mode,
    living,
    memories_of,
    memory_of,
    mode_count,
    modes_aside,
    modes_inside_out,
    overlaps_itself,
    place_of,
    sequence_of,
    span_of,
    storage_id,
    take_mode_away,
    wants_gc,
    without_functions,
    without_modes,
    wrapped,
    zero_each,
)
from cgraph._torch.trees import (
    is_named_tuple,
    is_record,
    names_in,
    record_of,
    tree_flatten,
    tree_iter,
    tree_map,
    tree_unflatten,
    tree_with_records,
)
from cgraph._torch.watch import is_quiet, is_routed, watch_captures, watch_pools, watch_routing
from cgraph.errors import NoDriverError, TorchError

__all__ = [
    "HOOKS_OF_LEAVES",
    "OF_ITSELF",
    "TELLS_SPENT",
    "Bystander",
    "CpuFakeMode",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "History",
    "HooksOf",
    "HostGraph",
    "PoolKeeper",
    "PoolLease",
    "TensorWeakRef",
    "TorchDispatchMode",
    "Uncompiled",
    "WeakStorage",
    "allocated",
    "allocator",
    "apply",
    "as_computed",
    "at_end_of_backward",
    "autocast_state",
    "autograd_sequence",
    "backward_pass",
    "base_of",
    "bytes_of",
    "call_forward",
    "capturable_on_cpu",
    "captured_draw",
    "clear_workspaces",
    "copy_each",
    "current_graph_lookup",
    "current_raw_stream",
    "current_stream",
    "current_stream_source",
    "demangled",
    "empty_cache",
    "end_draws",
    "end_routing",
    "enter_mode",
    "evaluating_node",
    "explain_refusals",
    "follow_modules",
    "follower_keys",
    "form_of",
    "forward_ad",
    "fresh_functions",
    "generator_among",
    "has_gpu",
    "hooks_aside",
    "hooks_of",
    "hooks_of_leaf",
    "hooks_of_users",
    "in_class",
    "is_any_autocast_enabled",
    "is_autograds_thread",
    "is_capturing",
    "is_compiled_code",
    "is_followed",
    "is_named_tuple",
    "is_quiet",
    "is_record",
    "is_routed",
    "is_same",
    "is_spent",
    "is_torch_graph",
    "is_traced_by_fx",
    "keep_from_tracing",
    "keeps_history",
    "keeps_state_of_captures",
    "knows_its_weights",
    "layout_of",
    "lazy_view",
    "leaf_names",
    "leave_mode",
    "living",
    "memories_of",
    "memory_of",
    "mode_addresses",
    "mode_count",
    "mode_functions",
    "modes_aside",
    "modes_inside_out",
    "names_in",
    "new_pool_handle",
    "note_weights",
    "on_stream",
    "outlive",
    "overlaps_itself",
    "place_of",
    "pool_segments",
    "quiet",
    "random_devices",
    "record_of",
    "release_outliving",
    "require_cuda",
    "sequence_of",
    "share_tracing_rules",
    "signature",
    "span_of",
    "steps_noted",
    "storage_id",
    "take_mode_away",
    "takes_allocators",
    "tensor_reader",
    "tree_flatten",
    "tree_iter",
    "tree_map",
    "tree_unflatten",
    "tree_with_records",
    "wait_between",
    "wants_gc",
    "watch_captures",
    "watch_pools",
    "watch_routing",
    "without_autocast",
    "without_autocast_cache",
    "without_functions",
    "without_gradients",
    "without_modes",
    "wrapped",
    "zero_each",
]

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
        TorchError: torch lacks a name that cgraph uses.
    """
    if not hasattr(torch._C, "_CudaStreamBase"):
        raise NoDriverError(
            "install a CUDA build of torch 2.8 or newer, or choose the simulator by name"
            f" (CGRAPH_DRIVER=sim, cgraph.sim.use()). Why: torch {torch.__version__} is built"
            " without CUDA"
        )
    missing = [name for name in _NEEDED if not hasattr(torch._C, name)]
    if missing:
        raise TorchError(
            f"torch {torch.__version__} has no torch._C.{missing[0]}, which cgraph needs: use a"
            " torch that this cgraph supports (2.8 to 2.15)"
        )
