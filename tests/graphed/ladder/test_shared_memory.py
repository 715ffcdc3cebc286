"""All sizes of a ladder in the memory of its largest one, and results that outlive it."""

from __future__ import annotations

import gc
import random
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import cgraph
from cgraph import MemPool, SegmentedGraph, _torch, eager_break, graphed, weak_ref
from cgraph.errors import CompareError
from lab import CudaLab, Lab, fresh
from networks import network
from pools import MIB

SIZES = [1, 2, 4, 8]


@eager_break
def attended(q: Tensor, k: Tensor) -> Tensor:
    """Combine two tensors between two graphs."""
    return q * 2 + k


def plain(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return two results that share no memory."""
    for _ in range(3):
        x = torch.relu(x * 0.5 + 1)
    return torch.cat([x, x], dim=1), x - 1


def broken(x: Tensor) -> tuple[Tensor, Tensor]:
    """Do the same with breaks between."""
    for _ in range(3):
        x = torch.relu(attended(x * 0.5, x + 1))
    return torch.cat([x, x], dim=1), x - 1


BODIES = pytest.mark.parametrize("body", [plain, broken])


@pytest.fixture(params=["fresh", "static"])
def outputs(request: pytest.FixtureRequest) -> Any:
    """Return both kinds of results."""
    return request.param


def equal(found: Any, expected: Any) -> bool:
    """Return whether results are equal."""
    return all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def segments(lab: Lab, body: Callable[..., Any], sizes: list[int], columns: int) -> Any:
    """Capture each size, the largest first; return the pool and what replays take and fill."""
    kept = {}
    with cgraph.capture_scope(MemPool()) as pool:
        for rows in sorted(sizes, reverse=True):
            x = fresh(lab, rows, columns)
            graph, results = SegmentedGraph.capture(lambda x=x: body(x), pool=pool)
            kept[rows] = graph, x, weak_ref(results)
            del results
    return pool, kept


def bytes_of(pool: MemPool) -> int:
    """Return the device's bytes of a pool, as the ledger has them."""
    (found,) = (one for one in cgraph.memory().pools if one.handle == tuple(pool.id))
    assert found.mapped == pool.stats()["mapped"]
    return found.mapped


def of_ladder(lab: Lab, body: Callable[..., Any], sizes: list[int], columns: int, way: str) -> Any:
    """Capture a ladder; return its pool and what must be kept."""
    if way == "segments":
        return segments(lab, body, sizes, columns)
    pool: Any = MemPool()
    function = graphed(body, sizes=sizes, outputs=way, pool=pool)
    function.capture(fresh(lab, 8, columns), progress=False)
    return pool, function


@BODIES
@pytest.mark.parametrize("way", ["fresh", "static", "segments"])
def test_a_ladder_takes_what_its_largest_size_takes(lab: Lab, body: Any, way: str) -> None:
    columns = 2 * MIB  # the largest size takes more than 256 MiB
    largest, kept = of_ladder(lab, body, [8], columns, way)
    expected = bytes_of(largest)
    del largest, kept
    gc.collect()
    pool, kept = of_ladder(lab, body, SIZES, columns, way)
    assert expected >= 256 * MIB
    assert bytes_of(pool) <= 1.05 * expected + 4 * MIB
    if way != "segments":
        assert kept.report().memory_bytes >= bytes_of(pool)


def settle() -> None:
    """Give all memory back that nobody uses, also what had to wait."""
    for _ in range(2):
        gc.collect()
        cgraph.memory()
        torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.alone
@BODIES
@pytest.mark.parametrize("way", ["fresh", "static", "segments"])
def test_the_device_has_as_much_less_memory_as_for_the_largest_size(body: Any, way: str) -> None:
    lab, columns, taken = CudaLab(), 2 * MIB, []
    for sizes in ([8], [8], SIZES):
        settle()
        before = torch.cuda.mem_get_info()[0]
        kept = of_ladder(lab, body, sizes, columns, way)
        execs = sum(one.exec for one in cgraph.memory().graphs)
        settle()
        statics = sum(rows * columns * 4 for rows in (sizes if way == "segments" else [8]))
        taken.append(before - torch.cuda.mem_get_info()[0] - execs - statics)
        del kept
    # The first ladder of a process pays for kernels that are loaded.
    assert taken[1] >= 256 * MIB
    assert taken[2] <= 1.05 * taken[1] + 4 * MIB


@BODIES
def test_sizes_in_any_order_equal_eager(lab: Lab, body: Any, outputs: Any) -> None:
    order = random.Random(torch.initial_seed())
    function = graphed(body, sizes=SIZES, outputs=outputs)
    if order.random() < 0.5:
        function.capture(fresh(lab, 8, 33), progress=False)
    for _ in range(40):
        x = fresh(lab, order.randint(1, 8), 33)
        assert equal(function(x), body(x))


@BODIES
def test_segments_in_any_order_equal_eager(lab: Lab, body: Any) -> None:
    order = random.Random(torch.initial_seed())
    _, kept = segments(lab, body, SIZES, 33)
    for _ in range(40):
        graph, x, results = kept[order.choice(SIZES)]
        x.normal_()
        graph.replay()
        assert equal(results, body(x))


@BODIES
@pytest.mark.parametrize("end", ["del", "reset"])
def test_results_outlive_their_function_and_its_pool(
    lab: Lab, body: Any, outputs: Any, end: str
) -> None:
    pool: Any = MemPool()
    function = graphed(body, sizes=SIZES, outputs=outputs, pool=pool)
    function.capture(fresh(lab, 8, 33), progress=False)
    x = fresh(lab, 8, 33)
    both, less = function(x)
    view, exported = both[2:5, ::2], torch.utils.dlpack.to_dlpack(less)
    array: Any = both.cpu().numpy() if lab.device == "cuda" else both.numpy()
    if end == "reset":
        function.reset()
    del both, less, pool, function
    gc.collect()
    if lab.device == "cuda":
        torch.cuda.empty_cache()
    # Others take what memory has become free.
    _others = [fresh(lab, 8, 33) for _ in range(20)]
    expected = body(x)
    assert torch.equal(view, expected[0][2:5, ::2])
    assert np.array_equal(array, expected[0].cpu().numpy())
    assert torch.equal(torch.utils.dlpack.from_dlpack(exported), expected[1])


def test_a_pool_of_the_user_can_be_trimmed_under_results_that_are_alive(lab: Lab) -> None:
    pool: Any = MemPool()
    function = graphed(lambda x: x * 2, outputs="static", pool=pool)
    for _ in range(3):
        x = fresh(lab, MIB)
        y = function(x)
    del function
    gc.collect()
    pool.trim()
    assert torch.equal(y, x * 2)
    del y
    gc.collect()


def test_autograd_refuses_a_static_result_that_a_replay_of_another_size_overwrote(lab: Lab) -> None:
    function = graphed(lambda x: x * 2, sizes=SIZES, outputs="static")
    with torch.no_grad():
        function.capture(fresh(lab, 8, 4), progress=False)
    weight = fresh(lab, 4).requires_grad_()

    def loss(rows: int) -> tuple[Tensor, Tensor]:
        x = fresh(lab, rows, 4)
        with torch.no_grad():
            y = function(x)
        return (y * weight).sum(), (x * 2).sum(0)

    for rows in (8, 2, 5):
        found, expected = loss(rows)
        (gradient,) = torch.autograd.grad(found, weight)
        assert torch.allclose(gradient, expected, atol=1e-5)
    stale, _ = loss(8)
    loss(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()


def test_autograd_refuses_a_static_result_that_another_function_of_the_pool_overwrote(
    lab: Lab,
) -> None:
    pool: Any = MemPool()
    one, other = (graphed(lambda x: x * 2, outputs="static", pool=pool) for _ in range(2))
    weight = fresh(lab, 4).requires_grad_()
    with torch.no_grad():
        for _ in range(3):
            other(fresh(lab, 4))
            y = one(fresh(lab, 4))
    stale = (y * weight).sum()
    with torch.no_grad():
        other(fresh(lab, 4))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()


def test_functions_that_share_a_pool_share_its_memory(lab: Lab) -> None:
    pool: Any = MemPool()
    functions = [graphed(plain, pool=pool) for _ in range(4)]
    taken = []
    for function in functions:
        for _ in range(3):
            x = fresh(lab, 8, MIB // 8)
            assert equal(function(x), plain(x))
        taken.append(pool.stats()["reserved"])
    assert len(set(taken)) == 1


def test_a_ladder_with_accumulated_gradients_equals_eager(lab: Lab) -> None:
    net, twin = network(lab), network(lab)
    twin.load_state_dict(net.state_dict())
    function = graphed(net, sizes=SIZES)
    order = random.Random(torch.initial_seed())
    for step in range(8):
        for _ in range(3):
            x = fresh(lab, order.choice([*SIZES, 3, 5]), 6)
            function(x).square().sum().backward()
            twin(x).square().sum().backward()
            with torch.no_grad():
                assert torch.allclose(function(x), twin(x), atol=1e-5)
        pairs = zip(net.parameters(), twin.parameters(), strict=True)
        assert all(torch.allclose(one.grad, own.grad, atol=1e-4) for one, own in pairs)  # type: ignore[arg-type]
        if step % 2:
            net.zero_grad()
            twin.zero_grad()


class Keeping(nn.Module):
    """A module with a break that keeps its arguments, and one that reads them in the next calls."""

    def __init__(self, clones: bool) -> None:
        super().__init__()
        # As long as the tensor of the capture is there, its block is in use.
        self.before: deque[Tensor] = deque(maxlen=3)
        self.clones = clones
        self.read = eager_break(self.added, name="read")
        self.keep = eager_break(self.kept, name="keep")

    def added(self, x: Tensor) -> Tensor:
        return torch.stack([x, *self.before]).sum(0)

    def kept(self, q: Tensor) -> None:
        self.before.append(q.clone() if self.clones else q)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.read(x)
        self.keep(x * 3)
        return y.cos()


@pytest.mark.parametrize("clones", [True, False])
def test_poison_finds_a_break_that_keeps_its_argument_without_a_clone(
    lab: Lab, clones: bool
) -> None:
    function = graphed(Keeping(clones), debug="poison")
    finds: Any = nullcontext() if clones else pytest.raises(CompareError)
    with finds:
        for _ in range(9):
            function(fresh(lab, 64))


def test_poison_shows_a_static_result_that_is_kept_too_long(lab: Lab) -> None:
    function = graphed(lambda x: x * 2, sizes=SIZES, outputs="static", debug="poison")
    function.capture(fresh(lab, 8, 64), progress=False)
    kept = function(fresh(lab, 8, 64))
    function(fresh(lab, 1, 64))
    assert torch.isnan(kept[-1]).all()


@pytest.mark.parametrize("outputs", ["fresh", "static"])
def test_results_that_share_memory_share_a_version(lab: Lab, outputs: Any) -> None:
    function = graphed(lambda x: ((y := x * 2), y[1:]), outputs=outputs)
    weight = fresh(lab, 4).requires_grad_()
    for _ in range(4):
        with torch.no_grad():
            y, rows = function(fresh(lab, 4))
        loss = (y * weight).sum()
        rows.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_autograd_refuses_a_static_result_that_the_first_padded_call_overwrote(lab: Lab) -> None:
    function = graphed(lambda x: x * 2, sizes=[4], outputs="static")
    weight = fresh(lab, 5).requires_grad_()
    with torch.no_grad():
        for _ in range(3):
            y = function(fresh(lab, 4, 5))
    stale = (y * weight).sum()
    with torch.no_grad():
        padded = function(fresh(lab, 3, 5))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()
    stale = (padded * weight).sum()
    with torch.no_grad():
        function(fresh(lab, 4, 5))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()


def test_a_gradient_in_the_pool_is_not_overwritten_by_another_function_of_it(lab: Lab) -> None:
    pool: Any = MemPool()
    weight = fresh(lab, 8).requires_grad_()

    def step(x: Tensor) -> None:
        (x * weight).square().sum().backward()

    evaluate, stepped = graphed(plain, pool=pool), graphed(step, pool=pool)
    with torch.no_grad():
        for _ in range(3):
            evaluate(fresh(lab, 4, 8))
    for _ in range(6):
        weight.grad = None
        x = fresh(lab, 4, 8)
        stepped(x)
        with torch.no_grad():
            evaluate(fresh(lab, 4, 8))
            expected = 2 * (x * x).sum(0) * weight
        assert weight.grad is not None
        assert torch.allclose(weight.grad, expected, atol=1e-4)


def test_a_function_called_in_a_break_of_another_one_of_its_pool_spoils_nothing(lab: Lab) -> None:
    pool: Any = MemPool()
    inner = graphed(plain, pool=pool)

    def outer(x: Tensor) -> Tensor:
        y = x * 3 + 1
        z: Tensor = eager_break(lambda y: inner(y)[1], name="inner")(y)
        return y * 2 + z

    function = graphed(outer, pool=pool)
    for _ in range(3):
        inner(fresh(lab, 4, 8))
    for _ in range(5):
        x = fresh(lab, 4, 8)
        y = x * 3 + 1
        assert torch.allclose(function(x), y * 2 + plain(y)[1])


def test_breaks_get_tensors_that_are_or_share_one_as_they_were(lab: Lab) -> None:
    found: list[bool] = []

    @eager_break
    def look(whole: Tensor, parts: tuple[Tensor, Tensor], *, last: Tensor) -> None:
        storages = {_torch.storage_id(one.untyped_storage()) for one in (*parts, last)}
        found.append(whole is parts[0] and len(storages) == 1)

    def body() -> Tensor:
        y = x * 2
        look(y, (y, y[1:]), last=y[2:])
        return y + 1

    x = fresh(lab, 4)
    graph, _ = SegmentedGraph.capture(body)
    for _ in range(3):
        graph.replay()
    assert found == [True] * 4


def test_breaks_get_containers_classes_and_attributes_as_they_were(lab: Lab) -> None:
    log: list[float] = []
    seen: dict[str, Any] = {}

    @eager_break
    def note(log: list[float], y: Any, parts: dict[str, Tensor]) -> None:
        log.append(float(y.sum()) * y.scale + float(parts["y"].sum()))
        seen["class"] = type(parts["z"])

    def body() -> Tensor:
        y: Any = x * 2
        y.scale = 3.0
        note(log, y, {"y": y, "z": nn.Parameter(y.detach(), requires_grad=False)})
        return y + 1  # type: ignore[no-any-return]

    x = torch.ones(4, device=lab.device)
    graph, _ = SegmentedGraph.capture(body)
    log.clear()
    for _ in range(3):
        graph.replay()
    assert log == [32.0] * 3
    assert seen["class"] is nn.Parameter


def test_functions_made_one_after_another_with_one_pool_take_its_memory_again(lab: Lab) -> None:
    pool, taken = cgraph.MemPool(), []
    with torch.no_grad():
        for number in range(4):
            layer = torch.nn.Linear(64, 512).to(lab.device)
            function = cgraph.graphed(lambda x, layer=layer: torch.relu(layer(x)), pool=pool)
            for _ in range(3):
                x = fresh(lab, 128, 64)
                assert torch.allclose(function(x), torch.relu(layer(x)), atol=1e-4)
            taken.append(pool.stats()["reserved"])
            if number == 1:
                function.reset()
                function.capture(fresh(lab, 128, 64), progress=False)
                taken.append(pool.stats()["reserved"])
            del function
            gc.collect()
            lab.sync()
    assert len(set(taken)) == 1, taken
