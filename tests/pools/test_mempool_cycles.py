"""Random cycles of everything that a `MemPool` can be put through."""

from __future__ import annotations

import os
import random

import pytest
from torch import Tensor

import cgraph
from bits import same
from cgraph import MemPool
from cgraph.errors import StateError
from lab import Lab, fresh
from pools import capture, check, fail, handles


class Cycles:
    """Random captures, failures, pauses and deaths, with a check of every replay."""

    def __init__(self, lab: Lab, chance: random.Random) -> None:
        self.lab, self.chance = lab, chance
        self.x = fresh(lab, 1 << 10)
        self.pools: list[MemPool] = []
        self.made: list[tuple[MemPool, cgraph.CUDAGraph, Tensor, int]] = []
        self.kept: dict[cgraph.CUDAGraph, Tensor] = {}

    def pool(self, paused: bool) -> MemPool | None:
        fitting = [pool for pool in self.pools if pool.is_paused == paused]
        return self.chance.choice(fitting) if fitting else None

    def capture(self, pool: MemPool | None) -> None:
        factor = self.chance.randint(2, 9)
        graph, y = capture(lambda: (self.x + 0) * factor, pool)
        pool = MemPool.of(graph)
        self.made.append((pool, graph, y, factor))
        if pool not in self.pools:
            self.pools.append(pool)

    def step(self) -> None:
        running, paused = self.pool(False), self.pool(True)
        kind = self.chance.choice(["new", "share", "fail", "pause", "resume", "end", "leave"])
        if kind == "new" and len(self.made) < 8:
            self.capture(self.chance.choice([None, MemPool(), cgraph.graph_pool_handle()]))
        elif kind == "share" and running and len(self.made) < 8:
            self.capture(running)
        elif kind == "fail":
            fail(self.x, running)
        elif kind == "pause" and running:
            self.pause(running, self.chance.choice(["discard", "host"]))
        elif kind == "resume" and paused:
            self.resume(paused)
        elif kind == "end" and self.made:
            _, graph, _, _ = self.made.pop(self.chance.randrange(len(self.made)))
            self.kept.pop(graph, None)
            graph.reset()
        elif kind == "leave" and self.pools:
            gone = self.pools.pop(self.chance.randrange(len(self.pools)))
            self.made = [one for one in self.made if one[0] is not gone]
            self.kept = {one[1]: self.kept[one[1]] for one in self.made if one[1] in self.kept}

    def pause(self, pool: MemPool, keep: str) -> None:
        copies = {graph: y.clone() for own, graph, y, _ in self.made if own is pool}
        pool.pause(keep)
        self.kept.update(copies if keep == "host" else {})

    def resume(self, pool: MemPool) -> None:
        pool.resume()
        for own, graph, y, _ in self.made:
            copy = self.kept.pop(graph, None) if own is pool else None
            assert copy is None or same(y, copy)

    def check(self) -> None:
        for pool, graph, y, factor in self.made:
            if pool.is_paused:
                with pytest.raises(StateError, match="paused"):
                    graph.replay()
            else:
                check(graph, self.x, y, factor)


def test_random_cycles_leave_right_outputs_at_each_step_and_nothing_at_the_end(lab: Lab) -> None:
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}")  # pytest shows it if the test fails
    before = handles()
    cycles = Cycles(lab, random.Random(seed))
    for _ in range(150):
        cycles.step()
        cycles.check()
    del cycles
    assert handles() == before
