"""The examples in docstrings and in the README run, on the simulator."""

from __future__ import annotations

import ast
import doctest
import gc
import importlib
import re
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

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
    "cgraph._piecewise.dispatcher",
    "cgraph._piecewise.size_plan",
    "cgraph.graph_ladder",
    "cgraph.graphs",
    "cgraph.ledger",
    "cgraph.mempool",
    "cgraph.patch",
    "cgraph.picture",
    "cgraph.piecewise",
    "cgraph.reports",
    "cgraph.sim",
    "cgraph.timeline",
    "cgraph.trees",
]
README = Path(__file__).parents[2] / "README.md"
PAGES = [README.parent / "docs" / name for name in ("graphed.md", "piecewise.md")]


@pytest.fixture(autouse=True)
def _without_leftovers() -> Iterator[None]:
    """Let compiled code of a program that is over go here, where torch complains of its globals."""
    yield
    before, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        torch.compiler.reset()
        gc.collect()
    finally:
        sys.unraisablehook = before


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_are_true(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


def programs() -> Iterator[Any]:
    """List the docstrings whose examples import what they use."""
    for name in MODULES:
        for found in doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(name)):
            if found.examples and found.examples[0].source.startswith("import "):
                yield pytest.param(found.examples, id=found.name)


@pytest.mark.parametrize("examples", [*programs()])
def test_the_examples_of_a_docstring_are_true_as_a_program(
    examples: Sequence[doctest.Example], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Unlike a doctest's, the code of a program is the user's own, and its globals are guarded.
    program = tmp_path / "example.py"
    program.write_text("import sys\n" + "".join(map(as_statement, examples)))
    runpy.run_path(str(program), run_name="__main__")
    printed, promised = capsys.readouterr().out, "".join(one.want for one in examples)
    assert doctest.OutputChecker().check_output(promised, printed, doctest.ELLIPSIS), printed


def as_statement(example: doctest.Example) -> str:
    """Give the source of an example, which prints what it shows."""
    if example.want and isinstance(ast.parse(example.source).body[-1], ast.Expr):
        return f"sys.displayhook(({example.source.strip()}))\n"
    return example.source


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
@pytest.mark.skipif(not README.exists(), reason="the bundle for GPU machines has no documents")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_prints_is_what_it_says(
    page: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    program = tmp_path / page.with_suffix(".py").name
    program.write_text("\n".join(blocks))
    with cgraph.sim.use():
        exec(compile(program.read_text(), program, "exec"), {"__name__": page.stem})
    promised = re.findall(r"print\(.*\)  # (.*)", program.read_text())
    assert capsys.readouterr().out.splitlines() == promised
