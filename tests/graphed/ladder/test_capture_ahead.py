"""Captures ahead of time, frozen functions, evictions and reports."""

from __future__ import annotations

import gc
import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from cgraph.errors import ArgumentError, StateError
from lab import Lab, SimLab, fresh
from networks import network

SIZES = [1, 2, 4, 8]


def affine(x: Tensor) -> Tensor:
    return x * 2 + 1


@contextmanager
def captures() -> Iterator[list[int]]:
    """Count captures that begin."""
    found: list[int] = []
    with cgraph.register_graph_capture_start_hook(lambda graph: found.append(1)):
        yield found


def sizes_of(function: Any) -> list[int]:
    """Return the rows of each key, in the order of their first call."""
    return [int(key.key.split("[")[1].split(",")[0].rstrip("]")) for key in function.report().keys]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_all_sizes_are_captured_the_largest_first(lab: Lab) -> None:
    graphed = cgraph.graphed(affine, sizes=[2, 8, 1, 4])
    with captures() as found:
        assert graphed.capture(fresh(lab, 3, 2)) is graphed
    assert sizes_of(graphed) == [8, 4, 2, 1]
    assert len(found) == 4
    report = graphed.report()
    assert (report.captured, report.replays) == (4, 0)


def test_a_key_is_captured_ahead_again_where_its_guards_do_not_hold(lab: Lab) -> None:
    net = nn.Linear(3, 3, device=lab.device).requires_grad_(False)
    graphed, x = cgraph.graphed(net), fresh(lab, 2, 3)
    graphed.capture(x)
    with captures() as found:
        graphed.capture(x)
        assert found == []
        net.weight = nn.Parameter(fresh(lab, 3, 3), requires_grad=False)
        graphed.capture(x)
        assert found == [1]
    graphed.freeze()
    assert torch.equal(graphed(x), net(x))
    assert graphed.report().replays == 1


@pytest.mark.parametrize("rows", [1, 3, 8, 20])
def test_after_a_capture_of_all_sizes_no_call_captures(lab: Lab, rows: int) -> None:
    net = network(lab)
    graphed = cgraph.graphed(net, sizes=SIZES)
    with torch.no_grad():
        graphed.capture(fresh(lab, rows, 6))
        with captures() as found:
            for count in range(1, 9):
                x = fresh(lab, count, 6)
                assert torch.allclose(graphed(x), net(x), atol=1e-5)
    assert not found
    assert graphed.report().replays == 8


def test_sizes_can_be_given_for_one_capture(lab: Lab) -> None:
    graphed = cgraph.graphed(affine)
    graphed.capture(fresh(lab, 3, 2), sizes=[5, 1])
    assert sizes_of(graphed) == [5, 1]
    with captures() as found:
        for rows in (5, 1):
            x = fresh(lab, rows, 2)
            assert torch.equal(graphed(x), affine(x))
    assert not found


def test_without_sizes_the_key_of_the_arguments_is_captured(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda x, *, scale: x * scale)
    graphed.capture(fresh(lab, 3, 2), scale=3)
    with captures() as found:
        x = fresh(lab, 3, 2)
        assert torch.equal(graphed(x, scale=3), x * 3)
    assert not found


def test_a_second_capture_of_all_sizes_captures_nothing(lab: Lab) -> None:
    graphed = cgraph.graphed(affine, sizes=SIZES)
    graphed.capture(fresh(lab, 3, 2))
    with captures() as found:
        graphed.capture(fresh(lab, 5, 2))
    assert not found
    assert graphed.report().captured == 4


def test_indices_of_a_capture_stay_in_range(lab: Lab) -> None:
    table = nn.Embedding(5, 3, device=lab.device)
    graphed = cgraph.graphed(lambda ids: table(ids), sizes=SIZES)
    ids = torch.tensor([4, 3, 2], device=lab.device)
    with torch.no_grad():
        graphed.capture(ids)
        assert torch.equal(graphed(ids), table(ids))


def test_a_capture_of_a_tensor_without_the_dimension_is_refused(lab: Lab) -> None:
    graphed = cgraph.graphed(affine, sizes=SIZES, dim=2)
    words = r"no tensor among the arguments of affine has.*dim=2"
    with pytest.raises(ArgumentError, match=words):
        graphed.capture(fresh(lab, 3, 2))


def test_no_rows_are_not_enough_for_a_capture(lab: Lab) -> None:
    graphed = cgraph.graphed(affine, sizes=SIZES)
    with pytest.raises(ArgumentError, match="no rows"):
        graphed.capture(fresh(lab, 0, 2))


