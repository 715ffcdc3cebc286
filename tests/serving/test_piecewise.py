"""`PiecewiseBackend`."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from cgraph.errors import CaptureError, CgraphWarning, StateError
from cgraph.piecewise import PiecewiseBackend, PiecewiseConfig, mark_size
from lab import Lab, SimLab, fresh
from served import OPS, SIZES, Decoder, Served, calls

pytestmark = pytest.mark.usefixtures("own_compiler")


def test_all_sizes_are_as_in_eager_and_sizes_to_capture_are_replayed(lab: Lab) -> None:
    served = Served(lab, Decoder())
    for _ in range(4):
        for size in (8, 5, 4, 2, 1, 3):
            served.check(size)
    counters = served.backend.counters
    assert (counters.graphs, counters.captures) == (1, 4)
    # The first call of all ran for any size, and each size has one warm-up.
    assert counters.replays == 4 * 4 - 4 - 4 - 1
    assert {one.size for one in served.backend.report().sizes if one.is_captured} == {*SIZES}


def test_the_number_of_plain_calls_before_a_capture_is_exact(lab: Lab) -> None:
    for warmups in (0, 1, 3):
        torch.compiler.reset()
        served = Served(lab, Decoder(), warmups=warmups, capture_sizes=[4])
        served.check(4)
        for number in range(warmups + 1):
            assert served.backend.counters.captures == 0, number
            served.check(4)
        assert served.backend.counters.captures == 1
        assert served.backend.counters.uncaptured == warmups + 1


def test_a_replay_calls_the_splitting_operator_with_new_values(lab: Lab) -> None:
    served = Served(lab, Decoder(), capture_sizes=[4])
    for _ in range(3):
        served.check(4)
    calls.clear()
    served.check(4)
    # Once for each layer, as eager does.
    assert calls == [4] * 6
    report = served.backend.report()
    assert sum(one.is_splitting for one in report.pieces) == 3
    assert report.sizes[0].bridge_bytes == 0


class Mixed(nn.Module):
    """Splitting operators that return tensors, one of which needs the host."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        one, total = torch.ops.served.mixed(x * 2)
        y = torch.ops.served.routed(one + total)
        return y * 3, total + 1


def test_results_of_splitting_operators_are_bridged_and_their_bytes_reported(lab: Lab) -> None:
    ops = ["served::mixed", "served.routed"]
    served = Served(lab, Mixed(), splitting_ops=ops, capture_sizes=[4])
    for _ in range(5):
        served.check(4)
    assert served.backend.counters.replays == 2
    # [4, 16] twice, and [16].
    assert served.backend.report().sizes[0].bridge_bytes == (2 * 4 * 16 + 16) * 4


def test_results_are_the_callers_own_unless_they_are_static(lab: Lab) -> None:
    for outputs in ("fresh", "static"):
        torch.compiler.reset()
        served = Served(lab, Decoder(), capture_sizes=[4], outputs=outputs)
        for _ in range(2):
            served.check(4)
        held = [(y, y.clone()) for y in (served.check(4) for _ in range(3))]
        same = [torch.equal(one, copied) for one, copied in held]
        assert all(same) == (outputs == "fresh")
        assert (len({one.data_ptr() for one, _ in held}) == 1) == (outputs == "static")


def test_one_backend_serves_one_model_and_names_the_guard(lab: Lab) -> None:
    served = Served(lab, Decoder())
    served.check(4)
    with pytest.raises(RuntimeError, match=r"(?s)only be called once.*dtype mismatch"):
        served.fast(served.rows(4).double())
    torch.compiler.reset()
    other = torch.compile(Decoder().to(lab.device), backend=served.backend)
    with pytest.raises(RuntimeError, match="make one backend for each model"):
        other(served.rows(4))


def test_a_model_without_an_open_size_is_refused(lab: Lab) -> None:
    served = Served(lab, Decoder(), marked=False)
    with pytest.raises(RuntimeError, match=r"without a symbolic size.*mark_size\(x, 0\)"):
        served.fast(served.rows(4))


def test_two_open_sizes_are_refused_by_their_inputs(lab: Lab) -> None:
    def model(x: Tensor, y: Tensor) -> Tensor:
        return x.sum() + y.sum()

    fast = torch.compile(model, backend=PiecewiseBackend(compiler="eager"))
    x, y = fresh(lab, 4), fresh(lab, 5)
    mark_size(x)
    mark_size(y)
    with pytest.raises(RuntimeError, match=r"2 symbolic sizes \(u0 of L_x_; u1 of L_y_\)"):
        fast(x, y)


