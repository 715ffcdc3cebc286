"""The pages of the site that are made from ``cgraph.Cause``: one for each code, and their table."""

from __future__ import annotations

from typing import Any

from mkdocs.structure.files import File, Files

from cgraph.causes import Cause

__all__ = ["on_config", "on_files"]

_SECTION = "Codes of messages"


def on_config(config: Any) -> Any:
    """Add the pages to the navigation."""
    pages: list[dict[str, str] | str] = ["codes/index.md"]
    pages += [{one.code: f"codes/{one.code}.md"} for one in Cause]
    [wrong] = [one["When it goes wrong"] for one in config.nav if "When it goes wrong" in one]
    [part] = [one for one in wrong if _SECTION in one]
    part[_SECTION] = pages
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages."""
    rows = [
        f"| [{one.code}]({one.code}.md) | it {one.what} | {one.fix} |"
        for one in Cause
    ]
    table = ["| Code | What happens | What to do |", "| --- | --- | --- |", *rows]
    text = (
        f"# {_SECTION}\n\nEach message ends with its code. `cgraph why CG-HOST-READ` prints the page of"
        " one, `cgraph why` this table.\n\n"
    )
    contents = {one.code: one.page for one in Cause} | {"index": text + "\n".join(table)}
    for name, content in contents.items():
        files.append(File.generated(config, f"codes/{name}.md", content=content))
    return files
