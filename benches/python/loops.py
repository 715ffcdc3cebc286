"""P16: a loop of decode steps in one launch, beside torch's replays, one a step.

Wall time and the host's CPU time of a step, for a small step that samples and for a model of 16
layers; replays that nobody looks at, replays whose token the host reads, and the same for a loop.
Then the time until the first token is on the host.

    python benches/python/loops.py [--results folder]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from decode import Decode
from torch import Tensor, nn

import cgraph
from common import parsed, publish

ROUNDS = 7
STEPS = {"a small step": 1008, "16 layers": 200}


class Small(nn.Module):
    """A step of some ten kernels, which samples."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.score = nn.Embedding(1000, 256), nn.Linear(512, 1000)
        self.hidden = nn.Linear(256, 512)

    def forward(self, token: Tensor, place: Tensor) -> None:
        """Draw the next tokens in place: int64 [batch], int64 [1]."""
        x = nn.functional.dropout(self.hidden(self.words(token)).relu(), 0.1, True)
        chances = torch.softmax(self.score(x).float(), -1)
        token.copy_((chances / torch.empty_like(chances).exponential_()).argmax(-1))
        place.add_(1)


class Large(nn.Module):
    """A step of 16 layers, which chooses the best token."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Decode(most=8)

    def forward(self, token: Tensor, place: Tensor) -> None:
        """Choose the next tokens in place: int64 [batch], int64 [1]."""
        token.copy_(self.model(token, place).argmax(-1))
        place.add_(1)


def measured(
    ways: Sequence[Callable[[], object]], place: Tensor, steps: int
) -> list[tuple[float, float]]:
    """Return the medians of wall time and CPU time of a step in µs, for ways that take turns."""
    rounds: list[list[tuple[float, float]]] = [[] for _ in ways]
    for _ in range(ROUNDS):
        for times, way in zip(rounds, ways, strict=True):
            place.zero_()
            torch.cuda.synchronize()
            wall, cpu = time.perf_counter(), time.process_time()
            way()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            times.append((wall / steps * 1e6, cpu / steps * 1e6))
    # The first one captures.
    return [tuple(map(statistics.median, zip(*one[1:], strict=True))) for one in rounds]  # type: ignore[misc]


def row_of(name: str, step: nn.Module) -> tuple[list[list[str]], list[str]]:
    """Return the rows of a step, and its first token's."""
    steps = STEPS[name]
    token = torch.zeros(4, dtype=torch.long, device="cuda")
    place = torch.zeros(1, dtype=torch.long, device="cuda")
    for _ in range(3):
        step(token, place)
    place.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(token, place)
    ended = torch.cuda.Event(blocking=True)
    looped: list[Any] = [
        cgraph.loop(max_steps=steps, emit="token", unroll=unroll)(step.forward)
        for unroll in (1, 4, 16 if name == "a small step" else 8)
    ]
    first: list[list[float]] = [[], []]

    def replays() -> None:
        for _ in range(steps):
            graph.replay()
        ended.record()
        ended.synchronize()

    def replays_read() -> None:
        begin = time.perf_counter()
        for number in range(steps):
            graph.replay()
            token.cpu()
            if number == 0:
                first[0].append((time.perf_counter() - begin) * 1e6)

    def loop_read() -> None:
        begin = time.perf_counter()
        for number, _ in enumerate(looped[1](token, place)):
            if number == 0:
                first[1].append((time.perf_counter() - begin) * 1e6)

    ways = [
        replays,
        replays_read,
        *(lambda one=one: one(token, place).result() for one in looped),  # type: ignore[misc]
        loop_read,
    ]
    names = [
        "torch: replays",
        "torch: replays, each token read",
        *(f"a loop, {one.report().unroll} steps an iteration" for one in looped),
        "a loop, 4 steps an iteration, each token read",
    ]
    found = measured(ways, place, steps)
    assert all(one.report().how == "launch" for one in looped)
    whole = found[0][0]
    rows = [
        [f"{name}: {way}", f"{wall:.1f}", f"{wall / whole:.3f}", f"{cpu:.2f}"]
        for way, (wall, cpu) in zip(names, found, strict=True)
    ]
    return rows, [name, *(f"{statistics.median(one[1:]):.0f}" for one in first)]


def main() -> None:
    options = parsed(__doc__)
    rows, first = [], []
    with torch.no_grad():
        for name, step in (
            ("a small step", Small().cuda()),
            ("16 layers", Large().cuda().bfloat16().eval()),
        ):
            more, one = row_of(name, step)
            rows += more
            first.append(one)
    head = ["way", "wall µs a step", "of replays", "CPU µs a step"]
    publish("P16", "a loop of decode steps", head, rows, options.results)
    head = ["step", "torch: replay and read µs", "a loop: from the call µs"]
    publish("P16", "the first token on the host", head, first, options.results)


if __name__ == "__main__":
    main()