def test_sizes_1_and_2_are_replayed_where_backed_sizes_are_oblivious(lab: Lab) -> None:
    served = Served(lab, Decoder(), marked=False)
    config: Any = torch.fx.experimental._config
    with config.patch(backed_size_oblivious=True):
        for size in (8, 2, 1, 4, 3) * 3:
            x = fresh(lab, size, 16)
            torch._dynamo.mark_dynamic(x, 0)
            assert torch.allclose(served.fast(x), served.eager(x), atol=1e-5)
    assert served.backend.counters.captures == 4


@pytest.mark.filterwarnings("ignore")
def test_a_size_is_compiled_for_before_its_capture(lab: Lab) -> None:
    served = Served(
        lab,
        Decoder(),
        capture_sizes=[2, 4],
        compile_sizes=[4],
        warmups=0,
        compiler="inductor",
        cache=False,
        inductor_options={"max_autotune": False},
    )
    sizes: list[int] = []

    def call(size: int) -> None:
        sizes.append(size)
        served.check(size)

    served.backend.warm_up(call, progress=False, freeze=True)
    # The first call of all runs for any size.
    assert sizes == [4, 4, 4, 2]
    assert served.backend.counters.captures == 2


def test_sizes_that_were_captured_before_a_warm_up_share_its_pool(lab: Lab) -> None:
    served = Served(lab, Decoder(), capture_sizes=[2, 4, 8])
    for _ in range(3):
        served.check(8)
    served.backend.warm_up(served.check, progress=False)
    assert [one.reserved > 0 for one in served.backend.report().sizes] == [False, False, True]


