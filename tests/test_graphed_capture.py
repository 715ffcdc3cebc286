"""Captures ahead of time, frozen functions, evictions and reports; traps T151 and T152."""

from __future__ import annotations

import gc
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
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
    """Counts captures that begin."""
    found: list[int] = []
    with cgraph.register_graph_capture_start_hook(lambda graph: found.append(1)):
        yield found


def sizes_of(function: Any) -> list[int]:
    """The rows of each key, in the order in which they were met."""
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


def test_a_capture_leaves_its_arguments_and_the_modules_as_they_were(lab: Lab) -> None:
    norm = nn.BatchNorm1d(3, device=lab.device)
    graphed = cgraph.graphed(norm, sizes=SIZES[1:])
    x = fresh(lab, 5, 3)
    before = [one.clone() for one in (x, *norm.buffers())]
    with torch.no_grad():
        graphed.capture(x)
    assert all(torch.equal(*pair) for pair in zip(before, (x, *norm.buffers()), strict=True))


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


@pytest.mark.parametrize("sizes", [None, SIZES])
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("was_enabled", [False, True])
def test_the_garbage_collector_is_frozen_inside_and_as_before_afterwards(
    lab: Lab, sizes: Any, fails: bool, was_enabled: bool
) -> None:
    gc.unfreeze()  # what is frozen around each test
    inside, before = [], gc.get_freeze_count()

    def watched(x: Tensor) -> Tensor:
        inside.append(gc.get_freeze_count() > 0 or not gc.isenabled())
        if fails:
            raise RuntimeError("no")
        return x + 1

    graphed = cgraph.graphed(watched, sizes=sizes)
    if not was_enabled:
        gc.disable()
    try:
        if fails:
            with pytest.raises(RuntimeError, match="no"):
                graphed.capture(fresh(lab, 3, 2))
        else:
            graphed.capture(fresh(lab, 3, 2))
        assert gc.isenabled() is was_enabled
    finally:
        gc.enable()
    assert all(inside)
    assert gc.get_freeze_count() == before


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


def test_a_capture_that_was_mended_serves_calls_that_ran_eagerly_before(lab: Lab) -> None:
    is_broken = True

    def maybe(x: Tensor) -> Tensor:
        return x * (x.sum().item() if is_broken else 2)

    graphed = cgraph.graphed(maybe, max_graphs=1)
    with pytest.warns(UserWarning, match="runs eagerly"):
        graphed(fresh(lab, 3))
    is_broken = False
    graphed.capture(fresh(lab, 3))
    x = fresh(lab, 3)
    assert torch.equal(graphed(x), x * 2)
    (key,) = graphed.report().keys
    assert (key.state, key.reason, key.replays, key.eager_calls) == ("captured", None, 1, 1)
    graphed(fresh(lab, 4))
    with captures() as found:
        graphed(fresh(lab, 3))
    assert found, "an evicted key is captured again"


def test_a_capture_of_a_parameter_that_moved_is_made_anew(lab: Lab) -> None:
    net = network(lab)
    graphed = cgraph.graphed(net)
    with torch.no_grad():
        graphed.capture(fresh(lab, 3, 6))
        net[0].weight.data = net[0].weight.data * 2
        graphed.capture(fresh(lab, 3, 6))
        with captures() as found:
            x = fresh(lab, 3, 6)
            assert torch.allclose(graphed(x), net(x), atol=1e-5)
    assert not found


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


def test_results_lie_in_the_pool_that_was_given(lab: Lab) -> None:
    handle = cgraph.graph_pool_handle()
    graphed = cgraph.graphed(affine, sizes=SIZES, pool=handle)
    graphed.capture(fresh(lab, 3, 2))
    for rows in (1, 3, 8):
        assert lab.in_pool(graphed(fresh(lab, rows, 2)), handle)


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


@pytest.mark.parametrize("on_fail", ["eager", "raise"])
def test_a_frozen_function_names_the_key_that_is_missing(lab: Lab, on_fail: Any) -> None:
    graphed = cgraph.graphed(affine, on_fail=on_fail)
    graphed(fresh(lab, 3, 2))
    graphed.freeze()
    with pytest.raises(StateError, match=r"affine was frozen.*x: float32\[5, 7\].*capture it"):
        graphed(fresh(lab, 5, 7))
    with pytest.raises(StateError, match="float64"):
        graphed(fresh(lab, 3, 2).double())
    x = fresh(lab, 3, 2)
    assert torch.equal(graphed(x), affine(x))
    assert graphed.report().captured == 1


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


def test_a_capture_ahead_is_refused_of_a_frozen_function(lab: Lab) -> None:
    graphed = cgraph.graphed(affine, sizes=SIZES)
    graphed.capture(fresh(lab, 3, 2), sizes=[8]).freeze()
    with captures() as found, pytest.raises(StateError, match=r"frozen.*x: float32\[4, 2\]"):
        graphed.capture(fresh(lab, 3, 2))
    assert not found
    graphed.capture(fresh(lab, 3, 2), sizes=[8])


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


def test_the_graph_that_was_not_used_for_longest_is_evicted(lab: Lab) -> None:
    graphed = cgraph.graphed(affine, max_graphs=2)
    for rows in (3, 4, 3, 5):
        x = fresh(lab, rows)
        assert torch.equal(graphed(x), affine(x))
    assert states(graphed) == [(3, "captured"), (4, "evicted"), (5, "captured")]
    x = fresh(lab, 4)
    assert torch.equal(graphed(x), affine(x))
    assert states(graphed) == [(3, "evicted"), (4, "captured"), (5, "captured")]
    again = graphed.report().keys[1].rerecorded
    assert [(one.reason, one.argument, one.count) for one in again] == [("evicted", None, 1)]
    assert [key.replays for key in graphed.report().keys] == [2, 2, 1]


