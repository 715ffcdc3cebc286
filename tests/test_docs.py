"""The examples in docstrings and in the README run, on the simulator."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest

MODULES = [
    "cgraph",
    "cgraph._functions.debug.differences",
    "cgraph._state.rollback",
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
README = Path(__file__).parent.parent / "README.md"


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
