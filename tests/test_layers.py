"""Which folder of the package may know of which, as docs/architecture.md has it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import cgraph

ROOT = Path(cgraph.__file__).parent
BASE = {"_core", "_driver", "_source", "_text", "_torch", "errors"}
CAPTURES = BASE | {"_captures", "_operators", "labels", "mempool", "sim", "timeline"}
GRAPHS = CAPTURES | {"_autograd", "_breaks", "_python", "breaks", "cudagraph", "graphs", "segments"}
CALLS = GRAPHS | {"_explanation", "_graphed", "_padding", "callables", "hooks", "reports"}
KNOWN = {
    "_torch": {"_core", "_driver", "_torch", "errors"},
    "_autograd": {"_torch", "errors"},
    "_python": {"_core", "_python", "_torch"},
    # The text of a break is what an operator that waits is answered with.
    "_operators": BASE | {"_autograd", "_operators", "_python", "breaks"},
    "_captures": CAPTURES,
    "_breaks": GRAPHS,
    "_callables": GRAPHS | {"_callables"},
    "_explanation": BASE | {"_explanation", "_operators", "breaks"},
    "_graphed": CALLS | {"_debug"},
    "_padding": CALLS | {"_debug"},
    "_debug": CALLS | {"_debug"},
    "_reports": {"_reports", "_text", "reports"},
    "_timeline": {"_text", "_timeline", "errors", "timeline"},
}
TOGETHER = [{"_graphed", "_padding", "_debug"}]
"""Folders that know each other: keys of calls, their sizes and what debugs them."""


def imports(folder: str) -> Iterator[str]:
    """The modules of the package that the files of a folder name."""
    files = list((ROOT / folder).rglob("*.py"))
    assert files, f"there is no folder {folder}"
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [one.name for one in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file} names modules by where it lies"
                inside = [f"cgraph.{one.name}" for one in node.names]
                names = inside if node.module == "cgraph" else [node.module or ""]
            assert "cgraph" not in names, f"{file} has the whole package"
            yield from (name for name in names if name.startswith("cgraph."))


def test_each_folder_says_what_it_knows() -> None:
    private = (path for path in ROOT.iterdir() if path.is_dir() and path.name.startswith("_"))
    assert {path.name for path in private} - {"__pycache__"} == set(KNOWN)


@pytest.mark.parametrize("folder", KNOWN)
def test_a_folder_knows_only_what_lies_below_it(folder: str) -> None:
    found = {name.split(".")[1] for name in imports(folder)}
    assert found - KNOWN[folder] == set()
    assert found & {folder, "_torch", "_text"}


def test_no_other_folders_know_each_other() -> None:
    known = {
        folder: {name.split(".")[1] for name in imports(folder)} & set(KNOWN) for folder in KNOWN
    }
    below = {folder: all_below(folder, known) for folder in KNOWN}
    for folder in KNOWN:
        together = next((one for one in TOGETHER if folder in one), {folder})
        assert {one for one in below[folder] if folder in below[one]} <= together, folder


def all_below(folder: str, known: dict[str, set[str]]) -> set[str]:
    found = set[str]()
    new = known[folder]
    while new - found:
        found |= new
        new = set().union(*(known[one] for one in new))
    return found


def test_keys_are_imported_without_what_debugs_them() -> None:
    """Nobody pays for it who does not debug: it is imported where a call needs it."""
    for file in (ROOT / "_graphed").rglob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ImportFrom):
                assert not (node.module or "").startswith("cgraph._debug"), file


def test_only_one_package_names_private_modules_and_functions_of_torch() -> None:
    found = []
    for file in ROOT.rglob("*.py"):
        if file.is_relative_to(ROOT / "_torch"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            names = [ast.unparse(node)] if isinstance(node, ast.Attribute) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{one.name}" for one in node.names]
            elif isinstance(node, ast.Import):
                names = [one.name for one in node.names]
            found += [(file.name, one) for one in names if is_private_in_torch(one)]
    assert found == []


def is_private_in_torch(name: str) -> bool:
    # Names of operators are not torch's own alone: dispatchers, exporters and compilers know them.
    return (
        not name.startswith("torch.ops.aten.")
        and re.fullmatch(r"torch\.([\w.]+\.)?_(?!_)[\w.]+", name) is not None
    )
