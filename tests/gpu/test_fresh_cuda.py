"""Fresh results on a GPU: their owner and their stream."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import cgraph
from cgraph import _core, _torch
from cgraph._captures.capture_options import CaptureOptions
from fresh_results import capture, entry, results_of

pytestmark = pytest.mark.gpu

MIB = 1 << 20


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Free all memory of earlier tests."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    yield
    torch.cuda.synchronize()


def one(x: Tensor) -> list[Tensor]:
    return [x * 2 + 1]


def new(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda")


def pool_of(tensor: Tensor) -> tuple[int, ...]:
    for segment in torch.cuda.memory_snapshot():
        begin, end = segment["address"], segment["address"] + segment["total_size"]
        if begin <= tensor.data_ptr() < end:
            return tuple(segment["segment_pool_id"])
    raise AssertionError("no segment of torch's allocator has it")


class _Dispatcher(_core.Dispatcher):
    """A caller of one entry."""

    def _miss(self, args: Any, kwargs: Any) -> Any:
        raise AssertionError("the entry does not fit")


def dispatcher(served: _core.Entry) -> _core.Dispatcher:
    """Return a fast caller of an entry."""
    made = _Dispatcher(
        torch.cuda.is_current_stream_capturing,
        _torch.is_intercepted,
        _torch.forward_ad,
        torch.is_grad_enabled,
        torch.is_inference_mode_enabled,
        _torch.is_any_autocast_enabled,
        _torch.autocast_state,
        _torch.mode_addresses(),
        _torch.interception_keys(),
        _torch.torch_settings(),
    )
    made.add(served)
    return made


def test_torch_s_own_functions_make_results() -> None:
    graph, _ = capture(one, new(4, 8))
    assert results_of(graph).fresh.is_native


def test_results_are_in_the_default_pool() -> None:
    graph, (own,) = capture(one, new(64, 64))
    (result,) = graph._replay_fresh((new(64, 64),))
    assert pool_of(result) == (0, 0)
    assert pool_of(own) != (0, 0)


def test_memory_returns_when_a_result_goes() -> None:
    graph, _ = capture(lambda x: [x * 2, x + 1], new(512, 512))
    x = new(512, 512)
    graph._replay_fresh((x,))
    before = torch.cuda.memory_allocated()
    results = graph._replay_fresh((x,))
    assert torch.cuda.memory_allocated() == before + 2 * MIB
    del results
    assert torch.cuda.memory_allocated() == before


def test_another_stream_that_is_recorded_keeps_a_result_s_memory() -> None:
    graph, _ = capture(one, new(512, 512))
    x, side = new(512, 512), torch.cuda.Stream()
    (result,) = graph._replay_fresh((x,))
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        copy = result.clone()
    result.record_stream(side)
    place = result.data_ptr()
    del result
    others = [torch.zeros(512, 512, device="cuda") for _ in range(8)]
    assert place not in [other.data_ptr() for other in others]
    torch.cuda.synchronize()
    assert_close(copy, x * 2 + 1)


@pytest.mark.parametrize("mib", [1, 4, 5, 64])
def test_results_of_any_size_are_copied(mib: int) -> None:
    graph, (own, small) = capture(lambda x: [x * 2, x[:3] + 1], new(mib * MIB // 4))
    for _ in range(3):
        x = new(mib * MIB // 4)
        large, few = graph._replay_fresh((x,))
        assert_close(large, x * 2)
        assert_close(few, x[:3] + 1)
        large.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert not large.any()
    assert_close(own, x * 2)
    assert_close(small, x[:3] + 1)


def test_results_of_many_sizes_are_copied_together() -> None:
    sizes = [1, 7, 1000, 4096, MIB, 2 * MIB, 3 * MIB]

    def fn(x: Tensor) -> list[Tensor]:
        return [x[:size] * place for place, size in enumerate(sizes)] + [x[:5].double()]

    graph, _ = capture(fn, new(3 * MIB))
    for _ in range(3):
        x = new(3 * MIB)
        assert_close(graph._replay_fresh((x,)), fn(x))


def test_many_results_are_copied() -> None:
    def fn(x: Tensor) -> list[Tensor]:
        return [x[place % 4] + place for place in range(200)]

    graph, _ = capture(fn, new(4, 33))
    for _ in range(3):
        x = new(4, 33)
        assert_close(graph._replay_fresh((x,)), fn(x))


def test_replays_in_flight_do_not_mix_results() -> None:
    graph, _ = capture(one, new(256, 256))
    given = [new(256, 256) for _ in range(64)]
    sums = []
    torch.cuda._sleep(50_000_000)
    for x in given:
        # Its memory is given to the next one while nothing has run yet.
        (result,) = graph._replay_fresh((x,))
        sums.append(result.sum(1))
        del result
    for x, found in zip(given, sums, strict=True):
        assert_close(found, (x * 2 + 1).sum(1))


def test_results_belong_to_the_stream_of_their_replay() -> None:
    graph, _ = capture(one, new(256, 256))
    x, found = new(256, 256), []
    torch.cuda.synchronize()
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            for _ in range(3):
                found += graph._replay_fresh((x,))
        torch.cuda.synchronize()
    for result in found:
        assert_close(result, x * 2 + 1)
    assert len({result.data_ptr() for result in found}) == 9


def test_a_call_makes_no_copy_of_its_own() -> None:
    static = new(64, 64)
    graph, _ = capture(one, static)
    served = dispatcher(entry(graph, [static], [("fresh", 0, results_of(graph).fresh)], "single"))
    given = [new(64, 64) for _ in range(4)]
    served(given[0])
    with torch.profiler.profile(acc_events=True) as profile:
        found = [served(x) for x in given]
    names = [event.name for event in profile.events() or ()]
    assert not {"aten::clone", "aten::copy_", "cudaMemcpyAsync"} & set(names)
    assert names.count("cudaLaunchKernel") == 0
    for x, result in zip(given, found, strict=True):
        assert_close(result, x * 2 + 1)


def test_random_numbers_and_fresh_results_are_set_together() -> None:
    static = torch.ones(1000, device="cuda")
    graph, _ = capture(lambda x: [torch.nn.functional.dropout(x, 0.5), x.sum()], static)
    x = torch.ones(1000, device="cuda")
    torch.manual_seed(3)
    first, total = graph._replay_fresh((x,))
    (second, _) = graph._replay_fresh((x,))
    torch.manual_seed(3)
    (again, _) = graph._replay_fresh((x,))
    assert_close(first, again)
    assert not torch.equal(first, second)
    assert total == 1000


@pytest.mark.parametrize("pad", ["zero", "repeat"])
def test_a_padded_call_gets_the_rows_that_it_has(pad: str) -> None:
    static = new(8, 5)

    def fn(x: Tensor) -> list[Tensor]:
        return [x * 2, x.sum(1)]

    graph, own = capture(fn, static)
    captured = graph._captured
    assert captured is not None
    assert captured.inputs is not None
    maker = results_of(graph).cut([result[:3] for result in own])
    padded = _core.PaddedGraph(graph, captured.inputs, 3, 8, pad, [True], print)
    leaves = [("fresh", 0, maker), ("fresh", 1, maker)]
    # Its static inputs have the rows of the calls.
    served = dispatcher(entry(padded, [static[:3]], leaves))
    for _ in range(3):
        x = new(3, 5)
        results = served(x)
        assert_close(list(results), fn(x))
        assert results[0].untyped_storage().nbytes() == 60


def test_a_fast_call_returns_fresh_results() -> None:
    static = new(64, 64)
    graph, _ = capture(one, static)
    served = dispatcher(entry(graph, [static], [("fresh", 0, results_of(graph).fresh)], "single"))
    given = [new(64, 64) for _ in range(4)]
    found = [served(x) for x in given * 2]
    for x, result in zip(given * 2, found, strict=True):
        assert_close(result, x * 2 + 1)


EXPANDABLE = """
import torch
from torch.testing import assert_close
from fresh_results import capture

