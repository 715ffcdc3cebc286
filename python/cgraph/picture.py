"""A template as an SVG picture: rows by longest path, boxes coloured by what a node does.

Long chains run down one column and go on at the top of the next, so that hundreds of nodes make a
page and not a strip.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from os import PathLike
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from cgraph.graphs import CUDAGraph

__all__ = ["family", "save", "short_name", "svg"]

# Name, colour and pattern; the first that matches decides. Kernels are matched by what
# `_essence` leaves of their names, other nodes by their kind.
_FAMILIES = [
    ("attention", "#f9c784", r"attention|fmha|flash|sdpa"),
    ("random", "#f4a3a3", r"dropout|distribution|philox|rand|bernoulli|exponential|normal(?!i)"),
    ("matrix product", "#9ec9e8", r"gemm|gemv|nvjet|cublas|xmma|splitk|mm\b|matmul|conv|einsum"),
    ("reduction", "#b5dca0", r"reduc|norm|soft_?max|sum|mean|max|min\b|loss|scan|sort|topk"),
    ("copy, index", "#cdb9e2", r"copy|memcpy|cat|stack|clone|index|gather|scatter|embed|transpose"),
    ("fill", "#d5d9dd", r"memset|fill|zero|ones\b|scalar_tensor"),
    ("host function", "#f7ef8a", r"^host$"),
    ("child graph", "#f3b3d4", r"^child$"),
    ("order only", "#eeeeee", r"^(empty|event_\w+|type_\d+)$"),
    ("elementwise", "#fdf0cc", r""),
]
_COLOURS = {name: colour for name, colour, _ in _FAMILIES}

_BOX_WIDTH, _BOX_HEIGHT = 172, 22
_STEP_X, _STEP_Y = _BOX_WIDTH + 12, _BOX_HEIGHT + 15
_GUTTER = 28
_MARGIN = 30
_HEAD = 92
_LETTERS = 22
_ABREAST = 6
_ASPECT = 1.5

# Words of C++ names that do not say what a kernel does.
_NOISE = re.compile(
    r"(void|at|native|std|array|cuda|detail|internal|binary_internal|cutlass|unnamed|anonymous|"
    r"namespace|_?GLOBAL_\w*|float|double|int|long|short|char|bool|unsigned|const|BFloat16|Half|c10|"
    r"lambda|operator|TensorIteratorBase|Kernel2?|device_kernel|gemm|kernel|pytorch_flash|"
    r"[AB]?(Unary|Binary)Functor|gpu_kernel_impl\w*|opmath\w*|TensorListMetadata|\w{1,2})"
)
# Kernels that say how they work; what they do is a later word.
_GENERAL = re.compile(
    r"((vectorized|unrolled|legacy|index)_)?(elementwise|reduce)_kernel\w*|multi_tensor_apply_kernel"
    r"|vectorized_templated_elementwise_kernel|distribution_elementwise\w*"
)
_SAYS_WHAT = re.compile(r"Functor|[Kk]ernel|Ops?$|_cuda|_impl|exponential|uniform|normal|bernoulli")
_AFFIXES = re.compile(
    r"^(CUDAFunctor(OnSelf|OnOther)?_|cunn_|vectorized_)"
    r"|(_kernel_cuda|_cuda_kernel|_kernel_impl|CUDAKernelImpl|KernelImpl|_kernel|_cuda|_out"
    r"|(Math)?Functor|Ops)$"
)


class _Place(NamedTuple):
    """Where a box is: its left top corner, its column on the page, and its row in there."""

    x: float
    y: float
    column: int
    row: int


def save(graph: CUDAGraph, path: str | PathLike[str], *, title: str = "CUDA graph") -> None:
    """Draw a graph's live template into a file.

    Args:
        graph: Captured, with its template kept.
        path: The SVG file to write.
        title: Its heading.

    Raises:
        StateError: There is no template: nothing was captured, or it was not kept.
    """
    data = json.loads(graph._require_template("picture.save()").json())
    with open(path, "w", encoding="utf-8") as file:
        file.write(svg(data, title=title))


def svg(data: dict[str, Any], *, title: str = "CUDA graph") -> str:
    """Draw a template.

    Args:
        data: Its ``nodes``, each after those it comes after, and its ``edges``, as in the JSON of
            a template.
        title: The heading.

    Returns:
        The text of an SVG file. Each node is a ``<g class="node">`` with all that is known of it as
        its tooltip, each edge a ``<path class="edge">``.
    """
    nodes: list[dict[str, Any]] = data["nodes"]
    edges = [(edge["from"], edge["to"]) for edge in data["edges"]]
    rows = _rows(len(nodes), edges)
    places, width, height = _places(rows)
    families = [family(node) for node in nodes]
    count = f"{_plural(len(nodes), 'node')}, {_plural(len(edges), 'edge')}"
    legend, legend_width = _legend(Counter(families))
    width = max(width, legend_width)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}"'
        f' viewBox="0 0 {width:.0f} {height:.0f}">',
        f"<title>{escape(title)}: {count}</title>",
        _STYLE,
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text class="title" x="{_MARGIN}" y="36">{escape(title)}'
        f'<tspan class="count" dx="12">{count}</tspan></text>',
        *legend,
        *(_edge(places[before], places[after]) for before, after in edges),
        *(_box(node, places[i], families[i]) for i, node in enumerate(nodes)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def family(node: dict[str, Any]) -> str:
    """What a node does, in a word or two; also a key of the legend."""
    name = node.get("name")
    text = " ".join(_essence(name)).lower() if name else node["kind"]
    return next(name for name, _, pattern in _FAMILIES if re.search(pattern, text))


def short_name(name: str) -> str:
    """What a person would call a kernel: ``aten.add.Tensor`` and the mangled names of C++ alike."""
    word = _essence(name)[-1]
    while (shorter := _AFFIXES.sub("", word)) not in ("", word):
        word = shorter
    return word


def _essence(name: str) -> list[str]:
    """The one or two words of a kernel's name that say what it does, the more telling one last."""
    operator = re.fullmatch(r"\w+\.(\w+)\.\w+", name)
    if operator is not None:
        return [operator[1].strip("_") or name]
    words = _mangled_words(name) if name.startswith("_Z") else re.findall(r"[A-Za-z_]\w*", name)
    telling = [word for word in words if not _NOISE.fullmatch(word)] or [name]
    if not _GENERAL.fullmatch(telling[0]):
        return telling[:1]
    others = (word for word in telling[1:] if not _GENERAL.fullmatch(word))
    return [telling[0], next(filter(_SAYS_WHAT.search, others), telling[0])]


