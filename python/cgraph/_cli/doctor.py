"""Checks of all that captures depend on: what is here, and what is known to go wrong."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Literal

import torch

import cgraph
from cgraph import _core, _torch
from cgraph.errors import CgraphError, TorchError

__all__ = ["Check", "checks"]

State = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Check:
    """One line of the doctor's.

    Attributes:
        name: What was looked at.
        state: ``"ok"``; ``"warning"``, if something may go wrong; ``"error"``, if nothing can be
            captured here.
        found: What was found.
        fix: What helps.
    """

    name: str
    state: State
    found: str
    fix: str = ""


def checks() -> list[Check]:
    """Look at all that captures depend on; nothing is changed."""
    device = [*_device()]
    chosen = _chosen(is_usable=device[0].state == "ok")
    found = [_cgraph(), _python(), _torch_names(), *device, chosen, _allocator()]
    return [*found, *_nccl(), *_plugins(), _backends()]


def _cgraph() -> Check:
    return Check("cgraph", "ok", f"{cgraph.__version__}, {Path(cgraph.__file__).parent}")


def _python() -> Check:
    return Check("Python", "ok", platform.python_version())


def _torch_names() -> Check:
    """Return whether torch has every name that cgraph uses."""
    version = str(torch.__version__)
    if torch.version.cuda is None:
        fix = "install a torch that is built for CUDA; the simulator needs none"
        return Check("torch", "warning", f"{version}, built without CUDA", fix)
    try:
        _torch.require_cuda()
    except TorchError as error:
        cause, fix = _parts(error)
        return Check("torch", "error", f"{version}: {cause}", fix)
    return Check("torch", "ok", f"{version}, built for CUDA {torch.version.cuda}")


_OLDEST_DRIVER = 12040
# By the version of NVIDIA's kernel module.
_BUGS = {
    "590.48.01": (
        "an update of an exec silently keeps the cluster size that a kernel had before",
        "instantiate anew instead of an update (cg-core), or install 595 or newer",
    ),
}


def _device() -> Iterator[Check]:
    try:
        driver = _driver_version()
    except CgraphError as error:
        state: State = "warning" if os.environ.get("CGRAPH_DRIVER") == "sim" else "error"
        yield Check("CUDA driver", state, *_parts(error))
        return
    text = f"CUDA {driver // 1000}.{driver % 1000 // 10}"
    is_old = driver < _OLDEST_DRIVER
    yield Check(
        "CUDA driver",
        "error" if is_old else "ok",
        text,
        "install NVIDIA's driver 550 (CUDA 12.4) or newer" if is_old else "",
    )
    module = _kernel_module()
    if module in _BUGS:
        yield Check(f"driver {module}", "warning", *_BUGS[module])
    for ordinal in range(torch.cuda.device_count()):
        one = torch.cuda.get_device_properties(ordinal)
        memory = f"{one.total_memory / 2**30:.0f} GiB"
        yield Check(f"cuda:{ordinal}", "ok", f"{one.name}, {memory}, sm_{one.major}{one.minor}")


def _parts(error: CgraphError) -> tuple[str, str]:
    """Return the cause and the fix that an error has."""
    cause, _, fix = str(error).partition(". Fix: ")
    return cause, fix


def _driver_version() -> int:
    return _core.Device.cuda(0).driver_version


def _kernel_module() -> str:
    """Return the version of NVIDIA's kernel module; nothing if it does not say one."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", text)
    return found[0] if found else ""


def _chosen(*, is_usable: bool) -> Check:
    name = os.environ.get("CGRAPH_DRIVER")
    if name not in (None, "cuda", "sim"):
        return Check("captures on", "error", f"CGRAPH_DRIVER={name}", "set it to cuda or sim")
    said = "cuda, as CGRAPH_DRIVER is not set" if name is None else f"{name} (CGRAPH_DRIVER)"
    if name == "sim" or is_usable:
        return Check("captures on", "ok", said)
    fix = "to work without a GPU, set CGRAPH_DRIVER=sim"
    return Check("captures on", "error", f"{said}; no driver can be used", fix)


def _allocator() -> Check:
    variables = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    said = ", ".join(f"{one}={os.environ[one]}" for one in variables if os.environ.get(one))
    if "cudaMallocAsync" in said:
        fix = "take backend:cudaMallocAsync out: torch has no pools for graphs there"
        return Check("allocator", "error", said, fix)
    return Check("allocator", "ok", said or "torch's defaults")


def _nccl() -> Iterator[Check]:
    """Say whether NCCL keeps addresses of buffers in graphs, which a pause of a pool takes away."""
    if not torch.distributed.is_available() or torch.version.cuda is None:
        return
    if os.environ.get("NCCL_GRAPH_REGISTER") == "0":
        yield Check("NCCL", "ok", "no registration of buffers in graphs (NCCL_GRAPH_REGISTER=0)")
    else:
        fix = "to pause a pool whose graphs have collectives, set NCCL_GRAPH_REGISTER=0"
        yield Check("NCCL", "ok", "may register buffers in graphs, its default", fix)


_ENGINES = (("vllm", "CGRAPH_VLLM"), ("sglang", "CGRAPH_SGLANG"))


def _plugins() -> Iterator[Check]:
    for engine, switch in _ENGINES:
        is_on = os.environ.get(switch) == "1"
        try:
            installed = metadata.version(engine)
        except metadata.PackageNotFoundError:
            if is_on:
                yield Check(engine, "warning", f"{switch}=1, and {engine} is not installed")
            continue
        mirrored = import_module(f"cgraph.integrations.{engine}").MIRRORS
        if not is_on:
            fix = f"set {switch}=1 in its environment to let its graphs be cgraph's"
            yield Check(engine, "ok", f"{installed}, on torch's graphs", fix)
        elif installed not in mirrored:
            fix = "look at its log: what is elsewhere than there stays the engine's own"
            yield Check(engine, "warning", f"{installed}; known here is {mirrored}", fix)
        else:
            yield Check(engine, "ok", f"{installed}, on cgraph ({switch}=1)")


def _backends() -> Check:
    entries = {one.name for one in metadata.entry_points(group="torch_dynamo_backends")}
    missing = sorted({"cgraph", "cgraph_aot"}.difference(entries))
    if missing:
        fix = "install the package, as by pip install: a folder on the path has no entry points"
        return Check("torch.compile", "warning", f"no backend {' and '.join(missing)}", fix)
    return Check("torch.compile", "ok", 'backend="cgraph" and backend="cgraph_aot" are there')
