"""What the benches share: where they ran, and a table."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

import cgraph

__all__ = ["publish"]


def publish(title: str, head: list[str], rows: list[list[str]], file: Path | None) -> None:
    """Print a table with its heading, and append it to a file if there is one."""
    text = f"{heading(title)}\n{table(head, rows)}\n"
    print(text)
    if file is not None:
        with file.open("a") as out:
            out.write(text)


def heading(title: str) -> str:
    """The title with the device and the versions that the figures belong to."""
    return (
        f"## {title}\n\n{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA"
        f" {torch.version.cuda}, Python {platform.python_version()}, cgraph {cgraph.__version__}\n"
    )


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table that is also readable as text."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]

    def line(cells: list[str]) -> str:
        return "| " + " | ".join(c.rjust(w) for c, w in zip(cells, widths, strict=True)) + " |"

    rule = "| " + " | ".join("-" * (w - 1) + ":" for w in widths) + " |"
    return "\n".join([line(head), rule, *map(line, rows)])
