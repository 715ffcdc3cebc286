"""CUPTI, the library of CUDA that tells which images of kernels are loaded."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import torch

from cgraph import _core
from cgraph._torch.allocator_use import watch_routes
from cgraph.errors import TorchError

__all__ = ["record_images", "records_images"]

_recorders: list[str] = []


def record_images() -> None:
    """Let the core keep what kernels are loaded from.

    Raises:
        TorchError: There is no CUPTI.
        CgraphError: It serves somebody else.
    """
    library = _library()
    _core.record_images(library)
    watch_routes()
    _recorders.append(library)


def records_images() -> bool:
    """Return whether :func:`record_images` was called."""
    return bool(_recorders)


def _library() -> str:
    """Return a name or path by which torch's CUPTI can be opened."""
    version = (torch.version.cuda or "13").split(".", maxsplit=1)[0]
    name = f"libcupti.so.{version}"
    # torch's profiler may have opened it; otherwise it is in a wheel beside torch's.
    folders = [f"nvidia/cu{version}/lib", "nvidia/cuda_cupti/lib"]
    paths = [Path(root, folder, name) for root in sys.path for folder in folders]
    for one in (name, *(str(path) for path in paths if path.exists())):
        try:
            ctypes.CDLL(one)
        except OSError:
            continue
        return one
    raise TorchError(
        f"{name} cannot be opened, which records the images of kernels: install CUDA's CUPTI"
        " (nvidia-cuda-cupti), or put its folder into LD_LIBRARY_PATH"
    )
