"""The command ``cgraph``: what it prints, and its exit codes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import cgraph
from cgraph._cli import doctor
from cgraph._cli.app import app
from cgraph.errors import NoDriverError

PROGRAM = """
import sys, torch, cgraph
weight = torch.eye(4)
x = torch.ones(4, 4)
def step(x):
    return torch.relu(x @ weight) + 1
def reads(x):
    return x * x.sum().item()
def inputs():
    return (torch.ones(2, 4),)
class Model:
    def forward(self, x):
        return x * 2
model = Model()
if __name__ == "__main__":
    fast = cgraph.graphed(step)
    for _ in range(3):
        fast(x)
    print("given", sys.argv[1:], torch.cuda.CUDAGraph is cgraph.CUDAGraph)
    sys.exit(int(sys.argv[1]))
"""


@pytest.fixture(autouse=True)
def _program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restored_path: None) -> None:
    """Be in a folder with a program, on the simulator."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CGRAPH_DRIVER", "sim")
    (tmp_path / "mine.py").write_text(PROGRAM)


@pytest.fixture
def restored_path(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [*sys.argv])


def command(*arguments: str, width: int = 80) -> Result:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": str(width)})


def test_the_doctor_has_a_line_for_each_thing_and_fits_the_terminal() -> None:
    for width in (60, 200):
        found = command("doctor", width=width)
        assert found.exit_code == 0, found.output
        assert max(map(len, found.output.splitlines())) <= width
        for word in ("cgraph", "torch", "CUDA driver", "allocator", "torch.compile"):
            assert word in found.output
    read = json.loads(command("doctor", "--json").output)
    assert {"name", "state", "found", "fix"} == set(read[0])
    assert cgraph.__version__ in read[0]["found"]


