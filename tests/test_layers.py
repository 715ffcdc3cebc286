"""Which folder of the package may know of which, as docs/architecture.md has it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import cgraph

ROOT = Path(cgraph.__file__).parent
KNOWN = {
    "_torch": {"_driver", "_torch", "errors"},
    "_state": {"_state", "_torch", "errors"},
}
GRAPHS = {"_breaks", "_callables", "_functions", "_recording", "cudagraph", "graphs", "segments"}


def imported(folder: str) -> set[str]:
    """The modules and folders of the package that the files of one name."""
    found: set[str] = set()
    for file in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [one.name for one in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module == "cgraph":
                names = [f"cgraph.{one.name}" for one in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            found |= {name.split(".")[1] for name in names if name.startswith("cgraph.")}
    return found - {"_core"}


@pytest.mark.parametrize("folder", KNOWN)
def test_what_lies_below_knows_nothing_of_what_lies_above(folder: str) -> None:
    assert imported(folder) - KNOWN[folder] == set()


def test_captures_know_no_graph() -> None:
    found = imported("_captures")
    assert "_torch" in found and not found & GRAPHS
