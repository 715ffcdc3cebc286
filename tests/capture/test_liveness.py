"""Replays that would read memory that is gone: they raise, and name it and its use."""

from __future__ import annotations

import inspect
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cgraph
from cgraph import _source
from cgraph._captures.blocks import Blocks
from cgraph._captures.liveness import Check, LivenessMode, OutsideTensor
from cgraph.errors import LivenessError
from lab import Lab, fresh

OUTSIDE_POOLS, OTHER_POOL, OWN_POOL = (0, 0), (0, 7), (0, 8)


def segment(address: int, pool: tuple[int, int], *blocks: tuple[int, str]) -> dict[str, Any]:
    return {
        "address": address,
        "total_size": sum(size for size, _ in blocks),
        "segment_pool_id": pool,
        "blocks": [{"size": size, "state": state} for size, state in blocks],
    }


class Memory:
    """The reports of a driver and torch's allocator, as a test wants them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.segments: list[dict[str, Any]] = []
        self.ranges: dict[int, tuple[int, int]] = {}
        monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: self.segments)

    def check(
        self, addresses: list[tuple[str | None, int]], outside: tuple[OutsideTensor, ...] = ()
    ) -> Check:
        """Return the check of a capture whose nodes name addresses and operators read tensors."""
        found = [
            SimpleNamespace(name=name, address=address, base=base, bytes=size)
            for name, address in addresses
            for base, size in [self.ranges.get(address, (0, 0))]
        ]
        device: Any = SimpleNamespace(memory_range=lambda address: self.ranges.get(address))
        template: Any = SimpleNamespace(addresses=lambda: found)
        watch: Any = SimpleNamespace(outside={o.storage.address: o for o in outside})
        return Check(device, template, watch, [OWN_POOL])


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    return Memory(monkeypatch)


def test_the_error_names_shape_dtype_operator_and_line(lab: Lab) -> None:
    x, graph = fresh(lab, 30, 5), cgraph.CUDAGraph()
    with cgraph.graph(graph, check_input_liveness=True):
        y = torch.nn.functional.relu(x) * 2
        line = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
    x.normal_()
    graph.replay()
    lab.sync()
    assert torch.equal(y, torch.relu(x) * 2)
    del x
    where = re.escape(f"aten.relu.default ({__file__}:{line})")
    with pytest.raises(LivenessError, match=rf"\(30, 5\) and torch.float32.*{where}.*freed"):
        graph.replay()


def test_the_first_use_is_named_and_not_a_later_one(lab: Lab) -> None:
    x, graph = fresh(lab, 6), cgraph.CUDAGraph()
    with cgraph.graph(graph, check_input_liveness=True):
        torch.exp(x)
        torch.sin(x)
    del x
    with pytest.raises(LivenessError, match=r"aten\.exp"):
        graph.replay()


def test_a_view_is_no_use(lab: Lab) -> None:
    x, graph = fresh(lab, 6, 4), cgraph.CUDAGraph()
    with cgraph.graph(graph, check_input_liveness=True):
        view = x[:3].t()
        view.contiguous().sum() + view.sin().sum()
    del x, view
    with pytest.raises(LivenessError, match=r"first used by aten\.clone"):
        graph.replay()


def test_tensors_that_are_alive_and_in_place_pass(lab: Lab) -> None:
    x, weight, graph = fresh(lab, 4, 8), fresh(lab, 8, 8), cgraph.CUDAGraph()
    y = x @ weight  # libraries load once
    with cgraph.graph(graph, check_input_liveness=True):
        y.copy_(x @ weight)
    for _ in range(3):
        x.normal_()
        weight.normal_()
        graph.replay()
        lab.sync()
        assert torch.allclose(y, x @ weight, atol=1e-5)


def test_a_dead_view_of_a_living_storage_passes(lab: Lab) -> None:
    x, graph = fresh(lab, 100), cgraph.CUDAGraph()
    view = x[10:20]
    with cgraph.graph(graph, check_input_liveness=True):
        y = view * 3
    del view
    x.normal_()
    graph.replay()
    lab.sync()
    assert torch.equal(y, x[10:20] * 3)


def test_a_storage_that_was_resized_counts_as_moved(lab: Lab) -> None:
    x, graph = fresh(lab, 100), cgraph.CUDAGraph()
    with cgraph.graph(graph, check_input_liveness=True):
        x * 3
    x.resize_(1 << 22)
    with pytest.raises(LivenessError, match=r"\(100,\).*moved"):
        graph.replay()


def test_a_mode_that_the_user_leaves_late_changes_nothing(lab: Lab) -> None:
    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        count = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            Counting.count += 1
            return func(*args, **(kwargs or {}))

    x, graph, stream = fresh(lab, 8), cgraph.CUDAGraph(), lab.stream()
    lab.fork(stream)
    with lab.use(stream):
        graph.capture_begin(check_input_liveness=True)
        mode = Counting()
        mode.__enter__()
        x * 2
        graph.capture_end()
        x * 2
        mode.__exit__(None, None, None)
    assert Counting.count >= 2
    del x
    with pytest.raises(LivenessError):
        graph.replay()


def test_blocks_are_found_by_any_address_in_them() -> None:
    blocks = Blocks(
        [
            segment(8192, OTHER_POOL, (512, "active_allocated"), (512, "inactive")),
            segment(4096, OUTSIDE_POOLS, (100, "inactive"), (400, "active_pending_free")),
        ]
    )
    assert (blocks.pool(4095), blocks.pool(4096), blocks.pool(4595)) == (None, (0, 0), (0, 0))
    assert (blocks.pool(4596), blocks.pool(9215), blocks.pool(9216)) == (None, OTHER_POOL, None)
    assert (blocks.active(4096), blocks.active(4196)) == (None, (4196, 400))
    assert (blocks.active(8703), blocks.active(8704)) == ((8192, 512), None)
    assert blocks.is_active_in_pool(8192) and not blocks.is_active_in_pool(4196)


@pytest.mark.parametrize(
    "state", ["active_allocated", "active_awaiting_free", "active_pending_free"]
)
def test_every_active_state_counts_as_alive(memory: Memory, state: str) -> None:
    memory.segments = [segment(4096, OUTSIDE_POOLS, (512, state))]
    memory.check([("mine", 4100)])()


def test_a_kernels_address_in_a_freed_block_raises(memory: Memory) -> None:
    memory.segments = [segment(4096, OUTSIDE_POOLS, (512, "active_allocated"), (512, "inactive"))]
    check = memory.check([("_Z4minePf", 4100)])
    check()
    memory.segments = [segment(4096, OUTSIDE_POOLS, (1024, "inactive"))]
    with pytest.raises(LivenessError, match=r"mine.*0x1004.*nothing is alive"):
        check()
    memory.segments = []
    with pytest.raises(LivenessError, match="0x1004"):
        check()


def test_a_block_that_others_took_over_in_parts_raises(memory: Memory) -> None:
    memory.segments = [segment(4096, OUTSIDE_POOLS, (1024, "active_allocated"))]
    check = memory.check([("mine", 4100)])
    memory.segments = [
        segment(4096, OUTSIDE_POOLS, (512, "active_allocated"), (512, "active_allocated"))
    ]
    with pytest.raises(LivenessError, match="0x1004"):
        check()


def test_an_address_that_named_nothing_alive_at_the_end_of_the_capture_raises(
    memory: Memory,
) -> None:
    memory.segments = [segment(4096, OUTSIDE_POOLS, (1024, "inactive"))]
    with pytest.raises(LivenessError, match="0x1004"):
        memory.check([("mine", 4100)])()


@pytest.mark.parametrize("after", [None, (4096, 256), (2048, 4096)])
def test_memory_of_others_must_stay_mapped_as_it_was(
    memory: Memory, after: tuple[int, int] | None
) -> None:
    memory.ranges = {4100: (4096, 512)}
    check = memory.check([("memcpy", 4100)])
    check()
    memory.ranges = {} if after is None else {4100: after}
    with pytest.raises(LivenessError, match=r"memcpy.*0x1004"):
        check()


def test_addresses_in_the_graphs_own_pool_are_not_checked(memory: Memory) -> None:
    memory.segments = [segment(4096, OWN_POOL, (512, "active_allocated"))]
    check = memory.check([("mine", 4100)])
    memory.segments = [segment(4096, OWN_POOL, (512, "inactive"))]
    check()


def test_parameters_of_torchs_own_kernels_are_not_taken_for_addresses(memory: Memory) -> None:
    memory.segments = [segment(4096, OUTSIDE_POOLS, (512, "active_allocated"))]
    check = memory.check([("_ZN2at6native13reduce_kernelEPf", 4100)])
    memory.segments = []
    check()


def test_a_kernel_without_a_name_is_reported_by_its_address(memory: Memory) -> None:
    memory.ranges = {4100: (4096, 512)}
    check = memory.check([(None, 4100)])
    memory.ranges = {}
    with pytest.raises(LivenessError, match=r"a kernel.*0x1004"):
        check()


@pytest.mark.parametrize(
    ("pool", "state", "passes"),
    [
        (OTHER_POOL, "active_allocated", True),
        (OWN_POOL, "active_allocated", True),
        (OTHER_POOL, "inactive", False),
        (OUTSIDE_POOLS, "active_allocated", False),
    ],
)
def test_a_dead_tensor_whose_block_in_a_pool_is_active_passes(
    memory: Memory, pool: tuple[int, int], state: str, passes: bool
) -> None:
    x = torch.randn(128)
    outside = OutsideTensor(x, "aten.mul.Tensor")
    memory.segments = [segment(x.data_ptr(), pool, (512, "active_allocated"))]
    check = memory.check([], (outside,))
    check()
    memory.segments = [segment(x.data_ptr(), pool, (512, state))]
    del x
    if passes:
        check()
        return
    with pytest.raises(LivenessError, match=r"\(128,\).*freed"):
        check()


def test_a_living_tensor_over_memory_that_its_owner_freed_raises(memory: Memory) -> None:
    x = torch.randn(128)
    memory.ranges = {x.data_ptr(): (x.data_ptr(), 512)}
    check = memory.check([], (OutsideTensor(x, "aten.mul.Tensor"),))
    check()
    memory.ranges = {}
    with pytest.raises(LivenessError, match=r"\(128,\).*freed"):
        check()


def test_an_address_inside_a_watched_tensor_is_the_watchs_affair(memory: Memory) -> None:
    x = torch.randn(128)
    address = x.data_ptr()
    memory.segments = [segment(address, OUTSIDE_POOLS, (512, "active_allocated"))]
    check = memory.check([("mine", address + 8)], (OutsideTensor(x, "aten.mul.Tensor"),))
    memory.segments = []
    check()


def test_operators_outside_a_capturing_stream_are_not_watched() -> None:
    watch = LivenessMode()
    with watch:
        torch.ones(4) * 2
    assert watch.outside == {}


def test_the_line_is_that_of_the_innermost_frame_of_the_user() -> None:
    def called_by_torch(x: torch.Tensor) -> torch.Tensor:
        found.append(_source.user_line())
        return x

    found: list[str | None] = []
    line = called_by_torch.__code__.co_firstlineno + 1
    torch.ones(1).apply_(lambda value: (called_by_torch(torch.ones(1)), value)[1])
    assert found == [f"{__file__}:{line}"]
