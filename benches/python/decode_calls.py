"""P10 and P13: calls of a decode model of 133 modules and 149 tensors, and the cost of its capture.

P10: host time of a call that is a replay, with static and with fresh results, beside torch's replay
of the same work and a native loop over the driver's launch.

P13: milliseconds of the calls that observe, capture and replay, beside eager calls and torch's
capture with its first replay. Both are also measured within a Python dispatch mode that only passes
operators on: comparing the operators of two calls needs an observer.

    python benches/python/decode_calls.py [--results folder]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from decode import Decode
from torch.utils._python_dispatch import TorchDispatchMode

import cgraph
from common import CALLS, host_us, native_us, parsed, publish

TIMES = 7


class Handing(TorchDispatchMode):
    """A mode that passes each operator on."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run it."""
        return func(*args, **(kwargs or {}))


def milliseconds(call: Callable[[], object]) -> float:
    """Return milliseconds from an idle device to an idle device."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    options = parsed(__doc__)
    with torch.no_grad():
        model = Decode(most=8).cuda().bfloat16().eval()
        token, place = (torch.zeros(1, dtype=torch.long, device="cuda") for _ in range(2))
        for _ in range(3):
            expected = model(token, place)

        def eager(mode: Callable[[], AbstractContextManager[Any]]) -> None:
            with mode():
                model(token, place)

        def captured(mode: Callable[[], AbstractContextManager[Any]]) -> None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph), mode():
                model(token, place)
            graph.replay()

        calls: list[list[float]] = []
        for _ in range(TIMES):
            graphed = cgraph.graphed(model)
            calls.append([milliseconds(partial(graphed, token, place)) for _ in range(4)])
            assert graphed.report().captured == 1, graphed.report()
        columns = {
            "eager ms": [milliseconds(lambda: eager(nullcontext)) for _ in range(TIMES)],
            "in a mode": [milliseconds(lambda: eager(Handing)) for _ in range(TIMES)],
            "torch's capture": [milliseconds(lambda: captured(nullcontext)) for _ in range(TIMES)],
            "its, in a mode": [milliseconds(lambda: captured(Handing)) for _ in range(TIMES)],
            "cgraph: observed": [times[0] for times in calls],
            "captured": [times[1] for times in calls],
            "replayed": [times[3] for times in calls],
        }
        row = [f"{statistics.median(times):.1f}" for times in columns.values()]
        publish("P13", "the first calls of a decode model", [*columns], [row], options.results)

        theirs, same = torch.cuda.CUDAGraph(), cgraph.CUDAGraph()
        with torch.cuda.graph(theirs):
            model(token, place)
        with cgraph.graph(same):
            model(token, place)
        static = cgraph.graphed(model, outputs="static")
        for _ in range(3):
            assert torch.allclose(static(token, place), expected, rtol=0.05, atol=0.05)
        in_turn = [
            theirs.replay,
            lambda: static(token, place),
            lambda: graphed(token, place),
        ]
        figures = [*host_us(in_turn, CALLS), native_us(options.library, same, CALLS)]
        head = ["torch: replay µs", "cgraph: static µs", "cgraph: fresh µs", "native loop µs"]
        row = [f"{figure:.2f}" for figure in figures]
        publish("P10", "a call of a decode model", head, [row], options.results)


if __name__ == "__main__":
    main()
