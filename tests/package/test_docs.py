"""The examples in docstrings, in the README and on the pages of the site run, on the simulator."""

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
from process_group import keep_groups

MODULES = [
    "cgraph",
    "cgraph._debug.differences",
    "cgraph._loops.report",
    "cgraph._loops.stages",
    "cgraph._operators.rollback",
    "cgraph._text",
    "cgraph.breaks",
    "cgraph.causes",
    "cgraph.counts",
    "cgraph.dryrun",
    "cgraph.explanation",
    "cgraph.functions",
    "cgraph._piecewise.dispatcher",
    "cgraph._piecewise.size_plan",
    "cgraph.graph_ladder",
    "cgraph.graphs",
    "cgraph.ledger",
    "cgraph.loops",
    "cgraph.mempool",
    "cgraph.patch",
    "cgraph.picture",
    "cgraph.piecewise",
    "cgraph.reports",
    "cgraph.sim",
    "cgraph.timeline",
    "cgraph.trees",
    "cgraph.viewer",
]
README = Path(__file__).parents[2] / "README.md"
DOCS = README.parent / "docs"
# Sketches, in which models and loops are the reader's.
SKETCHES = {"trees.md"}
CODES = Path(cgraph.__file__).parent / "codes"
PAGES = sorted(
    page
    for page in (*DOCS.glob("**/*.md"), *CODES.glob("*.md"))
    if page.name not in SKETCHES and "```python" in page.read_text()
)


@pytest.fixture(autouse=True)
def _without_leftovers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let compiled code of a program that is over go here, where torch complains of its globals."""
    keep_groups(monkeypatch)
    cgraph.trees.reset()
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
def test_the_readmes_program_runs_as_pasted_and_prints_its_report(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CGRAPH_DRIVER", "sim")
    [block] = blocks_of(README)
    program = tmp_path / "program.py"
    program.write_text(block)
    runpy.run_path(str(program), run_name="__main__")
    assert "2 of 2 keys captured" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:.*runs eagerly:cgraph.errors.EagerWarning")
@pytest.mark.skipif(not README.exists(), reason="the bundle for GPU machines has no documents")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_what_a_page_prints_is_what_it_says(
    page: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    program = tmp_path / page.with_suffix(".py").name
    program.write_text("\n".join(blocks_of(page)))
    with cgraph.sim.use():
        exec(compile(program.read_text(), program, "exec"), {"__name__": page.stem})
    promised = re.findall(r"print\(.*\)  # (.*)", program.read_text())
    assert capsys.readouterr().out.splitlines() == promised


def blocks_of(page: Path) -> list[str]:
    """Return the Python of a page."""
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)


@pytest.mark.skipif(not README.exists(), reason="the bundle for GPU machines has no documents")
def test_the_page_of_choices_is_the_readmes_table() -> None:
    def rows(page: Path) -> list[str]:
        return [line for line in page.read_text().splitlines() if line.startswith("| ")]

    of_readme = [re.sub(r"\((docs/|crates/cg-core/README)", "(", one) for one in rows(README)]
    of_site = [one.replace("(reference/rust.md)", "(.md)") for one in rows(DOCS / "which.md")]
    assert of_readme == of_site


@pytest.mark.skipif(not README.exists(), reason="the bundle for GPU machines has no documents")
def test_the_chart_and_the_page_of_benchmarks_are_those_of_the_last_runs() -> None:
    chart = runpy.run_path(str(README.parent / "benches/python/chart.py"))
    tables = chart["latest"]()
    assert (DOCS / "benchmarks.md").read_text() == chart["page"](tables)
    assert (DOCS / "images/speed.svg").read_text() == chart["chart"](tables)


@pytest.mark.skipif(not README.exists(), reason="the bundle for GPU machines has no requirements")
def test_what_is_installed_for_development_are_versions_alone() -> None:
    lines = (README.parent / "requirements/dev.txt").read_text().splitlines()
    assert [one for one in lines[1:] if not re.fullmatch(r"[\w.-]+==[\w.+]+", one)] == []
