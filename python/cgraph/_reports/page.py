"""Reports of graphed functions as one page of HTML that needs no other files."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from cgraph._reports import text

if TYPE_CHECKING:
    from cgraph.reports import FunctionReport, KeyReport

__all__ = ["fragment", "page"]

_LEGEND = "Sorted by how often a key was replayed."

# A class of its own, as notebooks show the content together with other content.
_STYLE = """
.cgraph-report {
  color-scheme: light dark; --ink: #1f2630; --faint: #5b6573; --rule: #d5dae1; --ground: #ffffff;
  --bad: #b3261e; --head: #f4f6f9;
  color: var(--ink); background: var(--ground); padding: 1rem; overflow-x: auto;
  font: 14px/1.45 system-ui, "DejaVu Sans", sans-serif;
}
@media (prefers-color-scheme: dark) {
  .cgraph-report {
    --ink: #e6e9ee; --faint: #a3adba; --rule: #3a424e; --ground: #14181d;
    --bad: #ff8a80; --head: #1d232b;
  }
}
.cgraph-report h2 { font-size: 1.15rem; margin: 1.6rem 0 0.2rem; }
.cgraph-report p { margin: 0.2rem 0 0.6rem; color: var(--faint); }
.cgraph-report table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
.cgraph-report th, .cgraph-report td {
  padding: 0.3rem 0.6rem; text-align: right; vertical-align: top;
  color: var(--ink); background: var(--ground);
}
.cgraph-report thead th { background: var(--head); white-space: nowrap; }
.cgraph-report .words { text-align: left; }
.cgraph-report td.words, .cgraph-report th[scope=row] { overflow-wrap: anywhere; }
.cgraph-report th[scope=row] { font-weight: 600; min-width: 14rem; }
.cgraph-report tbody { border-top: 1px solid var(--rule); }
.cgraph-report dl {
  display: grid; grid-template-columns: max-content 1fr; gap: 0.1rem 0.8rem; margin: 0;
}
.cgraph-report dt { color: var(--faint); }
.cgraph-report dd { margin: 0; }
.cgraph-report .advice { color: var(--bad); font-weight: 600; }
"""
_AROUND = """
html { color-scheme: light dark; background: #ffffff; }
@media (prefers-color-scheme: dark) { html { background: #14181d; } }
body { margin: 0; }
"""


def page(functions: Sequence[FunctionReport]) -> str:
    """Return a whole page, which is also XML."""
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"<title>cgraph: graphed functions</title>\n<style>{_AROUND}</style>\n</head>\n<body>\n"
        f"{fragment(functions)}\n</body>\n</html>\n"
    )


def fragment(functions: Sequence[FunctionReport]) -> str:
    """Return the content of a page, with its style."""
    said = f"<p>{escape(text.totals(functions))}</p>" if len(functions) != 1 else ""
    parts = [f"<style>{_STYLE}</style>", said, *map(_function, functions)]
    return '<div class="cgraph-report">\n' + "\n".join(filter(None, parts)) + "\n</div>"


def _function(function: FunctionReport) -> str:
    parts = [
        "<section>",
        f"<h2>{escape(text.heading(function))}</h2>",
        f"<p>{escape(text.summary(function))}</p>",
    ]
    if function.keys:
        parts += [f"<p>{_LEGEND}</p>", _table(function)]
    return "\n".join([*parts, "</section>"])


def _table(function: FunctionReport) -> str:
    heads = []
    for place, name in enumerate(text.HEAD):
        heads.append(f'<th scope="col"{_words(place)}>{escape(name)}</th>')
    head = f"<thead><tr>{''.join(heads)}</tr></thead>"
    bodies = map(_body, text.in_order(function.keys))
    return "\n".join(["<table>", head, *bodies, "</table>"])


def _body(key: KeyReport) -> str:
    """Return a key's row, and one below it for its notes."""
    row = []
    for place, cell in enumerate(text.cells(key)):
        if place == 0:
            row.append(f'<th scope="row" class="words">{escape(cell)}</th>')
        else:
            row.append(f"<td{_words(place)}>{escape(cell)}</td>")
    rows = f"<tr>{''.join(row)}</tr>"
    if notes := text.notes(key):
        said = "".join(
            f"<dt>{escape(about)}</dt>"
            f'<dd class="{"advice" if about == "advice" else "note"}">{escape(words)}</dd>'
            for about, words in notes
        )
        rows += f'<tr><td class="words" colspan="{len(row)}"><dl>{said}</dl></td></tr>'
    return f"<tbody>{rows}</tbody>"


def _words(place: int) -> str:
    """Return the class of a text column: the first two."""
    return ' class="words"' if place < 2 else ""
