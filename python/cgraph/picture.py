"""A template as an SVG picture: rows by longest path, boxes coloured by a node's function.

Long chains run down one column and continue at the top of the next, so that hundreds of nodes make
a page and not a strip.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from cgraph._text import plural
from cgraph.cudagraph import CUDAGraph
from cgraph.labels import Label, as_dict

__all__ = ["family", "save", "short_name", "svg"]

# The first pattern that matches the essence of a kernel's name, or another node's kind, decides.
_FAMILIES = [
    ("attention", "#fc8", r"attention|fmha|flash|sdpa"),
    ("random", "#faa", r"dropout|distribution|philox|rand|bernoulli|exponential|normal(?!i)"),
    ("matrix product", "#9ce", r"gemm|gemv|nvjet|cublas|xmma|splitk|mm\b|matmul|conv|einsum"),
    ("reduction", "#bd9", r"reduc|norm|softmax|sum|mean|loss|rowwise|gammab|\b(arg|a)?m(ax|in)\b"),
    ("copy, index", "#cbe", r"copy(?!s)|memcpy|cat|stack|clone|index|gather|scatter|embed|transp"),
    ("fill", "#dde", r"memset|fill|zero|\bones|^scalar_tensor"),
    ("host function", "#fe7", r"^host$"),
    ("child graph", "#fbd", r"^(child|conditional)$"),
    ("memory", "#cde", r"^mem_(alloc|free)$"),
    ("order only", "#eee", r"^(empty|event_\w+|external_\w+|batch_mem_op|type_\d+)$"),
    ("elementwise", "#feb", r""),
]
_COLOURS = {name: colour for name, colour, _ in _FAMILIES}

_BOX_WIDTH, _BOX_HEIGHT = 172, 22
_STEP_X, _STEP_Y = _BOX_WIDTH + 12, _BOX_HEIGHT + 15
_GUTTER, _MARGIN, _HEAD = 28, 30, 92
_LETTERS, _ABREAST, _ASPECT = 21, 6, 1.5

# Words of C++ names that do not describe a kernel's function.
_NOISE = re.compile(
    r"(void|at|native|std|array|cuda|detail|internal|binary_internal|cutlass|unnamed|anonymous|c10|"
    r"namespace|_?GLOBAL_\w*|float|double|int|long|short|char|bool|unsigned|const|BFloat16|Half|"
    r"cublasLt|lambda|operator|TensorIteratorBase|Kernel2?|device_kernel|gemm|kernel|opmath\w*|"
    r"pytorch_flash|[AB]?(Unary|Binary)Functor|gpu_(kernel_impl|index)\w*|\w*TensorList\w*Metadata|"
    r"func_wrapper_t|ReduceOp|(Unary|Binary|Ternary|Pointwise)Op\w*Functor_?|\w{1,2})"
)
# Words for the method of a kernel; its function is a later word.
_GENERAL = re.compile(
    r"((vectorized|unrolled|legacy|index|vectorized_templated)_)?(elementwise|reduce)_kernel\w*"
    r"|multi_tensor_apply_kernel|distribution_elementwise\w*"
)
_SAYS_WHAT = re.compile(
    r"[Ff]unctor|[Kk]ernel|Ops?$|_cuda|_impl|exponential|uniform|normal|bernoulli"
)
_AFFIXES = re.compile(
    r"^(CUDAFunctor(OnSelf|OnOther)?_|cunn_|vectorized_|native_|scaled_dot_product_)"
    r"|(_kernel_cuda|_cuda_kernel|_kernel_impl|CUDAKernel(Impl)?|KernelImpl|_kernel|_cuda|_out"
    r"|(Math)?_?[Ff]unctor|Ops)$"
)
# A length, unlike the numbers in literals (Li128E), substitutions (S0_) and closures (E1_).
_TOKEN = re.compile(r"L[a-z]n?\d+E|[ST][0-9A-Z]*_|E\d*_|(\d+)|.")


class _Position(NamedTuple):
    """The position of a box: top left corner, gutter before its column, its column and row."""

    x: float
    y: float
    gutter: float
    column: int
    row: int


def save(graph: CUDAGraph, path: str | PathLike[str], *, title: str = "CUDA graph") -> None:
    """Draw a graph's live template into a file, with the labels that its capture recorded.

    graph: The graph, captured with its template kept.
        graph: Captured, with its template kept.
        path: The SVG file to write.
        title: Its heading.

    Raises:
        StateError: There is no template: nothing was captured, or it was not kept.
    """
    data = json.loads(graph._require_template("picture.save()").json())
    with open(path, "w", encoding="utf-8") as file:
        file.write(svg(data, title=title, labels=graph._labels))


def svg(
    data: dict[str, Any],
    *,
    title: str = "CUDA graph",
    labels: Mapping[int, Label] | None = None,
) -> str:
    """Draw a template.

    Args:
        data: Its ``nodes``, each after those it depends on, and ``edges``, as a template's JSON.
        title: The heading.
        labels: The origins of nodes, by their ``handle``. A box is then named after its operator.

    Returns:
        The text of an SVG file. Each node is a ``<g class="node">`` with all its data as its
        tooltip, each edge a ``<path class="edge">``.
    """
    nodes: list[dict[str, Any]] = data["nodes"]
    edges = [(edge["from"], edge["to"]) for edge in data["edges"]]
    places, width, height = _places(_rows(len(nodes), edges))
    families = [family(node) for node in nodes]
    count = f"{plural(len(nodes), 'node')}, {plural(len(edges), 'edge')}"
    legend, legend_width = _legend(Counter(families))
    width = max(width, legend_width, 480)
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
        *(
            _box(node, places[i], families[i], (labels or {}).get(node.get("handle", 0)))
            for i, node in enumerate(nodes)
        ),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def family(node: dict[str, Any]) -> str:
    """Return the function of a node in a word or two; also a key of the legend."""
    name = node.get("name")
    text = " ".join(_essence(name)).lower() if name else node["kind"]
    return next(name for name, _, pattern in _FAMILIES if re.search(pattern, text))


def short_name(name: str) -> str:
    """Return a short name of a kernel, as a person would use.

    >>> short_name("aten.add.Tensor"), short_name("_ZN2at6native11gelu_kernelIfEEvPT_")
    ('add', 'gelu')
    """
    word = _essence(name)[-1]
    while (shorter := _AFFIXES.sub("", word)) not in ("", word):
        word = shorter
    return word


def _essence(name: str) -> list[str]:
    """Return the one or two most descriptive words of a kernel's name, the better one last."""
    operator = re.fullmatch(r"\w+\.(\w+)\.\w+", name)
    if operator is not None:
        return [operator[1].strip("_") or name]
    words = _mangled_words(name) if name.startswith("_Z") else re.findall(r"[A-Za-z_]\w*", name)
    telling = [word for word in words if not _NOISE.fullmatch(word)] or [name]
    if not _GENERAL.fullmatch(telling[0]):
        return telling[:1]
    others = [word for word in telling[1:] if not _GENERAL.fullmatch(word)] or telling[:1]
    return [telling[0], next(filter(_SAYS_WHAT.search, others), others[0])]