def test_a_padded_call_is_a_use_of_its_size(lab: Lab) -> None:
    graphed = cgraph.graphed(affine, sizes=[4, 8, 16], max_graphs=2)
    for rows in (4, 8, 3, 16):
        x = fresh(lab, rows)
        assert torch.equal(graphed(x), affine(x))
    assert states(graphed) == [(4, "captured"), (8, "evicted"), (16, "captured")]


def test_an_evicted_size_serves_padded_calls_again(lab: Lab) -> None:
    graphed = cgraph.graphed(affine, sizes=[4, 8], max_graphs=1)
    for rows in (3, 7, 3, 8, 2, 3):
        x = fresh(lab, rows)
        assert torch.equal(graphed(x), affine(x))
    assert sum(state == "captured" for _, state in states(graphed)) == 1


def test_graphs_go_when_they_hold_too_many_bytes(sim: SimLab) -> None:
    one = cgraph.graphed(affine)
    one(fresh(sim, 100))
    bytes_of_one = one.report().memory_bytes
    assert bytes_of_one > 0
    most = 2 * bytes_of_one + 900  # with what two calls are copied to
    graphed = cgraph.graphed(affine, max_bytes=most)
    for rows in (100, 101, 102, 103):
        x = fresh(sim, rows)
        assert torch.equal(graphed(x), affine(x))
    assert [state for _, state in states(graphed)] == ["evicted"] * 2 + ["captured"] * 2
    assert graphed.report().memory_bytes <= 2 * bytes_of_one


def test_one_graph_stays_although_it_alone_holds_too_many_bytes(lab: Lab) -> None:
    graphed = cgraph.graphed(affine, max_bytes=1)
    for rows in (100, 101):
        x = fresh(lab, rows)
        assert torch.equal(graphed(x), affine(x))
    assert [state for _, state in states(graphed)] == ["evicted", "captured"]


def test_a_result_of_an_evicted_graph_stays_as_it_is(lab: Lab) -> None:
    graphed = cgraph.graphed(affine, max_graphs=1)
    x = fresh(lab, 50)
    held = graphed(x)
    for rows in (51, 52, 53):
        graphed(fresh(lab, rows))
    assert torch.equal(held, affine(x))


def test_a_report_names_the_argument_that_moved_and_the_line(lab: Lab) -> None:
    @cgraph.graphed(static_argnames="cache")
    def stored(x: Tensor, cache: Tensor) -> Tensor:
        cache.add_(x)
        return cache * 2

    for _ in range(3):
        x, cache = fresh(lab, 4), fresh(lab, 4)
        expected = (cache + x) * 2
        assert torch.equal(stored(x, cache), expected)  # the call
        assert torch.equal(cache * 2, expected)
    (key,) = stored.report().keys
    line = next(
        number
        for number, text in enumerate(Path(__file__).read_text("utf-8").splitlines(), 1)
        if text.endswith("# the call")
    )
    (again,) = key.rerecorded
    assert (again.reason, again.argument, again.count) == ("moved", "cache", 2)
    assert again.where == f"tests/test_graphed_capture.py:{line}"
    assert key.replays == 3


def test_an_argument_that_moves_again_and_again_runs_eagerly(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda x, at: x + at, static_argnums=1, max_recording=2)
    kept = []
    with pytest.warns(UserWarning, match="moved too often: at, 3 times.*write to it in place"):
        for _ in range(6):
            kept.append((fresh(lab, 4), fresh(lab, 4)))
            assert torch.equal(graphed(*kept[-1]), kept[-1][0] + kept[-1][1])
    (key,) = graphed.report().keys
    assert (key.state, key.replays, key.eager_calls) == ("eager", 3, 3)


def test_a_report_has_reasons_and_lines_of_eager_keys(lab: Lab) -> None:
    def synced(x: Tensor) -> Tensor:
        return x * x.sum().item()

    graphed = cgraph.graphed(synced)
    with pytest.warns(UserWarning, match=r"runs eagerly for \(x: float32\[3\]"):
        graphed(fresh(lab, 3))
    (key,) = graphed.report().keys
    assert key.state == "eager"
    assert key.reason
    assert key.where is not None
    assert key.where.startswith("tests/test_graphed_capture.py:")
    assert key.advice
    assert (key.nodes, key.memory_bytes, key.replays, key.eager_calls) == (None, None, 0, 1)


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


def test_reports_are_text_numbers_and_a_page(lab: Lab, tmp_path: Path) -> None:
    graphed = cgraph.graphed(affine, sizes=SIZES)
    for rows in (3, 4, 1):
        graphed(fresh(lab, rows, 2))
    for report in (graphed.report(), cgraph.report()):
        assert "affine" in str(report)
        assert "float32[4, 2]" in str(report)
        assert json.loads(json.dumps(report.to_dict())) == report.to_dict()
        page = report.html(tmp_path / "report.html")
        assert page == (tmp_path / "report.html").read_text("utf-8")
        assert "float32[4, 2]" in page
    (four, one) = graphed.report().to_dict()["keys"]
    assert (four["replays"], one["replays"]) == (2, 1)
    assert four["nodes"] > 0
    assert four["memory_bytes"] > 0
    assert four["capture_seconds"] > 0


def test_where_a_function_is_defined_is_in_its_report(lab: Lab) -> None:
    assert (cgraph.graphed(affine).report().where or "").startswith(
        "tests/test_graphed_capture.py:"
    )
