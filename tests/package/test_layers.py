"""Arrows between the parts of the package go down, as docs/architecture.md draws them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import cgraph

ROOT = Path(cgraph.__file__).parent
DRAWING = Path(__file__).parents[2] / "docs" / "architecture.md"
COMPILED = {"cgraph._core"}

pytestmark = pytest.mark.skipif(
    not DRAWING.exists(), reason="the bundle for GPU machines has no documentation"
)


def layers() -> list[list[str]]:
    """List the layers of the drawing, lowest first; the parts of a layer do not know each other."""
    (found,) = re.findall(r"```layers of python/cgraph\n(.*?)```", DRAWING.read_text(), re.DOTALL)
    return [line.split() for line in reversed(found.strip().splitlines())]


def files() -> dict[str, Path]:
    """Return the files of the package by module name."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(("cgraph", *parts)).removesuffix(".__init__")] = path
    return found


def imports(path: Path, modules: dict[str, Path]) -> set[str]:
    """List the modules of the package that a file imports, also where a function does so.

    Imports for types alone do not count.
    """
    tree = ast.parse(path.read_text())
    for_types = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for part in ast.walk(node)
    }
    names: list[str] = []
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            names += [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} names modules by where it lies"
            inside = (f"{node.module}.{one.name}" for one in node.names)
            names += [one if one in {*modules, *COMPILED} else str(node.module) for one in inside]
    # The command line is one of its users.
    is_outside = path.parent in (ROOT, ROOT / "_cli")
    assert "cgraph" not in names or is_outside, f"{path} imports the whole package"
    return {name for name in names if name in modules and name != "cgraph"}


def part_of(module: str) -> str:
    """Return the part of the package that a module belongs to."""
    return module.split(".")[1]


def arrows() -> Iterator[tuple[str, str]]:
    """List the imports between modules."""
    modules = files()
    for module, path in modules.items():
        if module not in ("cgraph", "cgraph.__main__"):
            yield from ((module, other) for other in imports(path, modules))


def test_the_drawing_has_all_parts_of_the_package() -> None:
    drawn = [part for layer in layers() for part in layer]
    parts = {part_of(module) for module in files() if module != "cgraph"} - {"__main__"}
    assert sorted(drawn) == sorted(parts)


def test_a_part_imports_only_what_lies_below_it() -> None:
    heights = {part: height for height, layer in enumerate(layers()) for part in layer}
    wrong = [
        f"{module} imports {other}"
        for module, other in arrows()
        if part_of(module) != part_of(other) and heights[part_of(module)] <= heights[part_of(other)]
    ]
    assert wrong == []


def test_no_file_imports_itself_by_others() -> None:
    below: dict[str, set[str]] = {}
    for module, other in arrows():
        below.setdefault(module, set()).add(other)
    for module in below:
        found, new = set[str](), below[module]
        while new - found:
            found |= new
            new = set().union(*(below.get(one, set()) for one in new))
        assert module not in found


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
    """Return whether a name of torch may change; operator names are not torch's alone."""
    return (
        not name.startswith("torch.ops.aten.")
        and re.fullmatch(r"torch\.([\w.]+\.)?_(?!_)[\w.]+", name) is not None
    )
