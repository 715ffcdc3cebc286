"""``explain`` finds random numbers of Python, and names one cause of a step that fails."""

from __future__ import annotations

import cProfile
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cgraph
from lab import Lab, SimLab, fresh


def test_random_numbers_of_python_are_frozen(lab: Lab) -> None:
    generator = random.Random(3)

    def body(x: torch.Tensor) -> torch.Tensor:
        y = x * random.uniform(1, 2)
        return y + generator.random()

    findings = cgraph.explain(body, fresh(lab, 8)).findings
    assert [(one.kind, one.severity) for one in findings] == [("host random", "frozen")] * 2
    assert [one.source for one in findings] == [
        "y = x * random.uniform(1, 2)",
        "return y + generator.random()",
    ]


def test_random_numbers_of_numpy_are_frozen_where_a_function_draws_them(lab: Lab) -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        return y * np.random.rand()

    def body(x: torch.Tensor) -> torch.Tensor:
        return inner(x) + float(np.random.default_rng(3).random())

    (finding,) = cgraph.explain(body, fresh(lab, 8)).findings
    assert (finding.kind, finding.severity) == ("host random", "frozen")
    assert (finding.operator, finding.source) == (
        "numpy.random",
        "def inner(x: torch.Tensor) -> torch.Tensor:",
    )
    assert not cgraph.explain(lambda x: x * 2, fresh(lab, 8)).findings


def test_draws_from_generators_of_numpy_are_found_however_they_are_held(lab: Lab) -> None:
    class Holds:
        rng = np.random.default_rng(3)
        old = np.random.RandomState(4)

        def noise(self) -> float:
            return float(self.rng.random())

    holds, rng = [Holds()], np.random.default_rng(5)

    def body(x: torch.Tensor, given: Any) -> torch.Tensor:
        return x * rng.random() + float(holds[0].old.rand()) + given["one"].normal()

    def other(x: torch.Tensor) -> torch.Tensor:
        return x * holds[0].noise()

    explained = cgraph.explain(body, fresh(lab, 8), {"one": np.random.default_rng(6)})
    assert [(one.operator, one.count) for one in explained.findings] == [
        ("numpy.random.Generator", 3)
    ]
    (finding,) = cgraph.explain(other, fresh(lab, 8)).findings
    assert finding.source == "def noise(self) -> float:"
    assert not cgraph.explain(lambda x: x * 2, fresh(lab, 8)).findings


def test_a_draw_is_named_by_a_line_of_the_function_whatever_torch_calls_behind_it(lab: Lab) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        np.random.rand()
        return x * len(f"{x[0]:.2f}")

    places = [
        (one.kind, Path(one.file).name, one.line)
        for one in cgraph.explain(body, fresh(lab, 8)).findings
    ]
    begin = body.__code__.co_firstlineno
    assert ("host random", Path(__file__).name, begin) in places
    assert len(places) == 2


def test_a_first_draw_is_found_in_a_process_that_has_not_loaded_what_draws() -> None:
    script = """
import numpy, torch, cgraph
with cgraph.sim.use():
    for _ in range(2):
        found = cgraph.explain(lambda x: x * numpy.random.rand(), torch.ones(3)).findings
        print([(one.kind, one.line) for one in found])
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == ["[('host random', 5)]"] * 2


def test_what_an_import_draws_is_not_the_functions(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import random\ndef name():\n    return random.random()\nNAME = name()\n"
    (tmp_path / "cg_drawing.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))

    def body(x: torch.Tensor) -> torch.Tensor:
        import cg_drawing  # type: ignore[import-not-found]

        return x * cg_drawing.NAME  # type: ignore[no-any-return]

    assert not cgraph.explain(body, fresh(lab, 8)).findings
    del sys.modules["cg_drawing"]


def test_a_profiler_that_is_there_hears_of_all_and_stays(lab: Lab) -> None:
    heard: list[str] = []

    def profiler(frame: Any, event: str, argument: Any) -> None:
        heard.append(frame.f_code.co_name)

    def body(x: torch.Tensor) -> torch.Tensor:
        return x * random.random()

    sys.setprofile(profiler)
    try:
        cgraph.explain(body, fresh(lab, 8))
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)
    assert "body" in heard


def test_what_python_and_torch_draw_for_themselves_is_not_found(lab: Lab) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(lambda y: y * 2, x, use_reentrant=False)  # type: ignore[no-any-return]

    assert not cgraph.explain(body, fresh(lab, 8).requires_grad_()).findings


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.NAdam])
def test_a_step_that_counts_on_the_host_has_one_finding_and_its_fix_in_the_report(
    lab: Lab, kind: Any
) -> None:
    weight = torch.nn.Parameter(fresh(lab, 3))
    optimizer = kind([weight])

    def step(x: torch.Tensor) -> None:
        weight.grad = x
        optimizer.step()

    (finding,) = cgraph.explain(step, fresh(lab, 3)).findings
    assert finding.kind == "optimizer"
    graphed = cgraph.graphed(step)
    with pytest.warns(UserWarning, match="runs eagerly"):
        for _ in range(4):
            graphed(fresh(lab, 3))
    (key,) = graphed.report().keys
    assert "capturable=True" in str(key.advice)


def test_a_capturable_optimizer_that_fails_is_not_told_to_be_one(sim: SimLab) -> None:
    weight = torch.nn.Parameter(fresh(sim, 3))
    optimizer = torch.optim.RMSprop([weight], lr=torch.tensor(0.01), capturable=True)

    def step(x: torch.Tensor) -> None:
        weight.grad = x
        optimizer.step()

    graphed = cgraph.graphed(step)
    with pytest.warns(UserWarning, match="runs eagerly"):
        for _ in range(3):  # the first one makes the optimizer's state
            graphed(fresh(sim, 3))
    (key,) = graphed.report().keys
    assert "mark the work" in str(key.advice) and "capturable" not in str(key.advice)


def test_explain_runs_beside_a_profiler_that_is_written_in_c(lab: Lab) -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        assert cgraph.explain(lambda x: x * 2, fresh(lab, 8)).ok
    finally:
        profiler.disable()
    assert profiler.getstats()
