"""The chart of calls beside torch, and the page of all tables, from the history of results.

python benches/python/chart.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

__all__ = ["chart", "latest", "page"]

ROOT = Path(__file__).parents[2]
HISTORY = ROOT / "benches/results/history.jsonl"
CHART, PAGE = ROOT / "docs/images/speed.svg", ROOT / "docs/benchmarks.md"

# What is called; its target; the row; the columns of torch's time and of cgraph's.
BARS = [
    ("replay of 10 nodes", "P1", "10", "torch µs", "cgraph µs (twice)"),
    ("replay that draws random numbers", "P7", "10", "torch µs", "cgraph µs (twice)"),
    ("new inputs: 8 copies and a replay", "P2", "8", "copies and replay", "cgraph: fresh µs"),
    ("call of a graph tree, 4 inputs", "P4", "4", "torch's trees", "cgraph"),
    ("compiled call, beside reduce-overhead", "P5", "4", "reduce-overhead", "backend="),
]
_METHOD = """\
# Benchmarks

Host time is the time until a call returns, the device still at work: what a program pays for a
call. Each table is of one process, with torch's and cgraph's ways in turns, and has the medians.
The hosts were busy, so that figures of two tables do not compare; ratios within one do. Run them by
`python benches/python/replay.py`, and so on; `benches/results/history.jsonl` has all runs.

![Host time of a call, beside torch](images/speed.svg)
"""
_WIDTH, _NAME, _ROW = 860, 270, 46
_STYLE = """\
text { font: 13px system-ui, sans-serif; fill: #24292f }
.small { font-size: 11px; fill: #57606a }
.torch { fill: #d98c00 } .cgraph { fill: #0a64ad }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .small { fill: #9da7b3 } .torch { fill: #f0b429 } .cgraph { fill: #58a6ff }
}
"""


def latest() -> dict[str, list[dict[str, Any]]]:
    """Return the last run of each table, by target."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for line in HISTORY.read_text(encoding="utf-8").splitlines():
        one = json.loads(line)
        found[one["target"], one["title"]] = one
    tables: dict[str, list[dict[str, Any]]] = {}
    for (target, _), one in found.items():
        tables.setdefault(target, []).append(one)
    return tables


def chart(tables: dict[str, list[dict[str, Any]]]) -> str:
    """Return bars of torch's and cgraph's microseconds, as a drawing."""
    rows = []
    for name, target, key, theirs, ours in BARS:
        for table in tables[target]:
            found = [row for row in table["rows"] if row[0] == key]
            columns = [_column(table["head"], one) for one in (theirs, ours)]
            if found and None not in columns:
                rows.append((name, *(_number(found[0][one]) for one in columns if one is not None)))
                break
    most = max(torch for _, torch, _ in rows)
    scale = (_WIDTH - _NAME - 150) / most
    height = 34 + _ROW * len(rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img"'
        ' aria-label="Host time of a call, torch beside cgraph">',
        f"<style>{_STYLE}</style>",
        f'<text x="{_NAME}" y="16" class="small">host µs of a call, shorter is better; one H100 or'
        " H200 with a busy host, torch 2.11</text>",
    ]
    for number, (name, torch, cgraph) in enumerate(rows):
        y = 30 + _ROW * number
        parts.append(f'<text x="{_NAME - 12}" y="{y + 22}" text-anchor="end">{escape(name)}</text>')
        for place, (way, time) in enumerate((("torch", torch), ("cgraph", cgraph))):
            top, width = y + 17 * place, max(time * scale, 2)
            said = f"{way} {time:.1f}" + (f" ({torch / cgraph:.1f} times faster)" if place else "")
            parts += [
                f'<rect x="{_NAME}" y="{top}" width="{width:.1f}" height="14" class="{way}"/>',
                f'<text x="{_NAME + width + 6:.1f}" y="{top + 11}" class="small">{said}</text>',
            ]
    return "\n".join([*parts, "</svg>", ""])


def page(tables: dict[str, list[dict[str, Any]]]) -> str:
    """Return the page of all tables."""
    parts = [_METHOD]
    for target in sorted(tables, key=lambda name: (len(name.split("-")[0]), name)):
        for one in tables[target]:
            head, rule = " | ".join(one["head"]), " | ".join(["---:"] * len(one["head"]))
            rows = "\n".join(f"| {' | '.join(row)} |" for row in one["rows"])
            title = f"## {target}: {one['title']}"
            parts.append(f"{title}\n\n{one['where']}\n\n| {head} |\n| {rule} |\n{rows}\n")
    return "\n".join(parts)


def _column(head: list[str], name: str) -> int | None:
    return next((place for place, one in enumerate(head) if name in one), None)


def _number(text: str) -> float:
    return float(text.split("/")[0])


if __name__ == "__main__":
    found = latest()
    CHART.write_text(chart(found), encoding="utf-8")
    PAGE.write_text(page(found), encoding="utf-8")
