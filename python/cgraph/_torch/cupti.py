"""CUPTI, the library of CUDA that tells which images of kernels are loaded."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import torch

from cgraph.errors import TorchError

__all__ = ["cupti_library"]


def cupti_library() -> str:
    """Return a name or path by which torch's CUPTI can be opened.

    Raises:
        TorchError: There is none.
    """
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
