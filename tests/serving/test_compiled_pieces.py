"""Pieces compiled by Inductor, on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import served
from cgraph._piecewise.compile_cache import CompileCache
from cgraph._piecewise.counters import Counters
from cgraph._piecewise.pieces import Compiler, program_of
from cgraph.piecewise import PiecewiseConfig, mark_size, split_graph


@pytest.mark.timeout(300)
# Inductor's own, about its modules.
@pytest.mark.filterwarnings("ignore")
def test_pieces_are_compiled_for_any_size_and_once_more_for_single_ones(sim: Any) -> None:
    config = PiecewiseConfig(inductor_options={"max_autotune": False})  # type: ignore[arg-type]
    counters, runs, codes = Counters(), {}, []

    def body(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.relu(x @ weight)
        first, total = torch.ops.served.mixed(y)
        return (first * 2 + y).cos(), total + 1

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        compiler = Compiler(config, counters, CompileCache(None, ""), compiles=True)
        whole, items = split_graph(graph, ["served::mixed"])
        codes.extend((item.graph, item.graph.code) for item in items)
        parts = [compiler.part(item) for item in items]
        runs["any"] = program_of(whole, {one.item.submod_name: one.run for one in parts})
        sized = {
            one.item.submod_name: one.run if one.item.is_splitting_graph else compiler.sized(one, 4)
            for one in parts
        }
        runs["four"], runs["parts"] = program_of(whole, sized), parts
        return lambda *args: runs["used"](*args)

    fast = torch.compile(body, backend=backend)
    weight = torch.randn(8, 8)
    with torch.no_grad():
        for name, sizes in (("any", (8, 1, 2, 5)), ("four", (4, 4)), ("any", (4, 3))):
            for size in sizes:
                runs["used"] = lambda *args, name=name: runs[name](*args)
                x = torch.randn(size, 8)
                if not codes:
                    mark_size(x)
                for one, other in zip(fast(x, weight), body(x, weight), strict=True):
                    assert torch.allclose(one, other, atol=1e-5)
    # Two pieces, for any size and for one.
    assert counters.inductor_compilations == 4
    assert [sorted(one.sizes) for one in runs["parts"]] == [[4], [], [4]]
    # Inductor changes a copy.
    assert all(graph.code == code for graph, code in codes)


def test_pieces_that_compute_the_same_are_compiled_once(sim: Any) -> None:
    model = served.Decoder(layers=4)
    counters, seen = Counters(), []

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        cache = CompileCache(None, "")
        compiler = Compiler(PiecewiseConfig(), counters, cache, compiles=True)
        whole, items = split_graph(graph, served.OPS)
        parts = [compiler.part(item) for item in items]
        seen.extend(parts)
        return program_of(whole, {one.item.submod_name: one.run for one in parts})

    fast = torch.compile(model, backend=backend)
    with torch.no_grad():
        for size in (8, 3, 1):
            x = torch.randn(size, 16)
            if not seen:
                mark_size(x)
            assert torch.allclose(fast(x), model(x), atol=1e-5)
    # The first piece, those between two attentions, and the last.
    assert counters.inductor_compilations == 3
    assert len(seen) == 9
