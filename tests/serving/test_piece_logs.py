"""What a backend of pieces tells and takes."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass

import cgraph
from cgraph import _torch
from cgraph._piecewise.compile_cache import CompileCache, key_of
from cgraph._piecewise.counters import Counters
from cgraph._piecewise.pieces import Compiler
from cgraph._torch import form_of_graph
from cgraph.errors import ArgumentError, CaptureError, StateError
from cgraph.piecewise import PiecewiseBackend, PiecewiseConfig, mark_size, split_graph
from lab import Lab, fresh
from served import Decoder, Served, graph_of

pytestmark = [
    pytest.mark.usefixtures("own_compiler"),
    # Inductor's own, about its modules.
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning"),
]


def compile_piece(config: PiecewiseConfig, function: Callable[..., Any], *inputs: Tensor) -> Any:
    """Compile a graph as a backend on a GPU compiles its pieces; return its first part."""
    graph = graph_of(function, *inputs)
    cache = CompileCache.of(config, graph)
    compiler = Compiler(config, Counters(), cache, compiles=True)
    _, items = split_graph(graph, config.splitting_ops)
    part = compiler.part(items[0])
    return compiler, part


def test_the_log_says_what_was_compiled_loaded_and_where_it_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = PiecewiseConfig(cache_dir=str(tmp_path))
    x = torch.randn(4)
    with caplog.at_level(logging.DEBUG, "cgraph.piecewise"):
        compile_piece(config, lambda x: x.sin() * 2, x)
        first = list(caplog.messages)
        caplog.clear()
        compile_piece(config, lambda x: x.sin() * 2, x)
    assert any(f"compiled pieces are kept in {tmp_path}" in one for one in first)
    assert any("piece 0 for any size: compiled, " in one for one in first)
    assert "piece 0 for size any: stored" in first
    assert any("files of the key" in one and "test_piece_logs.py" in one for one in first)
    levels = {one.message.split(":")[0]: one.levelname for one in caplog.records}
    assert levels["piece 0 for any size"] == "INFO"


def test_the_log_says_why_pieces_are_not_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    graph = graph_of(torch.sin, torch.ones(4))
    with caplog.at_level(logging.INFO, "cgraph.piecewise"):
        CompileCache.of(PiecewiseConfig(cache=False), graph)
        monkeypatch.setenv("CGRAPH_DISABLE_COMPILE_CACHE", "1")
        CompileCache.of(PiecewiseConfig(), graph)
    assert [one.message for one in caplog.records if one.name == "cgraph.piecewise"] == [
        "compiled pieces are not kept, as cache is False",
        "compiled pieces are not kept, as CGRAPH_DISABLE_COMPILE_CACHE is set",
    ]


def test_the_log_has_the_seconds_of_dynamo_and_of_the_pieces(
    lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "cgraph.piecewise"):
        served = Served(lab, Decoder(), capture_sizes=[4])
        for _ in range(4):
            served.check(4)
    [line] = [one for one in caplog.messages if "of Dynamo" in one]
    assert line.startswith("7 pieces in 0.00 s, after ")
    assert line.endswith(" s of Dynamo")
    assert float(line.split("after ")[1].split()[0]) > 0
    assert "size 4 is captured: 4 pieces" in caplog.messages


def test_captured_pieces_are_counted_one_by_one(lab: Lab) -> None:
    served = Served(lab, Decoder(), capture_sizes=[2, 4])
    for size in (4, 2, 4, 2, 4, 2, 4, 2):
        served.check(size)
    counters = served.backend.counters
    # Four pieces around three attentions.
    assert (counters.captures, counters.piece_captures) == (2, 8)


def test_the_report_has_the_folder_of_the_cache_once_it_is_in_use(tmp_path: Path) -> None:
    backend = PiecewiseBackend(cache_dir=str(tmp_path))
    assert backend.cache_folder is None
    config, graph = backend.config, graph_of(torch.sin, torch.ones(4))
    backend.cache_folder = CompileCache.of(config, graph).folder
    report = backend.report()
    assert report.cache_folder == str(backend.cache_folder)
    assert str(tmp_path) in str(report)


def test_a_folder_of_the_cache_may_be_copied_to_another_place(tmp_path: Path) -> None:
    x = torch.randn(4)

    def body(x: Tensor) -> Tensor:
        return x.sin() * 2

    compile_piece(PiecewiseConfig(cache_dir=str(tmp_path / "here")), body, x)
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    shutil.rmtree(tmp_path / "here")
    compiler, part = compile_piece(PiecewiseConfig(cache_dir=str(tmp_path / "there")), body, x)
    assert compiler._counters.loaded == 1
    assert torch.allclose(part.run(x), body(x))


def test_the_graph_is_written_before_and_after_its_split(lab: Lab, tmp_path: Path) -> None:
    Served(lab, Decoder(), dump=str(tmp_path)).check(4)
    traced, split = (
        (tmp_path / f"{one}_graph.py").read_text() for one in ("traced", "computation")
    )
    assert "submod_0" in split
    assert "submod_0" not in traced
    for text in (traced, split):
        assert "served.attend" in text
        compile(text, "graph", "exec")


class Doubling(CustomGraphPass):
    """A pass that says how often it was called."""

    def __init__(self, name: str | None) -> None:
        self.name, self.calls = name, 0

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.calls += 1

    def uuid(self) -> Any:
        return self.name


def test_a_pass_is_part_of_the_key_by_its_uuid_and_is_called_for_each_piece(
    tmp_path: Path,
) -> None:
    def config_of(one: Any, **fields: Any) -> PiecewiseConfig:
        options = {"post_grad_custom_post_pass": one}
        return PiecewiseConfig(inductor_options=options, cache_dir=str(tmp_path), **fields)

    x = torch.randn(4)
    graph = graph_of(torch.sin, x)
    same = [key_of(config_of(Doubling("a")), graph) for _ in range(2)]
    assert same[0] == same[1] != key_of(config_of(Doubling("b")), graph)

    def body(x: Tensor) -> Tensor:
        return torch.ops.served.routed(x.sin() * 2).cos() + 1

    # Inductor has a cache of its own, by the same name.
    one = Doubling(str(tmp_path))
    config = config_of(one, splitting_ops=("served::routed",))
    graph = graph_of(body, x)
    compiler = Compiler(config, Counters(), CompileCache(None, ""), compiles=True)
    for item in split_graph(graph, config.splitting_ops)[1]:
        compiler.part(item)
    assert one.calls == 2


@pytest.mark.parametrize("given", [Doubling(None), lambda graph: None])
def test_a_pass_without_a_uuid_is_refused_where_pieces_are_kept(given: Any) -> None:
    options = {"post_grad_custom_post_pass": given}
    with pytest.raises(ArgumentError, match=r"post_grad_custom_post_pass is .*a uuid\(\).*cache=F"):
        PiecewiseConfig(inductor_options=options)
    assert PiecewiseConfig(inductor_options=options, cache=False).inductor_options


def test_the_key_has_the_options_of_inductor() -> None:
    graph = graph_of(torch.sin, torch.ones(4))
    keys = [
        key_of(PiecewiseConfig(inductor_options=options), graph)
        for options in ({}, {"max_autotune": True}, {"max_autotune": False})
    ]
    assert len(set(keys)) == 3


def test_a_size_is_compiled_once_in_its_first_call_with_options_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[Mapping[str, Any]] = []

    def compiled(
        graph: torch.fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, Any]
    ) -> Callable[..., Any]:
        given.append(options)
        return graph.forward

    monkeypatch.setattr(_torch, "compile_standalone", compiled)
    config = PiecewiseConfig(inductor_options={"max_autotune": False}, cache=False)
    x = torch.randn(4)
    compiler, part = compile_piece(config, lambda x: x.sin() * 2, x)
    assert given == [{"max_autotune": False}]
    run = compiler.sized(part, 4)
    assert len(given) == 1
    for _ in range(3):
        assert torch.equal(run(x), x.sin() * 2)
    assert given[1:] == [{"max_autotune": False, "coordinate_descent_tuning": True}]
    free, part = compile_piece(PiecewiseConfig(cache=False), lambda x: x.cos() * 2, x)
    free.sized(part, 4)(x)
    assert given[3] == {"max_autotune": True, "coordinate_descent_tuning": True}


def test_branches_of_torch_cond_belong_to_what_a_piece_computes() -> None:
    def of(one: Callable[..., Any], other: Callable[..., Any]) -> str | None:
        return form_of_graph(
            graph_of(lambda x: torch.cond(x.sum() > 0, one, other, (x,)), torch.ones(4))
        )

    form = of(torch.sin, torch.cos)
    assert form is not None
    assert form == of(torch.sin, torch.cos)
    assert form != of(torch.sin, torch.tan)


def test_the_key_has_the_constants_of_graphs_inside_of_the_graph() -> None:
    def of(scale: float) -> torch.fx.GraphModule:
        def inner(x: Tensor) -> Tensor:
            return x.sin() * scale

        return graph_of(lambda x: torch.cond(x.sum() > 0, inner, torch.cos, (x,)), torch.ones(4))

    config = PiecewiseConfig()
    assert key_of(config, of(2.0)) == key_of(config, of(2.0)) != key_of(config, of(3.0))


def test_all_sizes_read_their_input_where_that_of_the_largest_is(lab: Lab) -> None:
    addresses: list[int] = []

    @torch.library.custom_op("served::seen", mutates_args=())
    def seen(x: Tensor) -> Tensor:
        addresses.append(x.data_ptr())
        return x.clone()

    seen.register_fake(torch.empty_like)
    backend = PiecewiseBackend(
        splitting_ops=["served::seen"], capture_sizes=[2, 4, 8], compiler="eager"
    )
    fast = torch.compile(lambda x: torch.ops.served.seen(x) * 2, backend=backend)
    backend.warm_up(lambda size: fast(mark_size(fresh(lab, size, 4))), progress=False)
    addresses.clear()
    kept = []
    for size in (8, 4, 2, 8, 2):
        kept.append(fresh(lab, size, 4))
        assert torch.equal(fast(kept[-1]), kept[-1] * 2)
    assert len(set(addresses)) == 1
    assert addresses[0] not in [one.data_ptr() for one in kept]


def test_backends_that_are_given_one_pool_share_it(lab: Lab) -> None:
    pool = cgraph.MemPool()
    for _ in range(2):
        torch.compiler.reset()
        before = pool.stats()["in_use"]
        served = Served(lab, Decoder(), capture_sizes=[4], pool=pool)
        for _ in range(4):
            served.check(4)
        assert served.backend.counters.replays == 1
        graph = served.backend._ladder.graph(4)
        assert tuple(graph.pool()) == tuple(pool.id)
        if before:
            assert pool.stats()["mapped"] > 0
        del served, graph


def test_a_warm_up_that_freezes_refuses_the_capture_of_a_size_that_it_left_out(lab: Lab) -> None:
    served = Served(lab, Decoder(), capture_sizes=[2, 4])
    served.backend.warm_up(lambda size: served.check(4), progress=False, freeze=True)
    served.check(2)
    with pytest.raises((StateError, CaptureError), match="freeze"):
        served.check(2)
        served.check(2)
