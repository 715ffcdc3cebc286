"""The programs of ``examples`` run as they are, on the simulator."""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path

import pytest
import torch

import cgraph

EXAMPLES = Path(__file__).parents[2] / "examples"
# Those that no other test runs, with words of what they print, or of why they end.
PRINTED = {
    "breaks": "captured",
    "capture_safety": "",
    "compile": "losses",
    "generate": "one launch a run"
    if importlib.util.find_spec("transformers")
    else "needs transformers",
    "hooks": "replayed",
    "huggingface_decode": "1 of 1 key captured"
    if importlib.util.find_spec("transformers")
    else "needs transformers",
    "inference": "2 of 2 keys captured",
    "other_streams": "needs a GPU",
    "pause_resume": "paused",
    "speculative": "one launch a run",
    "training_step": "loss",
    "variable_batch": "captured",
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="an example takes the GPU if there is one")
@pytest.mark.parametrize("name", PRINTED)
def test_an_example_runs_as_a_program(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CGRAPH_DRIVER", "sim")
    torch.compiler.reset()
    cgraph.trees.reset()
    try:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    except SystemExit as end:
        # A text says what the example lacks here.
        assert end.code == 0 or isinstance(end.code, str)
        print(end.code)
    assert PRINTED[name] in capsys.readouterr().out
    torch.compiler.reset()


def test_each_example_is_known_and_short() -> None:
    files = sorted(EXAMPLES.glob("*.py"))
    assert {one.stem for one in files} == {*PRINTED, "serve"}
    long = {one.stem for one in files if len(one.read_text().splitlines()) >= 100}
    assert long <= {"serve"}
