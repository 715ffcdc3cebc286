"""The time that each node of a graph takes, as torch's profiler sees a replay."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from cgraph import _torch

__all__ = ["add_times", "profiled"]


def add_times(nodes: Sequence[dict[str, Any]], events: Iterable[Mapping[str, Any]]) -> None:
    """Give nodes their ``seconds``.

    A profiler does not know nodes: it has kernels, copies and fills in the order in which they
    began. Those of the same name, launch and size are taken in that order, so that equal ones on
    two branches may be exchanged. A node has no time if its like ran another number of times, as
    in the body of a condition.

    Args:
        nodes: The nodes of a template's JSON.
        events: The events of one replay, as :func:`profiled` returns them.
    """
    ran = defaultdict[Hashable, list[float]](list)
    for event in sorted(events, key=lambda one: one["ts"]):
        ran[_of_event(event)].append(event["dur"] * 1e-6)
    alike = defaultdict[Hashable, list[dict[str, Any]]](list)
    for node in nodes:
        alike[_of_node(node)].append(node)
    for identity, some in alike.items():
        if len(some) == len(ran[identity]):
            for node, seconds in zip(some, ran[identity], strict=True):
                node["seconds"] = seconds


def profiled(replay: Callable[[], object]) -> list[dict[str, Any]]:
    """Return the kernels, copies and fills of one replay, in torch's trace format.

    Args:
        replay: Replays the graph; it is called twice, as a first replay may take longer.
    """
    replay()
    torch.cuda.synchronize()
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        # It says that one more cycle would drop the events of this one.
        warnings.simplefilter("ignore", UserWarning)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            replay()
            torch.cuda.synchronize()
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_bytes())["traceEvents"]
    return [one for one in events if one.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]


def _of_event(event: Mapping[str, Any]) -> Hashable:
    about = event["args"]
    if event["cat"] == "kernel":
        return _name(event["name"]), tuple(about["grid"]), tuple(about["block"])
    return event["cat"].removeprefix("gpu_"), about["bytes"]


def _of_node(node: Mapping[str, Any]) -> Hashable:
    if node["kind"] == "kernel":
        grid, block = node["grid"], node["block"]
        sizes = (tuple(one[axis] for axis in "xyz") for one in (grid, block))
        return _name(_torch.demangled(node["name"])), *sizes
    return node["kind"], node.get("bytes")


def _name(name: str) -> str:
    """Return a demangled name without what demanglers write in several ways."""
    return name.replace(" ", "")
