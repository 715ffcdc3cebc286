"""Operators that a capture refuses, recognised before they run."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch

from cgraph._operators.schemas import name_of, tensors_of

__all__ = ["REFUSED", "may_be_refused", "refusal_of", "refused_copy"]

REFUSED = {
    **dict.fromkeys(("item", "_local_scalar_dense", "is_nonzero"), "host read"),
    **dict.fromkeys(("equal", "allclose", "_linalg_check_errors"), "host read"),
    **dict.fromkeys(("nonzero", "argwhere", "masked_select", "bincount"), "shape"),
    **dict.fromkeys(("unique", "_unique2", "unique_dim", "unique_consecutive"), "shape"),
    **dict.fromkeys(("unique_dim_consecutive", "repeat_interleave"), "shape"),
    **dict.fromkeys(("_to_sparse", "_to_sparse_csr", "_to_sparse_csc"), "shape"),
    **dict.fromkeys(("_to_sparse_bsr", "_to_sparse_bsc", "to_sparse"), "shape"),
    **dict.fromkeys(("cond", "while_loop"), "branch"),
}
"""The kinds of operators that a capture refuses, by name; index is refused only at times."""

_INDEXED_WRITES = ("index_put_", "index_put", "_index_put_impl_", "_unsafe_index_put")
_COPIES = ("_to_copy", "copy_", "copy")
_OPTIMIZERS = os.path.join(os.path.dirname(torch.optim.__file__), "")


def may_be_refused(func: Any) -> bool:
    """Return whether :func:`refusal_of` names a kind for some calls of an operator."""
    name = name_of(func).rpartition(".")[2]
    is_known = name in REFUSED or name in (*_COPIES, "index", *_INDEXED_WRITES, "normal")
    return is_known or torch.Tag.dynamic_output_shape in getattr(func, "tags", ())


def refusal_of(func: Any, args: Any, kwargs: dict[str, Any], device_type: str) -> str | None:
    """Return the kind of an operator that a capture on such a device refuses; None for others.

    The kinds are those of ``cgraph.explain``: ``"host read"``, ``"optimizer"``, ``"host copy"``,
    ``"shape"`` and ``"branch"``.
    """
    kind = _kind_of(func, args, kwargs, device_type)
    return "optimizer" if kind == "host read" and _is_count_of_steps() else kind


def _kind_of(func: Any, args: Any, kwargs: dict[str, Any], device_type: str) -> str | None:
    name = name_of(func).rpartition(".")[2]
    if name in _COPIES:
        return refused_copy(name, args, kwargs, device_type)
    if name in ("index", *_INDEXED_WRITES):
        return _refused_index(name, args, kwargs, device_type)
    known = REFUSED.get(name)
    if name == "normal" and device_type == "cuda" and any(True for _ in tensors_of((args, kwargs))):
        # It checks that all standard deviations are positive.
        known = "host read"
    if known is None and torch.Tag.dynamic_output_shape not in getattr(func, "tags", ()):
        return None
    if name == "repeat_interleave" and kwargs.get("output_size") is not None:
        return None
    if not any(one.device.type == device_type for one in tensors_of((args, kwargs))):
        return None
    return known or "shape"


def refused_copy(name: str, args: Any, kwargs: dict[str, Any], device_type: str) -> str | None:
    """Return the kind of a refused copy; None on the simulator, whose device is the host."""
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
        return None if non_blocking and source.is_pinned() else "host copy"
    if pair == (device_type, "cpu"):
        # torch takes pinned memory for a new tensor if nothing waits for it.
        pinned = name == "_to_copy" or args[0].is_pinned()
        return None if non_blocking and pinned else "host read"
    return None


def _refused_index(name: str, args: Any, kwargs: dict[str, Any], device_type: str) -> str | None:
    indices: Sequence[torch.Tensor] = [one for one in args[1] if one is not None]
    if not any(one.device.type == device_type for one in (args[0], *indices)):
        return None
    masks = [one for one in indices if one.dtype in (torch.bool, torch.uint8)]
    if not masks:
        is_moved = device_type != "cpu" and any(one.device.type == "cpu" for one in indices)
        return "host copy" if is_moved else None
    if name == "index":
        return "shape"
    value, accumulates = args[2], kwargs.get("accumulate", args[3] if len(args) > 3 else False)
    # torch fills where one mask says so, with one number of the host.
    is_number = value.numel() == 1 and value.device.type == "cpu"
    return None if len(indices) == 1 and is_number and not accumulates else "shape"


def _is_count_of_steps() -> bool:
    """Return whether an optimizer of torch's that counts its steps on the host is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(_OPTIMIZERS):
            if frame.f_locals.get("capturable") is False:
                return True
        frame = frame.f_back
    return False
