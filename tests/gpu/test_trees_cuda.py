"""Graph trees on a GPU: beside torch's own, in parts, and what they leave."""

from __future__ import annotations

import copy
import gc
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _own_compiler() -> Iterator[None]:
    torch.compiler.reset()
    cgraph.trees.reset()
    yield
    torch.compiler.reset()
    cgraph.trees.reset()


def graphs() -> int:
    return sum(one.graphs for one in cgraph.trees.report().functions)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_reduce_overhead_beside_it_stays_torchs() -> None:
    from torch._inductor import cudagraph_trees

    model = nn.Linear(8, 8).cuda()
    ours = torch.compile(model, backend="cgraph")
    theirs = torch.compile(lambda x: torch.relu(x) * 2, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(5):
            torch.compiler.cudagraph_mark_step_begin()
            x = torch.randn(4, 8, device="cuda")
            assert torch.allclose(ours(x), model(x), atol=1e-4)
            assert torch.allclose(theirs(x), torch.relu(x) * 2)
    assert cudagraph_trees.get_manager(0, create_if_none_exists=False) is not None
    assert graphs() == 1


def test_parts_between_operators_of_the_cpu_are_captured_on_their_own() -> None:
    def body(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = (x @ y).relu()
        on_cpu = z.sum().cpu() + 1
        return z + on_cpu.cuda(), on_cpu

    fast = torch.compile(body, backend="cgraph")
    with torch.no_grad():
        for _ in range(5):
            x, y = torch.randn(16, 16, device="cuda"), torch.randn(16, 16, device="cuda")
            for got, want in zip(fast(x, y), body(x, y), strict=True):
                assert torch.allclose(got, want, rtol=1e-4, atol=1e-2)
    assert graphs() == 2


def test_1_3_a_tensor_without_contents_is_no_reason_to_skip() -> None:
    x = torch.randn(1, 16, 8, device="meta")

    def body(y: Tensor) -> Tensor:
        return y.sin() * torch.empty_like(x).shape[1]

    fast = torch.compile(body, backend="cgraph", options={"strict": True})
    with torch.no_grad():
        for _ in range(4):
            y = torch.randn(64, device="cuda")
            assert torch.allclose(fast(y), y.sin() * 16)
    assert graphs() == 1


def test_1_7_without_parts_an_operator_of_the_host_keeps_a_graph_from_being_captured() -> None:
    fast = torch.compile(
        lambda x: x.sin().cpu() + 1, backend="cgraph", options={"graph_partition": False}
    )
    x = torch.randn(8, device="cuda")
    with torch.no_grad(), pytest.warns(cgraph.errors.EagerWarning, match="cpu device"):
        assert torch.allclose(fast(x), x.sin().cpu() + 1)
    assert graphs() == 0


def test_a_collective_may_be_waited_for_outside_of_the_captured_call(tmp_path: Path) -> None:
    import torch.distributed as dist

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        group = dist.group.WORLD.group_name
        operators = torch.ops._c10d_functional
        fast = torch.compile(lambda x: operators.all_reduce(x * 2, "sum", group), backend="cgraph")
        with torch.no_grad():
            for _ in range(5):
                x = torch.randn(16, device="cuda")
                assert torch.allclose(operators.wait_tensor(fast(x)), x * 2)
    finally:
        torch.compiler.reset()
        dist.destroy_process_group()


def test_weights_and_gradients_of_a_compiled_model_and_optimizer_equal_eager() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4)).cuda()
    reference, fast = copy.deepcopy(model), torch.compile(model, backend="cgraph")
    optimizers = [torch.optim.Adam(m.parameters(), capturable=True) for m in (model, reference)]
    compiled = torch.compile(lambda: optimizers[0].step(), backend="cgraph")
    for _ in range(10):
        x = torch.randn(8, 16, device="cuda")
        for one in (fast, reference):
            one.zero_grad()
            one(x).square().mean().backward()
        compiled()
        optimizers[1].step()
        for got, want in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.allclose(got, want, atol=1e-4)


def private_pools() -> set[tuple[int, int]]:
    gc.collect()
    torch.cuda.empty_cache()
    return {tuple(one["segment_pool_id"]) for one in torch.cuda.memory_snapshot()} - {(0, 0)}


def test_a_mark_of_a_static_input_counts_although_a_cache_has_the_code_without_it() -> None:
    def layer(x: Tensor, cache: Tensor, at: Tensor) -> Tensor:
        cache.index_copy_(0, at, x)
        return torch.tanh(cache).sum(0)

    for is_marked in (False, True):
        torch.compiler.reset()
        cgraph.trees.reset()
        cache, reference = torch.zeros(8, 4, device="cuda"), torch.zeros(8, 4, device="cuda")
        if is_marked:
            torch._dynamo.mark_static_address(cache)
        fast = torch.compile(layer, backend="cgraph")
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", cgraph.errors.EagerWarning)
            for number in range(8):
                x, at = torch.randn(1, 4, device="cuda"), torch.tensor([number], device="cuda")
                got, want = fast(x, cache, at), layer(x, reference, at)
                assert torch.allclose(got, want, atol=1e-4)
        assert bool(graphs()) is is_marked


def test_after_a_reset_no_segment_of_a_tree_is_left() -> None:
    before = private_pools()
    model = nn.Linear(256, 256).cuda()
    fast = torch.compile(model, backend="cgraph")
    with torch.no_grad():
        for _ in range(4):
            fast(torch.randn(64, 256, device="cuda"))
    assert private_pools() > before
    torch.compiler.reset()
    assert private_pools() <= before
    # The end of a pool finds routing that was left on.
    cgraph.MemPool()


