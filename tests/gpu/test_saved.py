"""Saved graphs: another process replays them with the same results."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cgraph
from cgraph.errors import ArgumentError

pytestmark = pytest.mark.gpu

HERE = Path(__file__).parent


def run(*args: object) -> str:
    """Run Python in a process of its own; return what it prints."""
    command = [sys.executable, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


@pytest.mark.parametrize("kind", ["plain", "drops", "compiled"])
def test_another_process_gets_the_same_bits_from_loaded_graphs(kind: str, tmp_path: Path) -> None:
    program = HERE / "saved_program.py"
    run(program, "save", kind, tmp_path)
    assert "equal" in run(program, "load", kind, tmp_path)


@pytest.mark.parametrize("kind", ["plain", "drops", "compiled"])
def test_another_process_captures_nothing_that_a_ladders_file_has(
    kind: str, tmp_path: Path
) -> None:
    program = HERE / "ladder_file_program.py"
    assert "0 graphs loaded, 3 captured, and written" in run(program, kind, tmp_path)
    assert "3 graphs loaded, 0 captured" in run(program, kind, tmp_path)


def test_another_process_captures_no_size_that_a_backends_file_has(tmp_path: Path) -> None:
    program = HERE / "ladder_file_program.py"
    assert "captures=3, loaded_sizes=0" in run(program, "pieces", tmp_path)
    assert "captures=0, loaded_sizes=3" in run(program, "pieces", tmp_path)


@pytest.mark.parametrize("cases", ["saved_cases.py", "ladder_file_cases.py"])
def test_saved_graphs_keep_their_rules_in_a_process_that_records_images(cases: str) -> None:
    # The cases are tests; here is nobody who records, since profilers could not work then.
    options = [
        part for one in ("cacheprovider", "benchmark", "xdist") for part in ("-p", f"no:{one}")
    ]
    assert " passed" in run("-m", "pytest", "-q", *options, HERE / cases)


def test_a_kernel_that_was_loaded_before_is_refused_with_the_fix(tmp_path: Path) -> None:
    x = torch.randn(8, device="cuda")
    graph = cgraph.CUDAGraph(keep_graph=True)
    with cgraph.graph(graph):
        out = x * 2
    with pytest.raises(ArgumentError, match=r"kernel .*, which is of no module that is") as refused:
        cgraph.save(tmp_path / "graphs", graph, {"x": x, "out": out})
    assert "call cgraph.record_images() before the first CUDA" in refused.value.__notes__[0]
    assert not list(tmp_path.iterdir())
