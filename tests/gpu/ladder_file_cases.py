"""Rules of a ladder's file, in a process that records images; ``test_saved.py`` runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from cgraph.errors import ArgumentError, CgraphWarning, StateError

pytestmark = pytest.mark.gpu
SIZES = (8, 4, 2)
UNSEEN = "hidden"


@pytest.fixture(autouse=True, scope="module")
def recorded() -> None:
    cgraph.record_images()


class Layer(nn.Module):
    """A layer with a cache, a number, and a number that is read by a computed name."""

    hidden: float

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("cache", torch.zeros(8, 16))
        self.scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        found = self.linear(x) * self.scale + getattr(self, UNSEEN)
        self.cache[: len(x)].add_(found)
        return found


def fresh(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda")


def layer_of() -> Layer:
    torch.manual_seed(1)
    layer = Layer().cuda()
    layer.hidden = 1.0
    return layer


@torch.no_grad()
def ladder_of(
    layer: Any, file: Path, *, sizes: Any = SIZES, run: bool = True, **options: Any
) -> tuple[cgraph.GraphLadder, Any]:
    """Capture sizes of a layer, or load them; return the ladder and what became of its file."""
    ways = {name: options.pop(name) for name in ("fresh_outputs",) if name in options}
    x = torch.zeros(8, 16, device="cuda")
    ladder = cgraph.GraphLadder(cgraph.MemPool(), **ways)
    with ladder.kept_in(file, **options) as kept:
        for rows in sizes:
            layer(x[:rows])
            ladder.capture(rows, layer, x[:rows], run=run)
    return ladder, kept


@torch.no_grad()
def agree(ladder: cgraph.GraphLadder, layer: Layer) -> None:
    for rows in ladder.keys:
        x = fresh(rows, 16)  # type: ignore[arg-type]
        layer.cache.zero_()
        expected, cache = layer(x), layer.cache.clone()
        layer.cache.zero_()
        assert torch.allclose(ladder(rows, x), expected, rtol=1e-5, atol=1e-5)
        assert torch.allclose(layer.cache, cache, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"lazy": True}, {"check": True}, {"fresh_outputs": True}])
@pytest.mark.parametrize("run", [True, False])
def test_loaded_graphs_work_on_the_module_of_the_new_ladder(
    options: dict[str, Any], run: bool, tmp_path: Path
) -> None:
    first, kept = ladder_of(layer_of(), tmp_path / "graphs", run=run, **options)
    assert kept.is_written
    assert [*kept.captured.values()] == ["there was no file"] * 3
    layer = layer_of()
    with torch.no_grad():
        layer.linear.weight.mul_(2)
    second, kept = ladder_of(layer, tmp_path / "graphs", run=run, **options)
    assert kept.loaded == [*SIZES], str(kept)
    agree(second, layer)
    assert second.keys == first.keys
    assert "graph" in str(cgraph.memory())
    second.clear()
    with pytest.raises(StateError, match="has no graph"):
        second(8)


def test_a_capture_with_run_does_its_work_once(tmp_path: Path) -> None:
    for _ in range(2):
        layer, x = layer_of(), fresh(8, 16)
        with torch.no_grad():
            ladder = cgraph.GraphLadder()
            with ladder.kept_in(tmp_path / "graphs"):
                out = ladder.capture("all", layer, x)
            expected = layer_of()(x)
            assert torch.allclose(out, expected, rtol=1e-5, atol=1e-5)
            assert torch.allclose(layer.cache, expected, rtol=1e-5, atol=1e-5)


def test_another_value_code_or_argument_is_captured_and_the_file_written_anew(
    tmp_path: Path,
) -> None:
    file = tmp_path / "graphs"
    ladder_of(layer_of(), file)
    layer = layer_of()
    layer.scale = 3.0
    ladder, kept = ladder_of(layer, file)
    assert "self.scale is 3.0, and was 2.0" in kept.captured[8]
    assert kept.is_written
    agree(ladder, layer)
    assert ladder_of(layer, file)[1].loaded == [*SIZES]
    _, kept = ladder_of(layer.double().float().eval(), file)
    assert "training is False, and was True" in kept.captured[8]


def test_other_settings_and_modes_of_torch_are_captured(tmp_path: Path) -> None:
    file, layer = tmp_path / "graphs", layer_of()
    ladder_of(layer, file)
    with torch.autocast("cuda", torch.bfloat16):
        _, kept = ladder_of(layer, file)
    assert "torch's autocast is" in kept.captured[8]
    torch.set_float32_matmul_precision("high")
    try:
        _, kept = ladder_of(layer, file)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert "torch's" in kept.captured[8]


def test_a_file_that_lacks_a_key_goes_and_comes_back_whole(tmp_path: Path) -> None:
    file, layer = tmp_path / "graphs", layer_of()
    ladder_of(layer, file, sizes=(8, 4))
    ladder, kept = ladder_of(layer, file)
    assert kept.loaded == [8, 4]
    assert "no graph of this key" in kept.captured[2]
    assert not file.exists()
    agree(ladder, layer)
    assert ladder_of(layer, file)[1].is_written
    assert ladder_of(layer, file)[1].loaded == [*SIZES]


def test_two_layers_that_look_alike_do_not_get_each_others_graphs(tmp_path: Path) -> None:
    one, other = layer_of(), layer_of()
    with torch.no_grad():
        other.linear.weight.mul_(2)
    for layers in ((one, one), (one, other), (one, other), (one, other)):
        ladder, x = cgraph.GraphLadder(), fresh(4, 16)
        with torch.no_grad(), ladder.kept_in(tmp_path / "graphs") as kept:
            for key, layer in enumerate(layers):
                ladder.capture(key, layer, x)
            for key, layer in enumerate(layers):
                layer.cache.zero_()
                assert torch.allclose(ladder(key), layer(x), rtol=1e-5, atol=1e-5), str(kept)
    assert kept.loaded == [0, 1]


def test_a_graph_with_breaks_is_captured_each_time_and_the_others_are_loaded(
    tmp_path: Path,
) -> None:
    @cgraph.eager_break
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    def broken(x: Tensor) -> Tensor:
        return doubled(x + 1) + 1

    layer, x = layer_of(), fresh(4, 16)
    for number in range(3):
        with torch.no_grad():
            ladder = cgraph.GraphLadder()
            with ladder.kept_in(tmp_path / "graphs") as kept:
                ladder.capture("whole", layer, x)
                out = ladder.capture("broken", broken, x)
        assert torch.allclose(out, (x + 1) * 2 + 1)
        assert kept.loaded == (["whole"] if number else []), str(kept)
        assert (tmp_path / "graphs").exists()


def test_the_check_captures_where_a_computed_name_has_another_value(tmp_path: Path) -> None:
    file = tmp_path / "graphs"
    ladder_of(layer_of(), file)
    layer = layer_of()
    layer.hidden = 5.0
    ladder, kept = ladder_of(layer, file, check=True)
    assert "it differs from an eager call: result: it is" in kept.captured[8], str(kept)
    agree(ladder, layer)


def test_memory_that_nothing_names_keeps_a_graph_out_of_the_file(tmp_path: Path) -> None:
    boxes = {fresh(16): "key"}  # no name leads to a key

    def hides(x: Tensor) -> Tensor:
        return x + next(iter(boxes))

    with pytest.warns(CgraphWarning, match="'one': .*memory without a name"):
        ladder = cgraph.GraphLadder()
        with torch.no_grad(), ladder.kept_in(tmp_path / "graphs"):
            ladder.capture("one", hides, fresh(4, 16))
    assert not (tmp_path / "graphs").exists()


def test_tensors_in_the_pool_of_the_graphs_keep_a_graph_out_of_the_file(tmp_path: Path) -> None:
    pool, layer = cgraph.MemPool(), layer_of()
    with torch.cuda.use_mem_pool(pool):
        x = fresh(4, 16)
    with pytest.warns(CgraphWarning, match=r"'one': args\[0\] lies in the pool of the graphs"):
        ladder = cgraph.GraphLadder(pool)
        with torch.no_grad(), ladder.kept_in(tmp_path / "graphs"):
            ladder.capture("one", layer, x)


def test_a_value_that_changes_between_captures_is_told_apart(tmp_path: Path) -> None:
    for later in (2.0, 3.0, 2.0, 2.0):
        layer, x = layer_of(), fresh(4, 16)
        ladder = cgraph.GraphLadder()
        with torch.no_grad(), ladder.kept_in(tmp_path / "graphs") as kept:
            for key, scale in enumerate((1.0, later)):
                layer.scale = scale
                ladder.capture(key, layer, x)
            for key, scale in enumerate((1.0, later)):
                layer.scale = scale
                assert torch.allclose(ladder(key), layer(x), rtol=1e-5, atol=1e-5), str(kept)
    assert kept.loaded == [0, 1], str(kept)


def test_a_capture_that_changes_what_it_reads_is_not_kept(tmp_path: Path) -> None:
    class Counts(Layer):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) * self.calls

    layer = Counts().cuda()
    layer.hidden = 1.0
    with pytest.warns(CgraphWarning, match="values that it reads changed in the capture: self.c"):
        ladder_of(layer, tmp_path / "graphs", sizes=(8,))
    assert not (tmp_path / "graphs").exists()


def test_fresh_results_take_the_bytes_that_they_have(tmp_path: Path) -> None:
    def several(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, (x @ x.t()).sum() + 1

    for number in range(2):
        ladder, x = cgraph.GraphLadder(fresh_outputs=True), fresh(64, 64)
        with torch.no_grad(), ladder.kept_in(tmp_path / "graphs") as kept:
            ladder.capture("all", several, x)
        assert bool(kept.loaded) == bool(number), str(kept)
        one, other = ladder("all", x)
        assert (one.untyped_storage().nbytes(), other.untyped_storage().nbytes()) == (1 << 14, 4)
        assert torch.allclose(one, x * 2)


def test_ladders_of_other_options_do_not_share_graphs(tmp_path: Path) -> None:
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    texts = []
    for ways in ({}, {"weak_outputs": False}, {"fresh_outputs": True}):
        ladder = cgraph.GraphLadder(**ways)  # type: ignore[arg-type]
        with torch.no_grad(), ladder.kept_in(tmp_path / "graphs") as kept:
            ladder.capture("all", doubled, fresh(4))
        texts.append(kept.captured["all"])
    assert "weak_outputs is False, and was True" in texts[1]
    assert "fresh_outputs is True, and was False" in texts[2]


def test_graphs_may_be_dropped_and_captured_again_in_the_block(tmp_path: Path) -> None:
    file, layer, x = tmp_path / "graphs", layer_of(), fresh(8, 16)
    ladder_of(layer, file)
    ladder = cgraph.GraphLadder(cgraph.MemPool())
    given = torch.zeros(8, 16, device="cuda")
    with torch.no_grad(), ladder.kept_in(file) as kept:
        for rows in SIZES:
            ladder.capture(rows, layer, given[:rows], run=False)
        ladder.clear(4)
        ladder.capture(8, layer, given, run=False)
        ladder.capture(4, layer, given[:4], run=False)
    assert sorted(kept.loaded) == sorted(SIZES), str(kept)  # type: ignore[type-var]
    agree(ladder, layer)
    del x


def test_the_check_runs_hooks_and_leaves_memory_as_it_was(tmp_path: Path) -> None:
    for number in range(2):
        layer, x = layer_of(), fresh(8, 16)
        layer.linear.register_forward_hook(lambda _, __, found: found * 3)
        ladder = cgraph.GraphLadder()
        with torch.no_grad(), ladder.kept_in(tmp_path / "graphs", check=True) as kept:
            ladder.capture("all", layer, x, run=False)
        assert bool(kept.loaded) == bool(number), str(kept)
        assert not layer.cache.any()


def test_a_file_of_saved_graphs_is_not_replaced(tmp_path: Path) -> None:
    x, graph = fresh(8), cgraph.CUDAGraph(keep_graph=True)
    torch.mul(x, 2)
    with cgraph.graph(graph):
        out = x * 2
    cgraph.save(tmp_path / "graphs", graph, {"x": x, "out": out})
    with pytest.raises(ArgumentError, match=r"is a file of cgraph.save\(\), expected a ladder's"):
        ladder_of(layer_of(), tmp_path / "graphs")
    cgraph.load(tmp_path / "graphs", {"x": x})


def test_an_exception_in_the_block_leaves_the_file_and_the_graphs(tmp_path: Path) -> None:
    file, layer, x = tmp_path / "graphs", layer_of(), fresh(8, 16)
    for _ in range(2):
        ladder = cgraph.GraphLadder()
        with pytest.raises(ZeroDivisionError), torch.no_grad(), ladder.kept_in(file):
            ladder.capture(8, layer, x, run=False)
            raise ZeroDivisionError
        layer.cache.zero_()
        assert torch.allclose(ladder(8), layer.linear(x) * 2 + 1, rtol=1e-5, atol=1e-5)
        ladder_of(layer, file, sizes=(8,))
        assert file.exists()


def test_something_else_in_the_files_place_is_not_touched(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"weights" * 9)
    with pytest.raises(ArgumentError, match=r"begins with b'weights.*expected a file of saved"):
        ladder_of(layer_of(), file)
    assert file.read_bytes() == b"weights" * 9


def test_a_damaged_file_is_written_anew(tmp_path: Path) -> None:
    file, layer = tmp_path / "graphs", layer_of()
    ladder_of(layer, file)
    whole = bytearray(file.read_bytes())
    whole[len(whole) // 2] ^= 1
    file.write_bytes(whole)
    _, kept = ladder_of(layer, file)
    assert "damaged" in kept.captured[8] or "cut off" in kept.captured[8], str(kept)
    assert kept.is_written
    assert ladder_of(layer, file)[1].loaded == [*SIZES]


def test_kernels_may_be_loaded_before_the_ladder_is_made(tmp_path: Path) -> None:
    file, layer = tmp_path / "graphs", layer_of()
    ladder_of(layer, file)
    ladder, kept = ladder_of(layer, cgraph.load_kernels(file))  # type: ignore[arg-type]
    assert kept.loaded == [*SIZES]
    agree(ladder, layer)


def test_views_of_arguments_and_numbers_come_back_in_their_places(tmp_path: Path) -> None:
    def several(x: Tensor) -> dict[str, Any]:
        return {"new": x * 2, "view": x[1:], "same": x, "number": 3, "none": [None, x.sum()]}

    for number in range(2):
        x = fresh(4, 16)
        for ways in ({"fresh_outputs": True}, {}):
            ladder = cgraph.GraphLadder(**ways)  # type: ignore[arg-type]
            file = tmp_path / str(len(ways))
            with torch.no_grad(), ladder.kept_in(file) as kept:
                ladder.capture("all", several, x)
            assert bool(kept.loaded) == bool(number), str(kept)
            y = fresh(4, 16)
            found, expected = ladder("all", y), several(y)
            assert found["number"] == 3
            assert found["none"][0] is None
            for name in ("new", "view", "same"):
                assert torch.equal(found[name], expected[name]), name
            assert torch.allclose(found["none"][1], expected["none"][1])
