"""The examples in docstrings and in the README run, on the simulator."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest

import cgraph

MODULES = [
    "cgraph",
    "cgraph._debug.differences",
    "cgraph._operators.rollback",
    "cgraph._text",
    "cgraph.breaks",
    "cgraph.dryrun",
    "cgraph.explanation",
    "cgraph.functions",
    "cgraph.graphs",
    "cgraph.ledger",
    "cgraph.mempool",
    "cgraph.patch",
    "cgraph.picture",
    "cgraph.reports",
    "cgraph.sim",
    "cgraph.timeline",
]
README = Path(__file__).parents[2] / "README.md"
GRAPHED = README.parent / "docs" / "graphed.md"


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_are_true(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


@pytest.mark.skipif(not README.exists(), reason="the bundle for GPU machines has no README")
def test_the_readmes_python_without_a_gpu_prints_what_it_says(
    capsys: pytest.CaptureFixture[str],
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    (block,) = [block for block in blocks if "cgraph.sim.use()" in block]
    exec(block, {})
    printed = capsys.readouterr().out.splitlines()
    promised = re.findall(r"# (tensor\(.*?\))", block)
    assert printed == promised


@pytest.mark.filterwarnings("ignore:.*runs eagerly:cgraph.errors.EagerWarning")
@pytest.mark.skipif(not GRAPHED.exists(), reason="the bundle for GPU machines has no documents")
def test_what_the_page_on_graphed_prints_is_what_it_says(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", GRAPHED.read_text(), flags=re.DOTALL)
    program = tmp_path / "graphed.py"
    program.write_text("\n".join(blocks))
    with cgraph.sim.use():
        exec(compile(program.read_text(), program, "exec"), {"__name__": "graphed"})
    promised = re.findall(r"print\(.*\)  # (.*)", program.read_text())
    assert capsys.readouterr().out.splitlines() == promised