def test_a_pool_that_was_emptied_and_paused_between_recordings_still_replays_right() -> None:
    x = torch.randn(1 << 18, device="cuda")
    fast = [
        cgraph.trees.cudagraphify(lambda a, k=k: [a.pop().repeat(k).view(k, -1).sum(0)], [x])
        for k in range(1, 5)
    ]
    first = cgraph.trees.cudagraphify(lambda a: [a.pop() * 2], [x])
    for number in range(16):
        cgraph.trees.mark_step_begin()
        x = torch.randn(1 << 18, device="cuda")
        [y] = first([x])
        [z] = fast[number % 4]([y])
        assert torch.allclose(z, x * 2 * (number % 4 + 1), rtol=1e-4, atol=1e-4)
        del y, z
        torch.cuda.empty_cache()


def test_random_numbers_are_those_of_the_default_mode_after_the_same_seed() -> None:
    def noisy(x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5) + torch.rand_like(x)

    x = torch.ones(512, device="cuda")
    for fallback in (False, True):
        torch.compiler.reset()
        with torch._inductor.config.patch(fallback_random=fallback):
            found = []
            for backend in ("cgraph", "inductor"):
                fast = torch.compile(noisy, backend=backend)
                for _ in range(3):
                    fast(x)
                torch.manual_seed(11)
                found.append([fast(x).clone() for _ in range(4)])
        for ours, theirs in zip(*found, strict=True):
            assert torch.equal(ours, theirs)


def test_strict_raises_where_work_of_the_gpu_lies_between_captured_parts() -> None:
    def body(x: Tensor) -> Tensor:
        return x.sin() + x.sum().cpu().cuda()

    fast = torch.compile(body, backend="cgraph", options={"strict": True})
    with torch.no_grad(), pytest.raises(RuntimeError, match="skipping cudagraphs due to"):
        fast(torch.randn(8, device="cuda"))


def test_operators_between_captured_parts_are_in_the_report() -> None:
    def body(x: Tensor) -> Tensor:
        return x.sin() + x.sum().cpu().cuda()

    fast = torch.compile(body, backend="cgraph")
    with torch.no_grad():
        fast(torch.randn(8, device="cuda"))
    reasons = [reason for _, reason in cgraph.trees.report().skips]
    assert any("copy" in one for one in reasons), reasons


@pytest.mark.parametrize("options", [{"mode": "reduce-overhead"}, {"backend": "cudagraphs"}])
def test_other_ways_to_compile_use_these_trees_where_torch_is_patched(options: Any) -> None:
    from torch._inductor import cudagraph_trees

    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1)).cuda()
    reference = copy.deepcopy(model)
    with cgraph.patch_torch(trees=True):
        fast = torch.compile(model, **options)
        for _ in range(8):
            x = torch.randn(4, 8, device="cuda")
            for one, run in ((model, fast), (reference, reference)):
                one.zero_grad()
                run(x).square().mean().backward()
            for got, want in zip(model.parameters(), reference.parameters(), strict=True):
                assert torch.allclose(got.grad, want.grad, atol=1e-4)
    assert graphs() == 2
    assert cudagraph_trees.get_manager(0, create_if_none_exists=False) is None


_CACHED = """
import sys, torch
from torch import nn
torch._logging.set_logs(inductor=40)
import cgraph
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1)).cuda()

def loss(x):
    y = model[1](model[0](x))
    shift = y.sum().cpu().cuda()
    return (model[2](y) + shift).square().mean()

fast = torch.compile(loss, backend="cgraph")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
graphs = []
for _ in range(10):
    value = fast(torch.randn(4, 8, device="cuda"))
    value.backward()
    optimizer.step()
    optimizer.zero_grad()
    graphs.append(sum(one.graphs for one in cgraph.trees.report().functions))
report = cgraph.trees.report()
parts = sorted((one.name, one.graphs, one.replays, one.rerecords) for one in report.functions)
print("FOUND", graphs, parts, sorted(report.skips), float(value))
"""


@pytest.mark.timeout(400)
def test_parts_reasons_and_captures_are_the_same_with_every_cache(tmp_path: Path) -> None:
    """A partitioned training step, cold and from each of torch's caches."""
    program = tmp_path / "train.py"
    program.write_text(_CACHED)
    found = []
    for bundled in ("1", "1", "0"):
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
            "TORCHINDUCTOR_AUTOGRAD_CACHE": bundled,
            "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        }
        done = subprocess.run(
            [sys.executable, program], env=environment, capture_output=True, text=True, check=False
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
        assert lines, done.stderr[-2000:]
        found.append(lines[0])
    assert len(set(found)) == 1, found
    graphs = [int(one) for one in re.findall(r"\[([\d, ]+)\]", found[0])[0].split(",")]
    # Nothing is captured after the third step.
    assert graphs[3:] == [graphs[2]] * 7
    assert "a copy between host and device, between captured parts" in found[0]


@torch.library.custom_op("cgraph_tests::keeping", mutates_args=())
def keeping(x: Tensor) -> Tensor:
    _LAST["argument"] = x.to(torch.float64)
    return _LAST["argument"].to(x.dtype) + 1


keeping.register_fake(torch.empty_like)
_LAST: dict[str, Tensor] = {}


@pytest.mark.parametrize("backend", ["cgraph", "cgraph_aot"])
def test_an_operator_that_keeps_what_it_makes_is_named_and_right(backend: str) -> None:
    fast = torch.compile(lambda x: keeping(x * 2) * 3, backend=backend)
    with torch.no_grad(), pytest.warns(cgraph.errors.EagerWarning, match="cgraph_tests::keeping"):
        for _ in range(5):
            x = torch.randn(4, device="cuda")
            torch.testing.assert_close(fast(x), (x * 2 + 1) * 3)
            torch.testing.assert_close(_LAST["argument"], (x * 2).double())