def _mangled_words(name: str) -> list[str]:
    """Return the identifiers in a name that a C++ compiler mangled, in their order."""
    words = []
    place = 2
    while token := _TOKEN.match(name, place):
        place = token.end()
        if token[1]:
            words.append(name[place : place + int(token[1])])
            place += int(token[1])
    return words


def _rows(count: int, edges: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Return nodes by the longest path to them; levels that are too wide take several rows."""
    level = [0] * count
    for first, second in sorted(edges):
        level[second] = max(level[second], level[first] + 1)
    levels: list[list[int]] = [[] for _ in range(max(level, default=-1) + 1)]
    for node in range(count):
        levels[level[node]].append(node)
    return [
        members[start : start + _ABREAST]
        for members in levels
        for start in range(0, len(members), _ABREAST)
    ]


def _places(rows: list[list[int]]) -> tuple[dict[int, _Position], float, float]:
    """Return the position of each box, and the page's width and height in pixels."""

    def page(per_column: int) -> tuple[list[list[list[int]]], list[int], float, float]:
        cut = [rows[start : start + per_column] for start in range(0, len(rows), per_column)]
        widths = [max(map(len, column)) * _STEP_X for column in cut]
        width = 2 * _MARGIN + sum(widths) + _GUTTER * (len(cut) - 1)
        return cut, widths, width, _HEAD + _MARGIN + per_column * _STEP_Y

    def misshapen(per_column: int) -> float:
        _, _, width, height = page(per_column)
        return abs(math.log(width / height / _ASPECT))

    # The number of columns gives a page of the wanted shape, with columns of equal length.
    candidates = {math.ceil(len(rows) / n) for n in range(1, min(len(rows), 100) + 1)} or {1}
    cut, widths, width, height = page(min(sorted(candidates), key=misshapen))
    places = {}
    x = float(_MARGIN)
    for number, (column, wide) in enumerate(zip(cut, widths, strict=True)):
        for line, row in enumerate(column):
            indent = (wide - len(row) * _STEP_X) / 2
            for position, node in enumerate(row):
                left = x + indent + position * _STEP_X
                places[node] = _Position(
                    left, _HEAD + line * _STEP_Y, x - _GUTTER / 2 - 6, number, line
                )
        x += wide + _GUTTER
    return places, width, height


_STYLE = """<style>
  text { font: 11px ui-monospace, "DejaVu Sans Mono", Menlo, monospace; fill: #222 }
  .title { font: 600 20px system-ui, "DejaVu Sans", sans-serif }
  .count, .key text { font: 400 13px system-ui, "DejaVu Sans", sans-serif; fill: #555 }
  .node rect, .key rect { stroke: #0005; stroke-width: 0.8 }
  .index { fill: #0007; font-size: 9px }
  .edge { fill: none; stroke: #6b7785; stroke-width: 1.1 }
  .far { stroke: #9aa5b1; stroke-width: 0.9 }
</style>
<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6"
  orient="auto"><path d="M0,0.8 L7.5,4 L0,7.2 Z" fill="#6b7785"/></marker></defs>"""


def _legend(families: Counter[str]) -> tuple[list[str], float]:
    """Return the families that occur with their counts, and the width of the line."""
    parts = []
    x = _MARGIN
    for name, colour in _COLOURS.items():
        if families[name]:
            label = f"{name} {families[name]}"
            parts.append(
                f'<g class="key"><rect x="{x}" y="52" width="16" height="14" rx="3"'
                f' fill="{colour}"/><text x="{x + 22}" y="64">{label}</text></g>'
            )
            x += 48 + 7 * len(label)
    return parts, x


def _box(node: dict[str, Any], place: _Position, named: str, origin: Label | None) -> str:
    """Return the box of a node: its number, its short name, and the rest as a tooltip."""
    name = node.get("name")
    if origin is not None and origin.operator is not None:
        name = origin.operator
    label = short_name(name) if name else node["kind"].replace("_", " ")
    if node.get("bodies"):
        label = f"graph of {plural(sum(len(body['nodes']) for body in node['bodies']), 'node')}"
    if len(label) > _LETTERS:
        label = label[: _LETTERS - 1] + "…"
    middle = place.y + _BOX_HEIGHT / 2 + 4
    return (
        f'<g class="node"><title>{escape(_tooltip(node, origin))}</title>'
        f'<rect x="{place.x}" y="{place.y}" width="{_BOX_WIDTH}" height="{_BOX_HEIGHT}"'
        f' rx="4" fill="{_COLOURS[named]}"/>'
        f'<text y="{middle}"><tspan class="index" x="{place.x + 5}">{node["index"]}</tspan>'
        f'<tspan x="{place.x + 28}">{escape(label)}</tspan></text></g>'
    )


def _tooltip(node: dict[str, Any], origin: Label | None) -> str:
    """Return all data of a node, one line for each item."""

    def text(value: Any) -> str:
        if isinstance(value, list):
            return " > ".join(value)
        return " x ".join(map(str, value.values())) if isinstance(value, dict) else str(value)

    known = {key: value for key, value in node.items() if key not in ("bodies", "handle")}
    if origin is not None:
        known |= {key: value for key, value in as_dict(origin).items() if value}
    return "\n".join(f"{key}: {text(value)}" for key, value in known.items())


def _edge(before: _Position, after: _Position) -> str:
    """Return a line from one box to another, around those between them where that is easy."""
    x0, y0 = before.x + _BOX_WIDTH / 2, before.y + _BOX_HEIGHT
    x1, y1 = after.x + _BOX_WIDTH / 2, after.y
    kind = "edge far"
    if after.row == 0 and after.column == before.column + 1:
        # Down, up the gutter between the columns, and in from above.
        kind, lane = "edge", after.gutter
        path = (
            f"M{x0},{y0} v2 q0,6 6,6 H{lane - 6} q6,0 6,-6 V{y1 - 3} q0,-6 6,-6 H{x1 - 6}"
            f" q6,0 6,6 V{y1}"
        )
    elif before.column != after.column:
        x0, x1 = before.x + _BOX_WIDTH, after.x
        y0, y1 = y0 - _BOX_HEIGHT / 2, y1 + _BOX_HEIGHT / 2
        path = f"M{x0},{y0} C{x0 + 60},{y0} {x1 - 60},{y1} {x1},{y1}"
    elif after.row > before.row + 1 and x0 == x1:
        x0 = before.x + _BOX_WIDTH
        y0, y1 = y0 - _BOX_HEIGHT / 2, y1 + _BOX_HEIGHT / 2
        reach = x0 + 8 + 2 * min(after.row - before.row, 10)
        path = f"M{x0},{y0} C{reach},{y0} {reach},{y1} {x0},{y1}"
    else:
        kind, middle = "edge", (y0 + y1) / 2
        path = f"M{x0},{y0} C{x0},{middle} {x1},{middle} {x1},{y1}"
    return f'<path class="{kind}" d="{path}" marker-end="url(#tip)"/>'