for count in (1000, 16 << 20):
    graph, _ = capture(lambda x: [x * 2, x.sum()], torch.randn(count, device="cuda"))
    for _ in range(3):
        x = torch.randn(count, device="cuda")
        result, total = graph._replay_fresh((x,))
        assert_close(result, x * 2)
        assert_close(total, x.sum())
"""


def test_results_may_lie_in_expandable_segments() -> None:
    # The destinations of a memcpy node are then mapped memory of the allocator.
    here = str(Path(__file__).parents[1] / "support")
    path = os.pathsep.join([here, *sys.path])
    options = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PYTHONPATH": path}
    command = [sys.executable, "-c", EXPANDABLE]
    done = subprocess.run(command, env={**os.environ, **options}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_call_without_memory_for_its_results_fails_alone() -> None:
    graph, _ = capture(one, new(64 * MIB // 4))
    x = new(64 * MIB // 4)
    graph._replay_fresh((x,))
    total = torch.cuda.get_device_properties(0).total_memory
    limit = torch.cuda.memory_reserved() + 200 * MIB
    torch.cuda.set_per_process_memory_fraction(limit / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            kept = [graph._replay_fresh((x,)) for _ in range(20)]
            del kept
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert_close(graph._replay_fresh((x,))[0], x * 2 + 1)


def test_results_of_a_graph_outlive_it() -> None:
    graph, own = capture(one, new(64, 64))
    x = new(64, 64)
    (result,) = graph._replay_fresh((x,))
    graph.reset()
    del graph, own
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert_close(result, x * 2 + 1)


def test_the_graph_s_memory_may_be_used_again_in_its_pool() -> None:
    pool = cgraph.graph_pool_handle()
    graphs = []
    for factor in (2.0, 3.0):
        static = torch.empty(1000, device="cuda")
        graph = cgraph.CUDAGraph()
        graph._options = CaptureOptions(statics=(static,))
        with cgraph.graph(graph, pool=pool):
            assert graph._capture is not None
            graph._capture.results = [static * factor]
        gc.collect()
        graphs.append(graph)
    x = torch.randn(1000, device="cuda")
    found = [graph._replay_fresh((x,))[0] for graph in graphs * 2]
    for factor, result in zip((2.0, 3.0) * 2, found, strict=True):
        assert_close(result, x * factor)
