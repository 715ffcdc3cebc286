"""``cgraph.save`` and ``cgraph.load``, as far as they need no GPU; the rest is in ``tests/gpu``."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import torch

import cgraph
from cgraph import _core
from cgraph._saved.memory import Memory, named_tensors, note_of, require_like, tensor_over
from cgraph._saved.notes import GraphNote, Notes
from cgraph.errors import ArgumentError, CgraphError, ForeignError, StateError
from lab import SimLab, captured


def test_a_graph_of_the_simulator_is_not_saved(sim: SimLab, tmp_path: Path) -> None:
    x = torch.ones(3)
    graph, _ = captured(sim, x, keep_graph=True)
    with pytest.raises(ForeignError, match="'graph' of the simulator, whose operators are no"):
        cgraph.save(tmp_path / "file", graph, {"x": x})
    assert not list(tmp_path.iterdir())


def test_a_graph_without_a_template_is_not_saved(sim: SimLab, tmp_path: Path) -> None:
    x = torch.ones(3)
    graph, _ = captured(sim, x)
    for one in (graph, cgraph.CUDAGraph(keep_graph=True)):
        with pytest.raises(StateError, match="'mine', which has no template: capture with CUDAGr"):
            cgraph.save(tmp_path / "file", {"mine": one}, {"x": x})


def test_a_file_that_is_not_there_or_is_another_one_is_refused_by_its_name(
    sim: SimLab, tmp_path: Path
) -> None:
    file = tmp_path / "graphs"
    with pytest.raises(CgraphError, match=r"saved graphs in .*graphs: it cannot be read"):
        cgraph.load(file, {})
    file.write_bytes(b"something else" * 20)
    with pytest.raises(CgraphError, match="it is no file of saved graphs"):
        cgraph.load(file, {})


def test_a_file_of_a_rust_program_is_refused(sim: SimLab, tmp_path: Path) -> None:
    file = tmp_path / "graphs"
    saved = _core.SavedGraphs(sim.simulator.device)
    saved.write(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with pytest.raises(ArgumentError, match=r"expected those of cgraph\.save"):
        cgraph.load(file, {})


def test_a_file_for_another_torch_is_refused(sim: SimLab, tmp_path: Path) -> None:
    file = tmp_path / "graphs"
    saved = _core.SavedGraphs(sim.simulator.device)
    saved.notes = Notes({"torch": "1.0", "CUDA": "9"}, {}, {}, {}).text()
    saved.write(file)
    with pytest.raises(ArgumentError, match=r"the versions are .*, expected .*'torch': '1.0'"):
        cgraph.load(file, {})


def test_notes_come_back_as_they_were() -> None:
    tensor = torch.zeros(4, 6)[1:, ::2]
    note = note_of(tensor, ("x", 24), is_given=True)
    notes = Notes(Notes.versions_now(), {"x": note}, {"g": GraphNote(8)}, {"<segment 0>": 512})
    assert Notes.of(notes.text()) == notes


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"versions": {}}', '{"tensors": {"x": 1}}'])
def test_other_notes_are_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="the file's notes are"):
        Notes.of(text)


def test_only_tensors_of_a_gpu_and_modules_have_names() -> None:
    with pytest.raises(ArgumentError, match=r"names\['x'\] is 3, expected a tensor or a module"):
        named_tensors({"x": 3}, 0)  # type: ignore[dict-item]
    with pytest.raises(ArgumentError, match=r"x is .* on cpu, expected a strided one on cuda:0"):
        named_tensors({"x": torch.zeros(2)}, 0)


def test_what_a_module_has_elsewhere_is_left_out() -> None:
    assert named_tensors({"model": torch.nn.Linear(2, 2)}, 0) == {}


def test_a_tensor_must_be_like_the_saved_one() -> None:
    saved = torch.zeros(4, 6)
    note = note_of(saved, ("x", 0), is_given=True)
    require_like("x", torch.ones(4, 6), note)
    for other, text in (
        (torch.zeros(4, 5), r"float32\[4, 5\] with strides \[5, 1\]"),
        (torch.zeros(6, 4).t(), r"with strides \[1, 4\] at .*, expected float32\[4, 6\]"),
        (torch.zeros(4, 6).double(), r"float64\[4, 6\]"),
        (torch.zeros(5, 6)[1:], r"at byte 24 of a storage of 120 bytes, expected"),
    ):
        with pytest.raises(ArgumentError, match=text):
            require_like("x", other, note)


def test_a_tensor_may_lie_in_a_larger_storage_than_the_saved_one() -> None:
    note = note_of(torch.zeros(4, 6), ("x", 0), is_given=True)
    require_like("x", torch.zeros(9, 6)[:4], note)
    saved = note_of(torch.zeros(9, 6)[:4], ("x", 0), is_given=True)
    with pytest.raises(ArgumentError, match=r"of 96 bytes, expected .* of 216 bytes"):
        require_like("x", torch.zeros(4, 6), saved)


def test_a_tensor_over_bytes_has_its_shape_type_and_strides() -> None:
    storage = torch.arange(256, dtype=torch.uint8).untyped_storage()
    like = torch.zeros(10, 4, dtype=torch.int16)[4:].t()
    note = note_of(like, ("m", 128), is_given=False)
    assert (note.begin, note.offset, note.size) == (128, 160, 80)
    made = tensor_over(storage, note)
    assert (made.shape, made.stride(), made.dtype) == (like.shape, like.stride(), like.dtype)
    assert made.data_ptr() == storage.data_ptr() + 32


def test_an_address_is_found_in_the_memory_around_it() -> None:
    memory = Memory()
    memory.add("a", 1000, 100, None)
    memory.add("empty", 1100, 0, None)
    memory.add("b", 2000, 8, None)
    found = [memory.find(one) for one in (999, 1000, 1099, 1100, 2007, 2008)]
    assert found == [None, ("a", 0), ("a", 99), None, ("b", 7), None]