def test_a_bar_on_stderr_counts_to_the_number_of_sizes(
    sim: SimLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    cgraph.graphed(affine, sizes=SIZES).capture(fresh(sim, 3, 2))
    assert "capture affine" in terminal.getvalue()
    assert "0/4" in terminal.getvalue()


def test_without_progress_nothing_is_printed(
    sim: SimLab, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    cgraph.graphed(affine, sizes=SIZES).capture(fresh(sim, 3, 2), progress=False)
    assert terminal.getvalue() == ""
    assert capsys.readouterr().out == ""


def test_what_the_user_had_frozen_stays_frozen(lab: Lab) -> None:
    gc.collect()
    gc.freeze()
    try:
        before = gc.get_freeze_count()
        cgraph.graphed(affine, sizes=SIZES).capture(fresh(lab, 3, 2))
        # Frozen objects that die are no longer counted.
        assert before * 0.9 < gc.get_freeze_count() <= before
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("on_fail", ["eager", "raise"])
def test_what_a_capture_raises_comes_out(lab: Lab, on_fail: Any) -> None:
    def synced(x: Tensor) -> Tensor:
        return x * x.sum().item()

    graphed = cgraph.graphed(synced, on_fail=on_fail, sizes=SIZES)
    with pytest.raises(RuntimeError, match="captur"):
        graphed.capture(fresh(lab, 3, 2))
    assert graphed.report().captured == 0


def wide(x: Tensor) -> Tensor:
    return (x.repeat(1, 64) * 2).exp().sum(1)


def test_all_sizes_share_one_pool_about_as_large_as_the_largest_alone(sim: SimLab) -> None:
    handles = cgraph.graph_pool_handle(), cgraph.graph_pool_handle()
    one = cgraph.graphed(wide, pool=handles[0])
    one.capture(fresh(sim, 1024, 64))
    many = cgraph.graphed(wide, sizes=[16, 64, 128, 256, 512, 1024], pool=handles[1])
    many.capture(fresh(sim, 16, 64))
    pools = sim.simulator.pools.known
    alone, together = (
        sum(size for _, size in pools[tuple(handle)].segments()) for handle in handles
    )
    assert alone <= together <= 1.25 * alone


def test_two_functions_can_share_a_pool(lab: Lab) -> None:
    handle = cgraph.graph_pool_handle()
    first, second = (cgraph.graphed(fn, pool=handle) for fn in (affine, torch.neg))
    for _ in range(3):
        x = fresh(lab, 5)
        assert torch.equal(first(x).clone(), affine(x))
        assert torch.equal(second(x).clone(), -x)


def test_a_frozen_function_replays_what_it_has(lab: Lab) -> None:
    graphed = cgraph.graphed(affine, sizes=SIZES)
    assert not graphed.is_frozen
    assert graphed.capture(fresh(lab, 3, 2)).freeze() is graphed
    assert graphed.is_frozen
    for rows in range(1, 9):
        x = fresh(lab, rows, 2)
        assert torch.equal(graphed(x), affine(x))


def test_a_frozen_function_does_not_follow_a_parameter_that_moves(lab: Lab) -> None:
    net = network(lab)
    graphed = cgraph.graphed(net)
    with torch.no_grad():
        graphed(fresh(lab, 3, 6))
        graphed.freeze()
        kept = net[0].weight.data
        net[0].weight.data = kept * 2
        with pytest.raises(StateError, match="frozen"):
            graphed(fresh(lab, 3, 6))


def test_after_a_reset_a_frozen_function_captures_again(lab: Lab) -> None:
    graphed = cgraph.graphed(affine)
    graphed(fresh(lab, 3))
    graphed.freeze()
    graphed.reset()
    assert not graphed.is_frozen
    assert graphed.report().keys == ()
    x = fresh(lab, 5)
    assert torch.equal(graphed(x), affine(x))


def test_a_reset_lets_the_memory_go(sim: SimLab) -> None:
    graphed = cgraph.graphed(affine, sizes=SIZES)
    graphed.capture(fresh(sim, 3, 2))
    graphed(fresh(sim, 3, 2))
    graphed.reset()
    gc.collect()
    sim.simulator.synchronize()
    sim.simulator.device.collect()
    assert not any(sim.simulator.live().values())


def states(function: Any) -> list[tuple[int, str]]:
    return list(zip(sizes_of(function), [one.state for one in function.report().keys], strict=True))


def test_an_evicted_size_serves_padded_calls_again(lab: Lab) -> None:
    graphed = cgraph.graphed(affine, sizes=[4, 8], max_graphs=1)
    for rows in (3, 7, 3, 8, 2, 3):
        x = fresh(lab, rows)
        assert torch.equal(graphed(x), affine(x))
    assert sum(state == "captured" for _, state in states(graphed)) == 1


def test_a_result_of_an_evicted_graph_stays_as_it_is(lab: Lab) -> None:
    graphed = cgraph.graphed(affine, max_graphs=1)
    x = fresh(lab, 50)
    held = graphed(x)
    for rows in (51, 52, 53):
        graphed(fresh(lab, rows))
    assert torch.equal(held, affine(x))


def test_the_process_reports_all_functions_that_live(lab: Lab) -> None:
    first, second = cgraph.graphed(affine), cgraph.graphed(wide)
    first(fresh(lab, 3))
    names = [one.name for one in cgraph.report().functions]
    assert {"affine", "wide"} <= set(names)
    assert first.report() in cgraph.report().functions
    assert second.report().keys == ()
    del second
    gc.collect()
    assert "wide" not in [one.name for one in cgraph.report().functions]


def test_where_a_function_is_defined_is_in_its_report(lab: Lab) -> None:
    assert (cgraph.graphed(affine).report().where or "").startswith("ladder/test_capture_ahead.py:")
