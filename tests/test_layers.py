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
CAPTURES = BASE | {"_captures", "_state", "labels", "mempool", "sim", "timeline"}
GRAPHS = CAPTURES | {"_breaks", "breaks", "cudagraph", "graphs", "segments"}
KNOWN = {
    "_torch": {"_core", "_driver", "_torch", "errors"},
    "_state": {"_core", "_state", "_torch", "errors"},
    "_captures": CAPTURES,
    "_breaks": GRAPHS,
    "_callables": GRAPHS | {"_callables"},
    # Of those of all keys only the classes that debug, and these only in annotations.
    "_recording": GRAPHS | {"_functions", "_recording", "callables"},
    "_functions": GRAPHS | {"_explanation", "_functions", "_recording", "hooks", "reports"},
    "_explanation": BASE | {"_explanation", "breaks"},
    "_reports": {"_reports", "_text", "reports"},
    "_timeline": {"_text", "_timeline", "errors", "timeline"},
}


def imports(folder: str) -> Iterator[tuple[str, bool]]:
    """The modules of the package that the files of a folder name, and whether for types alone."""
    files = list((ROOT / folder).rglob("*.py"))
    assert files, f"there is no folder {folder}"
    for file in files:
        tree = ast.parse(file.read_text())
        blocks = (node for node in ast.walk(tree) if isinstance(node, ast.If))
        for_types = {
            id(inner)
            for block in blocks
            if isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
            for inner in ast.walk(block)
        }
        for node in ast.walk(tree):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [one.name for one in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file} names modules by where it lies"
                inside = [f"cgraph.{one.name}" for one in node.names]
                names = inside if node.module == "cgraph" else [node.module or ""]
            assert "cgraph" not in names, f"{file} has the whole package"
            of_package = [name for name in names if name.startswith("cgraph.")]
            yield from ((name, id(node) in for_types) for name in of_package)


def test_each_folder_says_what_it_knows() -> None:
    private = (path for path in ROOT.iterdir() if path.is_dir() and path.name.startswith("_"))
    assert {path.name for path in private} - {"__pycache__"} == set(KNOWN)


@pytest.mark.parametrize("folder", KNOWN)
def test_a_folder_knows_only_what_lies_below_it(folder: str) -> None:
    found = {name.split(".")[1] for name, _ in imports(folder)}
    assert found - KNOWN[folder] == set()
    assert found & {folder, "_torch", "_text"}


def test_what_is_of_one_key_knows_of_all_keys_only_the_types_that_debug() -> None:
    found = [one for one in imports("_recording") if one[0].startswith("cgraph._functions")]
    assert all(name.startswith("cgraph._functions.debug.") for name, _ in found)
    assert all(for_types for _, for_types in found)


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
    return re.fullmatch(r"torch\.([\w.]+\.)?_(?!_)[\w.]+", name) is not None
