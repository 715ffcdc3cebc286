"""Operators that a capture refuses, recognised before they run."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch

from cgraph._operators.schemas import name_of, tensors_of
from cgraph.causes import Cause

__all__ = ["REFUSED", "cause_against", "may_be_refused", "refused_copy"]

REFUSED = {
    **dict.fromkeys(("item", "_local_scalar_dense", "is_nonzero"), Cause.HOST_READ),
    **dict.fromkeys(("equal", "allclose", "_linalg_check_errors"), Cause.HOST_READ),
    **dict.fromkeys(("nonzero", "argwhere", "masked_select", "bincount"), Cause.SHAPE),
    **dict.fromkeys(("unique", "_unique2", "unique_dim", "unique_consecutive"), Cause.SHAPE),
    **dict.fromkeys(("unique_dim_consecutive", "repeat_interleave"), Cause.SHAPE),
    **dict.fromkeys(("_to_sparse", "_to_sparse_csr", "_to_sparse_csc"), Cause.SHAPE),
    **dict.fromkeys(("_to_sparse_bsr", "_to_sparse_bsc", "to_sparse"), Cause.SHAPE),
    **dict.fromkeys(("cond", "while_loop"), Cause.BRANCH),
}
"""The causes by the names of operators that a capture refuses; index is refused only at times."""

_INDEXED_WRITES = ("index_put_", "index_put", "_index_put_impl_", "_unsafe_index_put")
_COPIES = ("_to_copy", "copy_", "copy")
_OPTIMIZERS = os.path.join(os.path.dirname(torch.optim.__file__), "")


def may_be_refused(func: Any) -> bool:
    """Return whether :func:`cause_against` names a cause for some calls of an operator."""
    name = name_of(func).rpartition(".")[2]
    is_known = name in REFUSED or name in (*_COPIES, "index", *_INDEXED_WRITES, "normal")
    return is_known or torch.Tag.dynamic_output_shape in getattr(func, "tags", ())


def cause_against(func: Any, args: Any, kwargs: dict[str, Any], device_type: str) -> Cause | None:
    """Return the cause of an operator that a capture on such a device refuses; None for others."""
    cause = _cause_of(func, args, kwargs, device_type)
    return Cause.OPTIMIZER if cause is Cause.HOST_READ and _is_count_of_steps() else cause


def _cause_of(func: Any, args: Any, kwargs: dict[str, Any], device_type: str) -> Cause | None:
    name = name_of(func).rpartition(".")[2]
    if name in _COPIES:
        return refused_copy(name, args, kwargs, device_type)
    if name in ("index", *_INDEXED_WRITES):
        return _refused_index(name, args, kwargs, device_type)
    known = REFUSED.get(name)
    if name == "normal" and device_type == "cuda" and any(True for _ in tensors_of((args, kwargs))):
        # It checks that all standard deviations are positive.
        known = Cause.HOST_READ
    if known is None and torch.Tag.dynamic_output_shape not in getattr(func, "tags", ()):
        return None
    if name == "repeat_interleave" and kwargs.get("output_size") is not None:
        return None
    if not any(one.device.type == device_type for one in tensors_of((args, kwargs))):
        return None
    return known or Cause.SHAPE


def refused_copy(name: str, args: Any, kwargs: dict[str, Any], device_type: str) -> Cause | None:
    """Return the cause against a copy; None on the simulator, whose device is the host."""
    if device_type == "cpu" or not isinstance(args[0], torch.Tensor):
        return None
    if name == "_to_copy":
        source, target = args[0], kwargs.get("device") or args[0].device
        non_blocking = kwargs.get("non_blocking", False)
    else:
        source, target = args[1], args[0].device
        non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
    pair = source.device.type, torch.device(target).type
    if pair == ("cpu", device_type):
        return None if non_blocking and source.is_pinned() else Cause.HOST_COPY
    if pair == (device_type, "cpu"):
        # torch takes pinned memory for a new tensor if nothing waits for it.
        pinned = name == "_to_copy" or args[0].is_pinned()
        return None if non_blocking and pinned else Cause.HOST_READ
    return None


def _refused_index(name: str, args: Any, kwargs: dict[str, Any], device_type: str) -> Cause | None:
    indices: Sequence[torch.Tensor] = [one for one in args[1] if one is not None]
    if not any(one.device.type == device_type for one in (args[0], *indices)):
        return None
    masks = [one for one in indices if one.dtype in (torch.bool, torch.uint8)]
    if not masks:
        is_moved = device_type != "cpu" and any(one.device.type == "cpu" for one in indices)
        return Cause.HOST_COPY if is_moved else None
    if name == "index":
        return Cause.SHAPE
    value, accumulates = args[2], kwargs.get("accumulate", args[3] if len(args) > 3 else False)
    # torch fills where one mask says so, with one number of the host.
    is_number = value.numel() == 1 and value.device.type == "cpu"
    return None if len(indices) == 1 and is_number and not accumulates else Cause.SHAPE


def _is_count_of_steps() -> bool:
    """Return whether an optimizer of torch's that counts its steps on the host is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(_OPTIMIZERS):
            if frame.f_locals.get("capturable") is False:
                return True
        frame = frame.f_back
    return False
