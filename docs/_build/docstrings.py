"""Docstrings as the site shows them: examples in boxes, and roles as links."""

from __future__ import annotations

import re
from typing import Any

import griffe

__all__ = ["Docstrings"]

_ROLE = re.compile(r":(?:class|func|meth|mod|attr|data):`~?([^`]+)`")
_EXAMPLE = re.compile(r"(?m)^>>> (?:.*\n?)(?:(?!\n).+\n?)*")


class Docstrings(griffe.Extension):
    """Turns the docstrings of each object into Markdown."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change one object's docstring."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """Return a docstring as Markdown."""
    fenced = _EXAMPLE.sub(lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", text)
    return _ROLE.sub(lambda found: f"`{found[1]}`", fenced)