@pytest.mark.parametrize(
    ("variable", "value", "state", "text"),
    [
        ("CGRAPH_DRIVER", "tpu", "error", "set it to cuda or sim"),
        ("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync", "error", "no pools for graphs"),
        ("CGRAPH_VLLM", "1", "warning", "vllm is not installed"),
    ],
)
def test_the_doctor_names_a_setting_that_is_wrong_and_the_fix(
    variable: str, value: str, state: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    [wrong] = [one for one in doctor.checks() if f"{variable}={value}" in one.found]
    assert (wrong.state, text in wrong.fix + wrong.found) == (state, True)
    assert command("doctor").exit_code == (1 if state == "error" else 0)


@pytest.mark.parametrize(
    ("mirrored", "switch", "state", "text"),
    [
        ("vLLM 0.33.0", "1", "ok", "on cgraph"),
        ("vLLM 0.33.0", "0", "ok", "on torch's graphs"),
        ("vLLM 0.1.0", "1", "warning", "known here is vLLM 0.1.0"),
    ],
)
def test_the_doctor_says_whether_a_plugin_is_on_and_knows_the_engine(
    mirrored: str, switch: str, state: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cgraph.integrations import vllm

    monkeypatch.setattr(vllm, "MIRRORS", mirrored)
    monkeypatch.setenv("CGRAPH_VLLM", switch)
    versions = {"vllm": "0.33.0"}

    def version(name: str) -> str:
        if name not in versions:
            raise doctor.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(doctor.metadata, "version", version)
    [found] = [one for one in doctor.checks() if one.name == "vllm"]
    assert (found.state, text in found.found) == (state, True)


@pytest.mark.parametrize(("version", "count"), [("590.48.01", 1), ("580.65.06", 0)])
def test_the_doctor_knows_faults_of_drivers(
    version: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Found:
        driver_version = 13000

    monkeypatch.setattr(doctor, "_kernel_module", lambda: version)
    monkeypatch.setattr(doctor, "_driver_version", lambda: 13000)
    wrong = [one for one in doctor.checks() if one.state == "warning" and version in one.name]
    assert len(wrong) == count


def missing() -> int:
    raise NoDriverError("no CUDA driver: none here. Fix: install one")


@pytest.mark.parametrize("version", [missing, lambda: 12030])
@pytest.mark.parametrize(("driver", "state"), [(None, "error"), ("sim", "ok")])
def test_the_doctor_says_ok_of_captures_on_cuda_only_with_a_driver_that_can_be_used(
    driver: str | None, state: str, version: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_driver_version", version)
    monkeypatch.delenv("CGRAPH_DRIVER", raising=False)
    if driver is not None:
        monkeypatch.setenv("CGRAPH_DRIVER", driver)
    [chosen] = [one for one in doctor.checks() if one.name == "captures on"]
    assert (chosen.state, "CGRAPH_DRIVER=sim" in chosen.fix) == (state, driver is None)


def test_missing_arguments_are_an_error_with_the_option() -> None:
    for name in ("explain", "draw", "bench"):
        found = command(name, "mine.py:reads", width=200)
        assert found.exit_code == 2 and "--args NAME" in found.output, found.output


def test_why_has_the_page_of_a_code_and_a_table_of_all() -> None:
    page = command("why", "cg-print").output
    assert "CG-PRINT" in page and "print after the replay" in page and "graphed" in page
    table = command("why", width=120).output
    assert all(one.code in table for one in cgraph.Cause)
    assert max(map(len, table.splitlines())) <= 120
    wrong = command("why", "CG-HOSTREAD")
    assert wrong.exit_code == 2
    assert "the nearest one is CG-HOST-READ" in " ".join(wrong.output.replace("│", "").split())


def test_explain_lists_what_a_capture_refuses_and_exits_with_one() -> None:
    found = command("explain", "mine.py:reads", "--args", "x")
    assert found.exit_code == 1
    assert "host read" in found.output and "x.sum().item()" in found.output
    read = json.loads(command("explain", "mine.py:reads", "--args", "x", "--json").stdout)
    assert (read["ok"], read["findings"][0]["line"]) == (False, 8)
    for place, args in (("mine:step", "inputs"), ("mine.py:model.forward", "x")):
        assert command("explain", place, "--args", args).exit_code == 0


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("step", "write module:function, or file.py:name"),
        ("mine.py:nothing", "mine.py has no name 'nothing'; it has Model, inputs, model"),
        ("mine.py:model.nothing", "'model' of mine.py has no 'nothing'"),
        ("mine.py:x", "is a Tensor, expected something that can be called"),
        ("other.py:step", "other.py is no file"),
        ("no_module_here:step", "there is no module 'no_module_here' here"),
    ],
)
def test_a_place_that_names_no_function_is_wrong_usage(place: str, text: str) -> None:
    found = command("explain", place, width=300)
    assert (found.exit_code, text in found.output) == (2, True), found.output


def test_run_reports_at_the_end_and_keeps_the_programs_exit_code() -> None:
    found = command("run", "--patch", "mine.py", "3", "--own")
    assert found.exit_code == 3
    assert "given ['3', '--own'] True" in found.stdout
    assert "step" in found.stderr and "1 of 1 key captured" in found.stderr
    assert "True" not in command("run", "mine.py", "0").stdout
    assert command("run", "nothing.py").exit_code == 2


@pytest.mark.parametrize("suffix", [".svg", ".html", ".dot", ".json"])
def test_draw_writes_the_graph_in_the_format_of_the_suffix(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"graph{suffix}"
    found = command("draw", "mine.py:step", "--args", "x", "--out", str(path))
    assert (found.exit_code, "3 nodes" in found.output) == (0, True), found.output
    assert path.stat().st_size > 100
    assert command("draw", "mine.py:step", "--out", "graph.png").exit_code == 2


def test_bench_has_a_line_for_each_way_to_call() -> None:
    found = command("bench", "mine.py:step", "--args", "x", "--calls", "2")
    assert found.exit_code == 0, found.output
    for way in ("eager", "cgraph.CUDAGraph.replay()", "cgraph.graphed"):
        assert way in found.output
    read = json.loads(command("bench", "--calls", "1", "--json").stdout)
    assert all(one["whole"] >= one["host"] > 0 for one in read)


def test_a_function_that_cannot_be_captured_is_told_without_a_traceback() -> None:
    found = command("bench", "mine.py:reads", "--args", "x", "--calls", "1")
    assert found.exit_code == 1
    assert "Traceback" not in found.output and "needs a value from the device" in found.output


def test_wrong_usage_exits_with_two() -> None:
    wrong: Sequence[tuple[str, ...]] = [
        ("bench", "--calls", "none"),
        ("replay",),
        (),
    ]
    for arguments in wrong:
        assert command(*arguments).exit_code == 2
    assert command("--version").output == f"cgraph {cgraph.__version__}\n"
    assert os.environ["CGRAPH_DRIVER"] == "sim"
