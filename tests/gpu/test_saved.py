"""Saved graphs: another process replays them with the same results."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

PROGRAM = Path(__file__).with_name("saved_program.py")


def run(*args: object) -> str:
    """Run the program in a process of its own; return what it prints."""
    command = [sys.executable, str(PROGRAM), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("kind", ["plain", "drops", "compiled"])
def test_another_process_gets_the_same_bits_from_loaded_graphs(kind: str, tmp_path: Path) -> None:
    run("save", kind, tmp_path)
    assert "equal" in run("load", kind, tmp_path)
