"""Graphs whose replays copy their results to new tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import cgraph
from cgraph import _core, _driver, _torch
from cgraph._captures.capture_options import CaptureOptions
from cgraph._captures.fresh_results import Results
from cgraph._captures.last_stream import last_stream

__all__ = ["capture", "entry", "results_of"]


def capture(
    fn: Callable[..., Sequence[Tensor]], *statics: Tensor, **options: Any
) -> tuple[cgraph.CUDAGraph, list[Tensor]]:
    """Return a graph of a function, and its results there."""
    graph = cgraph.CUDAGraph(**options)
    graph._options = CaptureOptions(statics=statics)
    with cgraph.graph(graph):
        results = list(fn(*statics))
        assert graph._capture is not None
        graph._capture.results = results
    return graph, results


def results_of(graph: cgraph.CUDAGraph) -> Results:
    """Return a graph's data about its results."""
    assert graph._captured is not None
    results = graph._captured.results
    assert results is not None
    return results


def entry(
    graph: Any, statics: Sequence[Tensor], leaves: list[tuple[Any, ...]], build: Any = "tuple"
) -> _core.Entry:
    """Return an entry that returns these leaves."""
    signatures = [_torch.signature(one) for one in statics]
    return _core.Entry(
        [("tensor", signature, False, None, torch.Tensor) for signature in signatures],
        [],
        is_in_order=False,
        modes=(True, False, None),
        work=graph,
        outputs=(leaves, build, None),
        last_stream=last_stream(_driver.current()),
        lock=None,
    )
