"""`GraphLadder`: graphs of one pool by key."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

import cgraph
from cgraph import GraphLadder, capture_scope
from cgraph.errors import ArgumentError, CaptureError, CgraphError, StateError
from lab import Lab, SimLab, fresh

SIZES = (8, 4, 2, 1)


class Layer:
    """A function of rows with weights and a break."""

    def __init__(self, lab: Lab, width: int = 16) -> None:
        self.weight = torch.randn(width, width, device=lab.device)
        self.out = torch.zeros(8, width, device=lab.device)
        self.x = torch.randn(8, width, device=lab.device)

    def __call__(self, x: Tensor) -> Tensor:
        y = torch.tanh(x @ self.weight)
        self.mixed(y, self.out[: len(x)])
        return self.out[: len(x)] @ self.weight + 1

    @cgraph.eager_break
    def mixed(self, y: Tensor, out: Tensor) -> None:
        torch.mul(y, float(y.abs().max()), out=out)


def ladder_of(layer: Layer, sizes: Sequence[int] = SIZES, **options: Any) -> GraphLadder:
    with torch.no_grad(), capture_scope() as pool:
        ladder = GraphLadder(pool, **options)
        for rows in sizes:
            ladder.capture(rows, layer, layer.x[:rows], before=lambda n=rows: layer(layer.x[:n]))
    return ladder


def test_each_key_replays_as_in_eager_and_breaks_stay_eager(lab: Lab) -> None:
    layer = Layer(lab)
    ladder = ladder_of(layer)
    assert ladder.keys == SIZES
    for _ in range(3):
        for rows in SIZES:
            x = fresh(lab, rows, 16)
            right = layer(x)
            layer.out.fill_(float("nan"))
            assert torch.allclose(ladder(rows, x), right, atol=1e-5)
            layer.x[:rows].normal_()
            layer.out.fill_(float("nan"))
            y = ladder(rows)
            assert torch.allclose(y, layer(layer.x[:rows]), atol=1e-5)


def test_results_of_a_key_lie_in_the_same_memory(lab: Lab) -> None:
    layer = Layer(lab)
    ladder = ladder_of(layer)
    addresses = {ladder(4, fresh(lab, 4, 16)).data_ptr() for _ in range(3)}
    assert len(addresses) == 1


def test_smaller_keys_take_no_more_memory_than_the_largest(lab: Lab) -> None:
    x = torch.ones(8, 200_000, device=lab.device)
    pool = cgraph.MemPool()
    with capture_scope(pool):
        ladder = GraphLadder(pool)
        ladder.capture(8, lambda x: x * 2 + 1, x)
        reserved = pool.stats()["reserved"]
        for rows in (7, 5, 3):
            ladder.capture(rows, lambda x: x * 2 + 1, x[:rows])
    assert pool.stats()["reserved"] == reserved
    strong = GraphLadder(weak_outputs=False)
    for rows in (8, 7, 5, 3):
        strong.capture(rows, lambda x: x * 2 + 1, x[:rows])
    results = [strong(rows) for rows in (8, 7)]
    assert results[0].data_ptr() != results[1].data_ptr()
    assert torch.equal(results[0][:7], results[1])


def test_fresh_results_are_the_callers_own(lab: Lab) -> None:
    weight = torch.randn(16, 16, device=lab.device)
    x = fresh(lab, 4, 16)
    ladder = GraphLadder(fresh_outputs=True)
    ladder.capture("k", lambda x: (x @ weight, x[:2], weight, 5), x)
    held = []
    for _ in range(4):
        given = fresh(lab, 4, 16)
        held.append((ladder("k", given), given.clone()))
    for (y, view, same, five), given in held:
        assert torch.allclose(y, given @ weight, atol=1e-5)
        assert torch.equal(view, given[:2])
        assert same is weight
        assert five == 5


@pytest.mark.parametrize("is_fresh", [False, True], ids=["static", "fresh"])
@pytest.mark.parametrize("kind", ["a tensor", "a dictionary"])
def test_a_call_without_arguments_reads_the_memory_of_the_capture(
    lab: Lab, kind: str, is_fresh: bool
) -> None:
    ladder, x = GraphLadder(fresh_outputs=is_fresh), fresh(lab, 4, 4)
    ladder.capture("k", lambda x: RESULTS[kind](x * 2 + 1, x), x)
    memory, x.data = x.data, fresh(lab, 3)
    for _ in range(3):
        memory.normal_()
        (found,), _ = tree_flatten(ladder("k"))
        torch.testing.assert_close(found, memory * 2 + 1)


def test_a_key_whose_graph_was_reset_says_so(lab: Lab) -> None:
    ladder, x = GraphLadder(), fresh(lab, 4)
    ladder.capture("k", lambda x: x * 2, x)
    ladder.graph("k").reset()
    for arguments in ((), (x,)):
        with pytest.raises(StateError, match="reset"):
            ladder("k", *arguments)


def test_a_capture_runs_the_function_once_between_before_and_after(lab: Lab) -> None:
    said: list[str] = []
    count = torch.zeros(1, device=lab.device)
    ladder = GraphLadder()
    y = ladder.capture(
        "k",
        lambda x: x.add_(1),
        count,
        before=lambda: said.append(f"before {count.item():.0f}"),
        after=lambda: said.append(f"after {count.item():.0f}"),
    )
    assert said == ["before 0", "after 1"]
    assert y.item() == 1


def test_addresses_are_compared_where_that_is_asked_for(lab: Lab) -> None:
    layer = Layer(lab)
    ladder = ladder_of(layer, check_addresses=True)
    ladder(4, layer.x[:4])
    moved = fresh(lab, 4, 16)
    said = rf"(?s)Input addresses .*args\[0\]: expected {layer.x.data_ptr():#x} with .*, got"
    with pytest.raises(ArgumentError, match=said):
        ladder(4, moved)


def test_a_tensor_at_the_same_address_with_other_strides_has_moved(lab: Lab) -> None:
    memory = torch.arange(16.0, device=lab.device)
    ladder = GraphLadder(check_addresses=True)
    ladder.capture("k", lambda x: x * 2, memory.view(4, 4)[:, :2])
    assert torch.equal(ladder("k", memory.view(4, 4)[:, :2]), memory.view(4, 4)[:, :2] * 2)
    with pytest.raises(ArgumentError, match="Input addresses"):
        ladder("k", memory.view(8, 2)[:4])
    assert torch.equal(memory, torch.arange(16.0, device=lab.device))


@pytest.mark.parametrize("kind", ["same", "overlapping", "expanded"])
def test_arguments_that_share_memory_must_stay(lab: Lab, kind: str) -> None:
    memory = torch.ones(8, device=lab.device)
    shared = {
        "same": (memory[:4], memory[:4]),
        "overlapping": (memory[:4], memory[2:6]),
        "expanded": (memory[:1].expand(4), memory[4:]),
    }[kind]
    ladder = GraphLadder()
    ladder.capture("k", lambda x, y: torch.relu(x) + y, *shared)
    assert torch.equal(ladder("k", *shared), torch.full((4,), 2.0, device=lab.device))
    with pytest.raises(ArgumentError, match="share memory, so that no others can be copied there"):
        ladder("k", fresh(lab, 4), fresh(lab, 4))


def test_arguments_may_be_swapped(lab: Lab) -> None:
    x, y, z = (fresh(lab, 4) for _ in range(3))
    given = [one.clone() for one in (x, y, z)]
    ladder = GraphLadder()
    ladder.capture("k", lambda x, y, z: (x - 2 * y) * z, x, y, z)
    got = ladder("k", y, z, x)
    assert torch.allclose(got, (given[1] - 2 * given[2]) * given[0])


class Pair(NamedTuple):
    """A result with names."""

    y: Tensor
    z: Tensor


RESULTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a tensor": lambda y, z: y,
    "a tuple": lambda y, z: (y, z),
    "a list": lambda y, z: [y, z],
    "twice the same": lambda y, z: (y, y),
    "views": lambda y, z: (y[1:], y.t()),
    "a tuple in a tuple": lambda y, z: ((y,), z),
    "a dictionary": lambda y, z: {"y": y},
    "a dictionary in a tuple": lambda y, z: ({"y": y}, z),
    "names": Pair,
    "with a number": lambda y, z: (y, 3),
}


@pytest.mark.parametrize("is_fresh", [False, True], ids=["static", "fresh"])
@pytest.mark.parametrize("kind", RESULTS)
def test_results_come_in_the_containers_of_the_function(
    lab: Lab, kind: str, is_fresh: bool
) -> None:
    def function(x: Tensor) -> Any:
        return RESULTS[kind](x * 2 + 1, x.sin())

    def check(found: Any, x: Tensor) -> None:
        leaves, spec = tree_flatten(found)
        rights, expected = tree_flatten(function(x))
        assert spec == expected
        torch.testing.assert_close(leaves, rights)

    ladder, x = GraphLadder(fresh_outputs=is_fresh), fresh(lab, 4, 4)
    check(ladder.capture("k", function, x), x)
    for _ in range(3):
        given = fresh(lab, 4, 4)
        check(ladder("k", given), given)
        check(ladder("k"), x)


@pytest.mark.parametrize("breaks", [False, True])
def test_fresh_results_may_be_none_views_and_tensors_from_before(lab: Lab, breaks: bool) -> None:
    out = torch.zeros(4, device=lab.device)
    relu = cgraph.eager_break(torch.relu) if breaks else torch.relu

    def nothing(x: Tensor) -> None:
        out.copy_(relu(x) * 2)

    def kept(x: Tensor) -> Tensor:
        out.copy_(relu(x) * 2)
        return out

    def view(x: Tensor) -> Tensor:
        out.copy_(relu(x) * 2)
        return x[1:]

    ladder = GraphLadder(fresh_outputs=True)
    for key, function in (("nothing", nothing), ("kept", kept), ("view", view)):
        ladder.capture(key, function, fresh(lab, 4))
        for _ in range(3):
            x = fresh(lab, 4)
            result = ladder(key, x)
            assert torch.equal(out, torch.relu(x) * 2)
            if key == "nothing":
                assert result is None
            else:
                assert torch.equal(result, out if key == "kept" else x[1:])


def test_a_result_that_nobody_owns_is_no_argument_of_a_later_capture(lab: Lab) -> None:
    def second(h: Tensor) -> Tensor:
        return torch.sin(h * 2 + 1) + torch.cos(h * 3) * h

    x = fresh(lab, 8, 8)
    weak, strong = GraphLadder(), GraphLadder(weak_outputs=False)
    h = weak.capture(0, lambda x: x * 2 + 1, x)
    with pytest.raises(
        ArgumentError, match=r"args\[0\] lies in memory of the pool that nobody owns"
    ):
        weak.capture(1, second, h)
    h = strong.capture(0, lambda x: x * 2 + 1, x)
    strong.capture(1, second, h)
    x = fresh(lab, 8, 8)
    assert torch.allclose(strong(1, strong(0, x)), second(x * 2 + 1), atol=1e-5)


def test_a_tensor_on_another_kind_of_device_is_no_argument(lab: Lab) -> None:
    elsewhere = torch.ones(3, device="meta")
    said = rf"args\[1\] is on meta, expected {lab.device}.*or give a number"
    with pytest.raises(ArgumentError, match=said):
        GraphLadder().capture("k", lambda x, _: x * 2, fresh(lab, 3), elsewhere)


def test_wrong_calls_name_what_was_expected(lab: Lab) -> None:
    layer = Layer(lab)
    ladder = ladder_of(layer)
    with pytest.raises(ArgumentError, match="key is 3, expected one that was captured: 8, 4, 2, 1"):
        ladder(3, layer.x[:3])
    with pytest.raises(ArgumentError, match=r"shape \[3, 16\].*expected.*\[4, 16\]"):
        ladder(4, layer.x[:3])
    with pytest.raises(ArgumentError, match=r"args\[0\] of the graph of 4 is 'x', expected a tens"):
        ladder(4, "x")
    with pytest.raises(ArgumentError, match="expected a hashable value"):
        ladder.capture([4], layer, layer.x)
    with pytest.raises(ArgumentError, match="pool"):
        GraphLadder("pool")  # type: ignore[arg-type]
    ladder.clear()
    assert ladder.keys == ()
    with pytest.raises(StateError, match=r"clear\(\) has dropped it"):
        ladder(4)


def test_a_capture_that_fails_leaves_the_one_before(lab: Lab) -> None:
    layer = Layer(lab)
    ladder = ladder_of(layer)

    def wrong(x: Tensor) -> Tensor:
        raise KeyError("mine")

    def late() -> None:
        raise KeyError("mine")

    for fn, options in ((wrong, {}), (layer, {"after": late}), (layer, {"before": late})):
        with pytest.raises(KeyError, match="mine"):
            ladder.capture(4, fn, layer.x[:4], **options)
        x = fresh(lab, 4, 16)
        assert torch.allclose(ladder(4, x), layer(x), atol=1e-5)


def test_a_key_is_captured_anew_into_another_pool(lab: Lab) -> None:
    layer = Layer(lab)
    ladder = ladder_of(layer)
    first = ladder.graph(4).pool()
    with torch.no_grad():
        ladder.capture(4, layer, layer.x[:4], pool=cgraph.MemPool())
    assert ladder.graph(4).pool() != first
    assert ladder.bytes(4) >= 0
    x = fresh(lab, 4, 16)
    assert torch.allclose(ladder(4, x), layer(x), atol=1e-5)


def test_a_ladder_keeps_what_its_graphs_read(lab: Lab) -> None:
    ladder = GraphLadder()

    def capture() -> weakref.ref[Tensor]:
        kept = torch.full((3,), 2.0, device=lab.device)
        ladder.capture("k", lambda x: x * kept, torch.ones(3, device=lab.device))
        return weakref.ref(kept)

    kept = capture()
    gc.collect()
    assert kept() is not None
    assert ladder("k").tolist() == [2.0, 2.0, 2.0]
    ladder.clear()
    gc.collect()
    assert kept() is None


def test_a_capture_inside_a_capture_is_refused(lab: Lab) -> None:
    x, graph, ladder = fresh(lab, 4), cgraph.CUDAGraph(), GraphLadder()
    with cgraph.graph(graph):
        with pytest.raises(CaptureError, match="inside a capture"):
            ladder.capture("k", torch.sin, x)
        x * 2


@pytest.mark.parametrize("code", [2, 719])
def test_after_each_driver_call_that_fails_once_a_ladder_is_right_and_nothing_leaks(
    sim: SimLab, code: int
) -> None:
    simulator, layer = sim.simulator, Layer(sim)

    def run() -> None:
        ladder = ladder_of(layer, (8, 3))
        for rows in ladder.keys:
            x = fresh(sim, rows, 16)
            assert torch.allclose(ladder(rows, x), layer(x), atol=1e-5)
        with torch.no_grad():
            ladder.capture("later", lambda x: x * 2, layer.x, run=False)
        assert torch.equal(ladder("later"), layer.x * 2)

    start = len(simulator.calls())
    run()
    calls = len(simulator.calls()) - start
    baseline, failures = sim.settled(), 0
    for number in range(calls):
        simulator.fail_call(number, code)
        try:
            run()
        except (CgraphError, RuntimeError) as error:
            assert any(part in str(error) for part in ("cu", f"({code})", "out of memory")), error
            failures += 1
            error.__traceback__ = None
        simulator.clear_faults()
        run()
        assert sim.settled() == baseline
    assert failures >= 20


def test_a_capture_that_does_not_run_launches_nothing_before_the_first_call(lab: Lab) -> None:
    x, steps = torch.ones(4, 4, device=lab.device), torch.zeros(1, device=lab.device)
    ladder = GraphLadder()

    def step() -> Tensor:
        steps.add_(1)
        return x * 2

    step()
    with torch.no_grad():
        ladder.capture("one", step, run=False)
    assert steps.item() == 1
    assert torch.equal(ladder("one"), x * 2)
    assert steps.item() == 2
    layer = Layer(lab)
    with torch.no_grad(), pytest.raises(CaptureError, match=r"capture\(run=False\)"):
        ladder.capture("two", layer, layer.x, before=lambda: layer(layer.x), run=False)
    assert ladder.keys == ("one",)


def test_ladders_that_two_threads_capture_at_once_are_both_right(lab: Lab) -> None:
    torch.nn.Linear(16, 16).to(lab.device)(fresh(lab, 2, 16))
    # torch up to 2.11 draws no random numbers in a thread while another one captures.
    work = [(Layer(lab, 16), [fresh(lab, 8, 16) for _ in range(3)]) for _ in range(2)]
    wrong: list[object] = []

    def capture(layer: Layer, xs: list[Tensor]) -> None:
        try:
            for _ in range(5):
                ladder = GraphLadder(cgraph.MemPool())
                with torch.no_grad():
                    ladder.capture(8, layer, xs[0].clone(), before=lambda: layer(xs[0]))
                    ladders.append((ladder, layer, xs))
        except Exception as error:
            wrong.append(error)

    ladders: list[tuple[GraphLadder, Layer, list[Tensor]]] = []
    threads = [threading.Thread(target=capture, args=one) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(ladders) == 10
    for ladder, layer, xs in ladders:
        for x in xs:
            assert torch.allclose(ladder(8, x), layer(x), atol=1e-4)


def test_nothing_is_kept_in_a_file_on_the_simulator(sim: SimLab, tmp_path: Path) -> None:
    layer = Layer(sim)
    ladder = GraphLadder()
    with torch.no_grad(), ladder.kept_in(tmp_path / "graphs") as kept:
        layer(layer.x)
        ladder.capture(8, layer, layer.x)
        with pytest.raises(StateError, match=r"kept_in\(\) in a block of .*graphs: end that first"):
            ladder.kept_in(tmp_path / "other").__enter__()
    assert str(kept).endswith("8: captured, as graphs of the simulator are not kept")
    assert not list(tmp_path.iterdir())
    assert torch.allclose(ladder(8, layer.x), layer(layer.x), atol=1e-5)
    with ladder.kept_in(tmp_path / "graphs"):
        pass
