"""The lines of code that change a place, found in the source by its name."""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from types import CodeType
from typing import NamedTuple

from cgraph._source import is_omitted

__all__ = ["line_that_changes"]

# Methods of Python's containers that change them.
_METHODS = frozenset(
    "add append appendleft clear discard extend insert pop popitem popleft remove reverse rotate"
    " setdefault sort update".split()
)


def line_that_changes(name: str, codes: Iterable[CodeType]) -> str | None:
    """Return the first line of a user's code that assigns to a place or changes what is there.

    Args:
        name: The name of the place, as ``seen``, ``model.count`` or ``state['step']``.
        codes: The code that ran.

    Returns:
        The line as ``file:line``. None if none names the place, or if several lines may be meant,
        as an object may have another name there.
    """
    wanted = re.sub(r"\[.*?\]|\(.*?\)", "", name)
    users = [code for code in codes if not is_omitted(code.co_filename)]
    changes = [(path, f"{one.co_filename}:{line}") for one in users for path, line in _in(one)]
    exact = [line for path, line in changes if path == wanted]
    if exact:
        return exact[0]
    # A method calls its object self.
    end = f".{wanted.rpartition('.')[2]}"
    alike = {line for path, line in changes if "." in wanted and path.endswith(end)}
    return alike.pop() if len(alike) == 1 else None


def _in(code: CodeType) -> Iterator[tuple[str, int]]:
    """List what code changes, by its dotted name without items, and the lines where it does."""
    lines = {line for *_, line in code.co_lines() if line is not None}
    for change in _changes("".join(linecache.getlines(code.co_filename))):
        # A plain name of the function's own is no place.
        is_own = change.is_name and change.path in code.co_varnames
        if change.line in lines and not is_own:
            yield change.path, change.line


class _Change(NamedTuple):
    path: str
    line: int
    is_name: bool


# A function that is never captured is looked at again and again.
@lru_cache(maxsize=64)
def _changes(source: str) -> tuple[_Change, ...]:
    """List all changes in a file."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # no Python, as a notebook's line with a magic
        return ()
    return tuple(
        _Change(path, target.lineno, isinstance(target, ast.Name))
        for node in ast.walk(tree)
        for target in _targets(node)
        if (path := _path(target)) is not None
    )


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    """List the expressions that a statement or a call changes."""
    if isinstance(node, ast.Assign | ast.Delete):
        for one in node.targets:
            yield from one.elts if isinstance(one, ast.Tuple | ast.List) else [one]
    elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.NamedExpr | ast.For):
        yield node.target
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in _METHODS:
            yield node.func.value


def _path(node: ast.expr) -> str | None:
    """Return the dotted name of an expression, without items; None if it has none."""
    if isinstance(node, ast.Subscript | ast.Starred):
        return _path(node.value)
    if isinstance(node, ast.Attribute):
        before = _path(node.value)
        return None if before is None else f"{before}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else None
