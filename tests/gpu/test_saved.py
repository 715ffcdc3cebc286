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

PROGRAM = Path(__file__).with_name("saved_program.py")


CASES = Path(__file__).with_name("saved_cases.py")


def run(*args: object) -> str:
    """Run Python in a process of its own; return what it prints."""
    command = [sys.executable, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


@pytest.mark.parametrize("kind", ["plain", "drops", "compiled"])
def test_another_process_gets_the_same_bits_from_loaded_graphs(kind: str, tmp_path: Path) -> None:
    run(PROGRAM, "save", kind, tmp_path)
    assert "equal" in run(PROGRAM, "load", kind, tmp_path)


def test_saved_graphs_keep_their_rules_in_a_process_that_records_images() -> None:
    # The cases are tests; here is nobody who records, since profilers could not work then.
    assert " passed" in run("-m", "pytest", "-q", "-p", "no:cacheprovider", CASES)


def test_a_kernel_that_was_loaded_before_is_refused_with_the_fix(tmp_path: Path) -> None:
    x = torch.randn(8, device="cuda")
    graph = cgraph.CUDAGraph(keep_graph=True)
    with cgraph.graph(graph):
        out = x * 2
    with pytest.raises(ArgumentError, match=r"kernel .*, which is of no module that is") as refused:
        cgraph.save(tmp_path / "graphs", graph, {"x": x, "out": out})
    assert "call cgraph.record_images() before the first CUDA" in refused.value.__notes__[0]
    assert not list(tmp_path.iterdir())
