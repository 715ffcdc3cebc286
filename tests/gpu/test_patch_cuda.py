"""`patch_torch` under code that does not know cgraph gives the results of torch's graphs."""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor_config
from torch.nn.functional import cross_entropy, mse_loss

import cgraph
from cgraph import _driver

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),  # the first compilation of a process
    pytest.mark.filterwarnings("ignore"),  # warnings of Inductor and others; see in_both()
]


@pytest.fixture(autouse=True)
def _exactly_repeatable() -> Iterator[None]:
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
        yield
    torch.compiler.reset()


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count captures and replays of cgraph."""
    counts: Counter[str] = Counter()
    with (
        cgraph.register_graph_capture_end_hook(lambda _: counts.update(["captures"])),
        cgraph.register_graph_replay_end_hook(lambda _: counts.update(["replays"])),
    ):
        yield counts


def in_both(run: Callable[[], list[torch.Tensor]], replays: int) -> list[torch.Tensor]:
    """Return the result of `run()`, which is the same with torch's graphs and with cgraph's."""
    results = []
    for patched in (False, True):
        torch.compiler.reset()
        torch.manual_seed(11)
        with (
            warnings.catch_warnings(record=True) as heard,
            cgraph.patch_torch() if patched else nullcontext(),
            counted() as counts,
        ):
            warnings.simplefilter("always")
            results.append([result.detach().clone() for result in run()])
        assert not [w for w in heard if "graph is empty" in str(w.message)]
        if patched:
            assert counts["captures"] > 0 and counts["replays"] >= replays, counts
        else:
            assert not counts
    theirs, ours = results
    assert len(theirs) == len(ours) > 0
    for expected, found in zip(theirs, ours, strict=True):
        assert torch.equal(expected, found)
    return ours


def mlp(dropout: float = 0.0) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(64, 128),
        torch.nn.GELU(),
        torch.nn.Dropout(dropout),
        torch.nn.Linear(128, 64),
    ).cuda()


@pytest.mark.parametrize("trees", [True, False])
def test_reduce_overhead_gives_eagers_results_for_each_shape(trees: bool) -> None:
    def run() -> list[torch.Tensor]:
        model, results = mlp(), []
        compiled = torch.compile(model, mode="reduce-overhead", dynamic=False)
        for n in (4, 16, 64) * 4:
            x = torch.randn(n, 64, device="cuda")
            torch.compiler.cudagraph_mark_step_begin()
            results.append(compiled(x).clone())
            torch.testing.assert_close(results[-1], model(x))
        return results

    options = {"triton.cudagraph_trees": trees, "triton.slow_path_cudagraph_asserts": True}
    with inductor_config.patch(options), torch.no_grad():
        in_both(run, replays=6)


def test_reduce_overhead_trains_as_unpatched_with_dropout() -> None:
    def run() -> list[torch.Tensor]:
        model = mlp(dropout=0.3)
        step = torch.compile(model, mode="reduce-overhead")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(8):
            x, target = torch.randn(2, 32, 64, device="cuda")
            loss = mse_loss(step(x), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach().clone())
        return [*losses, *model.parameters()]

    in_both(run, replays=8)


@pytest.mark.alone  # the compiler chooses among kernels by their times
def test_reduce_overhead_trains_as_eager_without_dropout() -> None:
    def run(mode: str | None) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = mlp()
        step = model if mode is None else torch.compile(model, mode=mode)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for _ in range(8):
            x, target = torch.randn(2, 32, 64, device="cuda")
            loss = mse_loss(step(x), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach().clone())
        return losses

    eager = run(None)
    for found, expected in zip(in_both(lambda: run("reduce-overhead"), 8), eager, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_recomputed_dropout_draws_the_same_numbers_as_unpatched() -> None:
    """Inductor gives the graphs generators of its own here."""
    from torch.utils.checkpoint import checkpoint

    def run() -> list[torch.Tensor]:
        model = mlp(dropout=0.5)
        step = torch.compile(
            lambda x: checkpoint(model, x, use_reentrant=False), mode="reduce-overhead"
        )
        results = []
        for _ in range(6):
            loss = step(torch.randn(16, 64, device="cuda")).square().mean()
            loss.backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            results += [tensor.detach().clone() for tensor in (loss, *gradients)]
            model.zero_grad(set_to_none=True)
        return results

    with inductor_config.patch({"fallback_random": True}):
        in_both(run, replays=6)


def test_outputs_that_live_on_keep_their_memory_when_a_tree_branches() -> None:
    def run() -> list[torch.Tensor]:
        options: dict[str, Any] = {"mode": "reduce-overhead", "dynamic": False}
        first = torch.compile(lambda x: (x @ x, x.sin()), **options)
        left = torch.compile(lambda a, b: (a @ b).relu(), **options)
        right = torch.compile(lambda a, b: a.cos() @ b + a, **options)
        results = []
        for then in (left, left, left, right, right, left, right, left):
            torch.compiler.cudagraph_mark_step_begin()
            x = torch.randn(64, 64, device="cuda")
            a, b = first(x)
            c = then(a, b)
            torch.testing.assert_close(a, x @ x)
            torch.testing.assert_close(b, x.sin())
            expected = (a @ b).relu() if then is left else a.cos() @ b + a
            torch.testing.assert_close(c, expected)
            results += [a.clone(), b.clone(), c.clone()]
        return results

    with inductor_config.patch({"triton.slow_path_cudagraph_asserts": True}), torch.no_grad():
        in_both(run, replays=8)


def test_the_backend_cudagraphs_gives_eagers_results() -> None:
    def run() -> list[torch.Tensor]:
        model, results = mlp(), []
        compiled = torch.compile(model, backend="cudagraphs")
        for _ in range(6):
            x = torch.randn(16, 64, device="cuda")
            torch.compiler.cudagraph_mark_step_begin()
            results.append(compiled(x).clone())
            torch.testing.assert_close(results[-1], model(x))
        return results

    with torch.no_grad():
        in_both(run, replays=4)


def test_tritons_benchmark_of_a_graph_measures_cgraphs() -> None:
    from triton.testing import do_bench_cudagraph

    x = torch.randn(1 << 20, device="cuda")
    with cgraph.patch_torch(), counted() as counts:
        assert do_bench_cudagraph(lambda: x.mul_(1.0), rep=2) > 0
    assert counts["captures"] > 0 and counts["replays"] > 0


def test_the_memory_of_inductors_trees_goes_with_them() -> None:
    def left() -> tuple[int, int]:
        # The resources of a graph stay while it is replayed, even after the graph is gone, until
        # the driver is asked; the same holds for those of earlier tests.
        torch.cuda.synchronize()
        torch.compiler.reset()
        gc.collect()
        _driver.current().settle()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    def run() -> None:
        compiled = torch.compile(lambda x: (x @ x).relu(), mode="reduce-overhead")
        for _ in range(4):
            compiled(torch.randn(512, 512, device="cuda"))

    run()
    before = left()
    with cgraph.patch_torch(), counted() as counts:
        run()
        assert counts["captures"] > 0
    assert left() == before


def test_a_manager_of_torchs_that_is_kept_beyond_its_end_keeps_no_memory() -> None:
    from torch._inductor import cudagraph_trees

    def body(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1

    def private_segments() -> int:
        gc.collect()
        torch.cuda.empty_cache()
        return sum(tuple(s["segment_pool_id"]) != (0, 0) for s in torch.cuda.memory_snapshot())

    torch.compiler.reset()
    before = private_segments()
    with cgraph.patch_torch():
        fast = torch.compile(body, mode="reduce-overhead")
        for _ in range(4):
            x = torch.randn(64, device="cuda")
            assert torch.allclose(fast(x), body(x))
        kept = cudagraph_trees.get_manager(0, create_if_none_exists=False)
        assert kept is not None
        assert private_segments() > before
        # What a graph in flight holds comes back later.
        torch.cuda.synchronize()
        cudagraph_trees.reset_cudagraph_trees()
        torch.compiler.reset()
        assert private_segments() == before
        del kept


def test_transformers_generates_the_same_tokens_with_static_cache_and_compiled_decode() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )

    def run() -> list[torch.Tensor]:
        model = transformers.LlamaForCausalLM(config).cuda().eval()
        return [
            model.generate(
                torch.randint(3, 512, (2, 9), device="cuda"),
                max_new_tokens=24,
                min_new_tokens=24,
                do_sample=False,
                pad_token_id=0,
                cache_implementation="static",
            )
            for _ in range(3)
        ]

    for tokens in in_both(run, replays=40):
        assert tokens.shape == (2, 33)


@pytest.mark.parametrize(
    ("name", "dtype"), [("resnet50", torch.bfloat16), ("resnet18", torch.float16)]
)
def test_timm_trains_the_same_through_make_graphed_callables_under_autocast(
    name: str, dtype: torch.dtype
) -> None:
    timm = pytest.importorskip("timm")

    def run() -> list[torch.Tensor]:
        model = timm.create_model(name, num_classes=10).cuda().train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        scaler = torch.amp.GradScaler("cuda", enabled=dtype is torch.float16)
        losses = []
        with torch.autocast("cuda", dtype, cache_enabled=False):
            sample = torch.randn(8, 3, 96, 96, device="cuda")
            model = torch.cuda.make_graphed_callables(model, (sample,))
        for _ in range(6):
            images = torch.randn(8, 3, 96, 96, device="cuda")
            labels = torch.randint(10, (8,), device="cuda")
            with torch.autocast("cuda", dtype, cache_enabled=False):
                loss = cross_entropy(model(images), labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach().clone())
        return [*losses, *model.parameters(), *model.buffers()]

    in_both(run, replays=12)


def test_torchs_own_graphs_and_pools_go_on_working_inside() -> None:
    theirs, before = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    x = torch.randn(64, device="cuda")
    own = torch.cuda.CUDAGraph()
    with torch.cuda.graph(own, pool=before):
        a = x + 1
    with cgraph.patch_torch(), counted() as counts:
        # A torch graph in a cgraph pool, and the other way round.
        pool = torch.cuda.graph_pool_handle()
        with torch.cuda.graph(theirs, pool=pool):
            assert torch.cuda.is_current_stream_capturing()
            b = x * 2
        assert not counts
        ours = torch.cuda.CUDAGraph()
        with torch.cuda.graph(ours, pool=before):
            c = x - 3
        assert counts == {"captures": 1}
        assert tuple(theirs.pool()) == tuple(pool)
        assert tuple(ours.pool()) == tuple(before) == tuple(own.pool())
        x.normal_()
        for graph, y, expected in ((own, a, x + 1), (theirs, b, x * 2), (ours, c, x - 3)):
            graph.replay()
            assert torch.equal(y, expected)
        with pytest.raises(ValueError, match="mine"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            raise ValueError("mine")


def test_after_undo_torchs_own_graphs_capture() -> None:
    original = {"CUDAGraph": torch.cuda.CUDAGraph, "graph": torch.cuda.graph}
    with cgraph.patch_torch():
        assert torch.cuda.CUDAGraph is not original["CUDAGraph"]
    assert torch.cuda.CUDAGraph is original["CUDAGraph"]
    assert torch.cuda.graph is original["graph"]
    x, graph = torch.randn(64, device="cuda"), torch.cuda.CUDAGraph()
    assert not isinstance(graph, cgraph.CUDAGraph)
    with counted() as counts, torch.cuda.graph(graph):
        y = x * 2
    x.normal_()
    graph.replay()
    assert torch.equal(y, x * 2)
    assert not counts