def test_results_that_lie_in_no_graph_are_returned_at_each_call(lab: Lab) -> None:
    out = torch.zeros(16, device=lab.device)

    class Sums(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out.copy_(torch.ops.served.routed(x * 2).sum(0))
            return out

    served = Served(lab, Sums(), splitting_ops=["served::routed"], capture_sizes=[4])
    for _ in range(6):
        x = served.rows(4)
        got = served.fast(x).clone()
        assert torch.allclose(got, served.eager(x), atol=1e-4)
    assert served.backend.counters.replays == 3


def test_gradients_are_refused(lab: Lab) -> None:
    served = Served(lab, Decoder())
    with torch.enable_grad(), pytest.raises(RuntimeError, match=r"under torch\.no_grad\(\)"):
        served.fast(served.rows(4))


def test_inference_mode_and_autocast_are_those_of_the_calls(lab: Lab) -> None:
    served = Served(lab, Decoder(), capture_sizes=[4])
    with torch.inference_mode(), torch.autocast(lab.device, torch.bfloat16):
        for _ in range(5):
            x = served.rows(4)
            got, want = served.fast(x), served.eager(x)
            assert got.dtype == want.dtype
            assert torch.allclose(got, want, atol=1e-2)
    assert served.backend.counters.replays == 2


def test_warm_up_captures_the_largest_first_into_memory_that_all_share(lab: Lab) -> None:
    served = Served(lab, Decoder(width=16), capture_sizes=[2, 4, 8])
    sizes: list[int] = []

    def call(size: int) -> None:
        sizes.append(size)
        served.check(size)

    served.backend.warm_up(call, progress=False, freeze=True)
    assert sizes == [8, 8, 8, 4, 4, 2, 2]
    first, *others = reversed(served.backend.report().sizes)
    assert first.reserved > 0
    assert [one.reserved for one in others] == [0, 0]
    for size in (8, 4, 2, 3):
        served.check(size)
    assert served.backend.counters.replays == 3
    served.backend.clear()
    with pytest.raises(StateError, match="capturing detected at an inappropriate time"):
        for _ in range(2):
            served.check(4)


def test_a_dry_run_tells_the_bytes_of_all_sizes_and_leaves_no_graph(lab: Lab) -> None:
    served = Served(lab, Decoder(width=16), capture_sizes=[2, 4, 8])
    found = served.backend.dry_run(lambda size: served.fast(served.rows(size)), progress=False)
    assert [one.size for one in found.sizes if one.is_captured] == [2, 4, 8]
    assert found.device > 0
    assert not any(one.is_captured for one in served.backend.report().sizes)
    here = cgraph.memory()
    assert (here.graphs, sum(one.mapped for one in here.pools)) == ((), 0)
    served.backend.warm_up(lambda size: served.fast(served.rows(size)), progress=False)
    after = served.backend.report()
    assert [one.reserved for one in after.sizes] == [one.reserved for one in found.sizes]
    with pytest.raises(StateError, match="dry_run\\(\\) after a capture"):
        served.backend.dry_run(lambda size: None)
    assert all(one.is_captured for one in served.backend.report().sizes)


def test_a_split_model_captures_all_sizes_though_a_file_could_keep_their_graphs(
    lab: Lab, tmp_path: Path
) -> None:
    file = tmp_path / "graphs"
    served = Served(lab, Decoder(), graph_file=str(file))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", CgraphWarning)
        served.backend.warm_up(lambda size: served.fast(served.rows(size)), progress=False)
    texts = [str(one.message) for one in told if "is kept in" in str(one.message)]
    assert len(texts) == (lab.device == "cuda")
    assert all("it has breaks, which run eagerly" in one for one in texts)
    assert not file.exists()
    counters = served.backend.counters
    assert (counters.captures, counters.loaded_sizes) == (len(SIZES), 0)


def test_without_sizes_a_warm_up_calls_nothing(lab: Lab) -> None:
    served = Served(lab, Decoder(), capture_sizes=[])
    served.backend.warm_up(lambda size: pytest.fail(f"a call of size {size}"))
    assert not served.backend.dry_run(lambda size: pytest.fail(f"a call of size {size}")).sizes


def test_backends_may_share_a_pool(lab: Lab) -> None:
    pool = cgraph.graph_pool_handle()
    backends = [
        PiecewiseBackend(splitting_ops=OPS, capture_sizes=[4], compiler="eager", pool=pool)
        for _ in range(2)
    ]
    models = [Decoder().to(lab.device) for _ in backends]
    eager = copy.deepcopy(models)
    for model, right, backend in zip(models, eager, backends, strict=True):
        torch.compiler.reset()
        fast = torch.compile(model, backend=backend)
        for _ in range(4):
            x = fresh(lab, 4, 16)
            mark_size(x)
            assert torch.allclose(fast(x), right(x), atol=1e-5)
        assert backend.counters.replays == 1


def test_the_code_of_the_split_graph_is_written_once(lab: Lab, tmp_path: Path) -> None:
    served = Served(lab, Decoder(), dump=str(tmp_path / "new"))
    served.check(4)
    path = tmp_path / "new" / "computation_graph.py"
    text = path.read_text()
    assert "submod_0" in text
    assert "served.attend" in text
    path.write_text("mine")
    torch.compiler.reset()
    Served(lab, Decoder(), dump=str(tmp_path / "new")).check(4)
    assert path.read_text() == "mine"


def test_a_splitting_operator_whose_result_changes_its_shape_is_refused(lab: Lab) -> None:
    width = [3]

    @torch.library.custom_op("served::grows", mutates_args=())
    def grows(x: Tensor) -> Tensor:
        return x.new_ones(width[0])

    grows.register_fake(lambda x: x.new_empty(3))

    def model(x: Tensor) -> Tensor:
        return torch.ops.served.grows(x * 2) + 1

    backend = PiecewiseBackend(splitting_ops=["served::grows"], capture_sizes=[4], compiler="eager")
    fast = torch.compile(model, backend=backend)
    for _ in range(4):
        x = fresh(lab, 4)
        mark_size(x)
        fast(x)
    width[0] = 5
    with pytest.raises(CaptureError, match=r"shape \(5,\).*expected.*\(3,\)"):
        fast(x)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: PiecewiseBackend(PiecewiseConfig(), capture_sizes=[1]), "expected a PiecewiseCon"),
        (lambda: PiecewiseBackend({"capture_sizes": [1]}), "expected a PiecewiseConfig"),  # type: ignore[arg-type]
        (lambda: PiecewiseBackend(capture_size=[1]), "capture_sizes is the nearest"),
        (lambda: PiecewiseBackend(pool="pool"), "pool"),
    ],
)
def test_wrong_arguments_are_named(lab: Lab, make: Callable[[], Any], error: str) -> None:
    with pytest.raises(cgraph.errors.ArgumentError, match=error):
        make()


@pytest.mark.parametrize("code", [2, 719])
def test_after_each_driver_call_that_fails_once_a_model_in_pieces_is_right(
    sim: SimLab, code: int
) -> None:
    simulator = sim.simulator
    served = Served(sim, Decoder(layers=2), capture_sizes=[4], warmups=0)
    served.check(4)

    def run() -> None:
        served.backend.clear()
        served.backend.dry_run(served.check, progress=False)
        for _ in range(2):
            served.check(4)

    run()
    start = len(simulator.calls())
    run()
    calls, failures = len(simulator.calls()) - start, 0
    served.backend.clear()
    baseline = sim.settled()
    for number in range(calls):
        simulator.fail_call(number, code)
        try:
            run()
        except (cgraph.CgraphError, RuntimeError) as error:
            assert any(part in str(error) for part in ("cu", f"({code})", "out of memory")), error
            failures += 1
            error.__traceback__ = None
        simulator.clear_faults()
        simulator.synchronize()
        served.backend.clear()
        served.model.cache.copy_(served.eager.cache)
        run()
        served.backend.clear()
        assert sim.settled() == baseline
    assert failures >= 20
