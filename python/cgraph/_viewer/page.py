"""A view as one page of HTML that needs no other files and no network."""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any

from cgraph._text import plural, printable
from cgraph._viewer.memory import as_drawn
from cgraph._viewer.nesting import Fold, Group, Item
from cgraph._viewer.nodes import FAMILIES, Node
from cgraph.timeline import Timeline

__all__ = ["Drawing", "frame", "page"]

# All that may stand in the list of measures, in its order.
_MEASURES = ("bytes", "threads", "seconds", "replays")
_SCRIPTS = ("page.js", "graph.js", "memory.js", "start.js")


@dataclass(frozen=True)
class Drawing:
    """A graph or a tree, ready to be drawn.

    Attributes:
        nodes: The nodes in order, with their lanes.
        root: They in groups.
        tab: The name of its tab.
        noun: The word for a node.
        note: What is said beside the numbers, if anything.
    """

    nodes: Sequence[Node]
    root: Group
    tab: str
    noun: str
    note: str = ""


def page(title: str, drawing: Drawing | None, timeline: Timeline | None) -> str:
    """Return a whole page.

    The same data give the same bytes.

    Args:
        title: Its heading.
        drawing: What the first tab shows.
        timeline: What the tab of the memory shows.
    """
    data: dict[str, Any] = {"title": title}
    if drawing is not None:
        data["graph"] = _as_drawn(drawing)
    if timeline is not None:
        data["memory"] = as_drawn(timeline)
    here = files("cgraph._viewer")
    style = (here / "page.css").read_text(encoding="utf-8")
    script = "".join((here / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    body = (here / "page.html").read_text(encoding="utf-8")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(printable(title))}</title>\n<style>\n{style}</style>\n</head>\n"
        f'{body}<script type="application/json" id="data">{_json(data)}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def frame(html: str, title: str) -> str:
    """Return a page inside of another one, as notebooks show it; it reaches nothing outside."""
    return (
        f'<iframe srcdoc="{escape(html)}" title="{escape(printable(title))}"'
        ' sandbox="allow-scripts" style="width: 100%; height: 640px; border: 1px solid #8886">'
        "</iframe>"
    )


def _json(data: dict[str, Any]) -> str:
    """Return values as JSON in ASCII that ends no element of a page."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _as_drawn(drawing: Drawing) -> dict[str, Any]:
    """Return what the page needs of a drawing; each text is there once."""
    texts: dict[str, int] = {}

    def known(text: str) -> int:
        return texts.setdefault(text, len(texts))

    nodes = drawing.nodes
    # Where all are equal there is nothing to compare, as threads on the simulator.
    values = [node.measures for node in nodes]
    measures = [name for name in _MEASURES if len({one[name] for one in values if name in one}) > 1]
    counts = Counter(node.family for node in nodes)
    families = [name for name in FAMILIES if counts[name]]
    drawn = [
        {
            "t": known(node.title),
            "n": known(node.note),
            "f": families.index(node.family),
            "l": node.lane,
            "d": node.depends,
            "m": [node.measures.get(name, 0) for name in measures],
            "x": [known(text) for fact in node.facts for text in fact],
        }
        for node in nodes
    ]
    edges = sum(len(node.depends) for node in nodes)
    words = [plural(len(nodes), drawing.noun), plural(edges, "edge")]
    if (lanes := len({node.lane for node in nodes})) > 1:
        words.append(plural(lanes, "lane"))
    words += [drawing.note] if drawing.note else []
    return {
        "tab": drawing.tab,
        "noun": drawing.noun,
        "about": ", ".join(words),
        "families": [[name, *FAMILIES[name], counts[name]] for name in families],
        "measures": ["equal", *measures],
        "nodes": drawn,
        "root": _tree(drawing.root),
        "texts": [*texts],
    }


def _tree(item: Item) -> Any:
    """Return groups as plain values: a number is a node, ``i`` are items, ``r`` repetitions."""
    if isinstance(item, int):
        return item
    about: dict[str, Any] = {"n": item.name, "l": item.lane}
    if isinstance(item, Fold):
        return {**about, "r": [_tree(one) for one in item.repetitions]}
    if item.after:
        about["a"] = item.after
    return {**about, "i": [_tree(one) for one in item.items]}