def _mangled_words(name: str) -> list[str]:
    """The identifiers in a name that a C++ compiler mangled, in their order."""
    words = []
    place = 2
    while place < len(name):
        # Numbers in literals (Li128E), substitutions (S0_) and closures (E1_) are no lengths.
        skipped = re.compile(r"L[a-z]n?\d+E|[ST][0-9A-Z]*_|E\d*_").match(name, place)
        length = re.compile(r"\d+").match(name, place)
        if skipped is not None:
            place = skipped.end()
        elif length is not None:
            place = length.end() + int(length[0])
            words.append(name[length.end() : place])
        else:
            place += 1
    return words


def _rows(count: int, edges: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Nodes by the longest path to them; levels that are too wide take several rows."""
    level = [0] * count
    before: list[list[int]] = [[] for _ in range(count)]
    for first, second in edges:
        before[second].append(first)
    for node in range(count):
        level[node] = max((level[first] + 1 for first in before[node]), default=0)
    levels: list[list[int]] = [[] for _ in range(max(level, default=-1) + 1)]
    for node in range(count):
        levels[level[node]].append(node)
    across = [0.0] * count
    rows = []
    for members in levels:
        # Under the mean of what a node comes after, edges cross less.
        members.sort(
            key=lambda node: sum(across[b] for b in before[node]) / (len(before[node]) or 1)
        )
        for start in range(0, len(members), _ABREAST):
            row = members[start : start + _ABREAST]
            for position, node in enumerate(row):
                across[node] = position - (len(row) - 1) / 2
            rows.append(row)
    return rows


def _places(rows: list[list[int]]) -> tuple[dict[int, _Place], float, float]:
    """Where each box is, and the page's width and height in pixels."""

    def columns(per_column: int) -> list[list[list[int]]]:
        return [rows[start : start + per_column] for start in range(0, len(rows), per_column)]

    def across(column: list[list[int]]) -> int:
        return max(map(len, column)) * _STEP_X

    def page(per_column: int) -> tuple[float, float]:
        cut = columns(per_column)
        width = 2 * _MARGIN + sum(map(across, cut)) + _GUTTER * (len(cut) - 1)
        return width, _HEAD + _MARGIN + per_column * _STEP_Y

    def off(per_column: int) -> float:
        width, height = page(per_column)
        return abs(math.log(width / height / _ASPECT))

    # As many columns as give a page of the wanted shape, of even length.
    candidates = {math.ceil(len(rows) / n) for n in range(1, min(len(rows), 100) + 1)} or {1}
    per_column = min(sorted(candidates), key=off)
    places = {}
    x = float(_MARGIN)
    for number, column in enumerate(columns(per_column)):
        for line, row in enumerate(column):
            indent = (across(column) - len(row) * _STEP_X) / 2
            for position, node in enumerate(row):
                left = x + indent + position * _STEP_X
                places[node] = _Place(left, _HEAD + line * _STEP_Y, number, line)
        x += across(column) + _GUTTER
    return places, *page(per_column)


_STYLE = """<style>
  text { font-family: ui-monospace, "DejaVu Sans Mono", Menlo, monospace; font-size: 11px; fill: #222 }
  .title { font-family: system-ui, "DejaVu Sans", sans-serif; font-size: 20px; font-weight: 600 }
  .count, .key text { font-family: system-ui, "DejaVu Sans", sans-serif; font-size: 13px; fill: #555 }
  .count { font-weight: 400 }
  .node rect, .key rect { stroke: #00000055; stroke-width: 0.8 }
  .node .index { fill: #00000066; font-size: 9px }
  .edge { fill: none; stroke: #6b7785; stroke-width: 1.1 }
  .far { stroke: #9aa5b1; stroke-width: 0.9 }
</style>
<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6"
  orient="auto"><path d="M0,0.8 L7.5,4 L0,7.2 Z" fill="#6b7785"/></marker></defs>"""


def _legend(families: Counter[str]) -> tuple[list[str], float]:
    """The families that occur, how often, and how wide the line is."""
    parts = []
    x = float(_MARGIN)
    for name, colour in _COLOURS.items():
        if families[name]:
            parts.append(
                f'<g class="key"><rect x="{x:.0f}" y="52" width="16" height="14" rx="3"'
                f' fill="{colour}"/><text x="{x + 22:.0f}" y="64">{name} {families[name]}</text></g>'
            )
            x += 22 + 7.6 * len(f"{name} {families[name]}") + 20
    return parts, x + _MARGIN


def _box(node: dict[str, Any], place: _Place, named: str) -> str:
    """A node: its number, its short name, and the rest as a tooltip."""
    name = node.get("name")
    label = short_name(name) if name else node["kind"].replace("_", " ")
    if node.get("child"):
        label = f"graph of {_plural(len(node['child']['nodes']), 'node')}"
    index = str(node["index"])
    room = _LETTERS - len(index)
    if len(label) > room:
        label = label[: room - 1] + "…"
    middle = place.y + _BOX_HEIGHT / 2 + 4
    return (
        f'<g class="node"><title>{escape(_tooltip(node))}</title>'
        f'<rect x="{place.x:.1f}" y="{place.y:.1f}" width="{_BOX_WIDTH}" height="{_BOX_HEIGHT}"'
        f' rx="4" fill="{_COLOURS[named]}"/>'
        f'<text x="{place.x + 6:.1f}" y="{middle:.1f}"><tspan class="index">{index}</tspan>'
        f'<tspan dx="6">{escape(label)}</tspan></text></g>'
    )


def _tooltip(node: dict[str, Any]) -> str:
    """All that is known of a node, a line for each thing."""
    lines = [f"{node['index']}: {node.get('name') or node['kind']}"]
    for key in ("grid", "block"):
        if node.get(key):
            lines.append(f"{key} " + " x ".join(str(node[key][axis]) for axis in "xyz"))
    for key, what in (("shared_bytes", "bytes of shared memory"), ("bytes", "bytes")):
        if node.get(key):
            lines.append(f"{node[key]} {what}")
    return "\n".join(lines)


def _edge(before: _Place, after: _Place) -> str:
    """A line from one box to another, around those between them where that is easy."""
    x0, y0 = before.x + _BOX_WIDTH / 2, before.y + _BOX_HEIGHT
    x1, y1 = after.x + _BOX_WIDTH / 2, after.y
    kind = "edge"
    if before.column != after.column and after.row == 0 and after.column == before.column + 1:
        # Down, up the gutter between the columns, and in from above.
        lane = after.x - _GUTTER / 2 - (_STEP_X - _BOX_WIDTH) / 2
        path = _rounded([(x0, y0), (x0, y0 + 8), (lane, y0 + 8), (lane, y1 - 9), (x1, y1 - 9)])
        path += f" L{x1:.1f},{y1:.1f}"
    elif before.column != after.column:
        kind = "edge far"
        x0, y0 = before.x + _BOX_WIDTH, before.y + _BOX_HEIGHT / 2
        x1, y1 = after.x, after.y + _BOX_HEIGHT / 2
        path = (
            f"M{x0:.1f},{y0:.1f} C{x0 + 60:.1f},{y0:.1f} {x1 - 60:.1f},{y1:.1f} {x1:.1f},{y1:.1f}"
        )
    elif after.row > before.row + 1 and x0 == x1:
        kind = "edge far"
        x0, y0, y1 = before.x + _BOX_WIDTH, y0 - _BOX_HEIGHT / 2, y1 + _BOX_HEIGHT / 2
        reach = x0 + 8 + 2 * min(after.row - before.row, 10)
        path = f"M{x0:.1f},{y0:.1f} C{reach:.1f},{y0:.1f} {reach:.1f},{y1:.1f} {x0:.1f},{y1:.1f}"
    else:
        bend = (y1 - y0) / 2
        path = (
            f"M{x0:.1f},{y0:.1f} C{x0:.1f},{y0 + bend:.1f} {x1:.1f},{y1 - bend:.1f}"
            f" {x1:.1f},{y1:.1f}"
        )
    return f'<path class="{kind}" d="{path}" marker-end="url(#tip)"/>'


def _rounded(points: Sequence[tuple[float, float]], radius: float = 6) -> str:
    """A path along horizontal and vertical lines, its corners rounded."""
    path = f"M{points[0][0]:.1f},{points[0][1]:.1f}"
    for (ax, ay), (bx, by), (cx, cy) in zip(points, points[1:], points[2:]):
        into = max(abs(bx - ax) + abs(by - ay), 1e-9)
        out = max(abs(cx - bx) + abs(cy - by), 1e-9)
        cut = min(radius, into / 2, out / 2)
        px, py = bx - (bx - ax) / into * cut, by - (by - ay) / into * cut
        qx, qy = bx + (cx - bx) / out * cut, by + (cy - by) / out * cut
        path += f" L{px:.1f},{py:.1f} Q{bx:.1f},{by:.1f} {qx:.1f},{qy:.1f}"
    return path + f" L{points[-1][0]:.1f},{points[-1][1]:.1f}"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
