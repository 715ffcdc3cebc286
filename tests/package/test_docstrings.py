"""Docstrings are sentences with a subject or an imperative first."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import cgraph

ROOT = Path(cgraph.__file__).parent
QUESTION_WORDS = ("How", "That", "Those", "What", "Whether", "Which", "Who", "Whose")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def first_words(path: Path) -> list[str]:
    """List the first word of each docstring of a file, with its line."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, DOCUMENTED)]
    found = [(getattr(node, "lineno", 1), ast.get_docstring(node)) for node in nodes]
    return [f"{line}: {text.split()[0]}" for line, text in found if text]


@pytest.mark.parametrize(
    "folder", sorted({path.parent for path in ROOT.rglob("*.py")}), ids=lambda path: path.name
)
def test_no_docstring_begins_with_a_question_word(folder: Path) -> None:
    """A docstring says what something does or is, not which question it answers."""
    words = [f"{path.name}:{word}" for path in folder.glob("*.py") for word in first_words(path)]
    assert words
    assert not [word for word in words if word.split()[-1] in QUESTION_WORDS]
