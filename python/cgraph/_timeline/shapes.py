"""Pages of boxes, lines and texts, and the two ways to write one: as SVG, or with matplotlib.

Coordinates are pixels from the top left corner of the page.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from os import PathLike, fspath
from typing import Any, Literal, NamedTuple, TypeAlias
from xml.sax.saxutils import escape

from cgraph._text import printable
from cgraph.errors import ArgumentError

__all__ = ["Box", "Dot", "Line", "Page", "Shape", "Text", "save_svg", "save_with_matplotlib"]

_SANS, _INK = 'system-ui, "DejaVu Sans", sans-serif', "#222222"
_PIXELS_PER_INCH, _SHARPNESS = 100, 2


class Box(NamedTuple):
    """A rectangle; in SVG with a class and a tooltip, if given."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    rim: str | None = None
    corner: float = 0
    kind: str = ""
    tip: str = ""

    def svg(self) -> str:
        place = " ".join(f'{key}="{_number(getattr(self, key))}"' for key in self._fields[:4])
        kind = f' class="{self.kind}"' if self.kind else ""
        corner = f' rx="{_number(self.corner)}"' if self.corner else ""
        rim = f' stroke="{self.rim}" stroke-width="0.8"' if self.rim else ""
        title = f"<title>{_xml(self.tip)}</title>" if self.tip else ""
        return f'<rect{kind} {place}{corner} fill="{self.fill}"{rim}>{title}</rect>'

    def draw(self, axes: Any) -> None:
        patches = importlib.import_module("matplotlib.patches")
        # Where boxes are thinner than a pixel, their edges would show the ground between them.
        smooth = self.width > 2 and self.height > 2
        axes.add_patch(
            patches.Rectangle(
                (self.x, self.y),
                self.width,
                self.height,
                facecolor=self.fill,
                edgecolor=self.rim or "none",
                linewidth=_points(0.8),
                antialiased=smooth,
            )
        )


class Line(NamedTuple):
    """A line through points; with a fill, the area that it encloses."""

    points: Sequence[tuple[float, float]]
    colour: str
    width: float = 1
    dashed: bool = False
    fill: str | None = None

    def svg(self) -> str:
        path = "M" + " ".join(f"{_number(x)},{_number(y)}" for x, y in self.points)
        dashes = ' stroke-dasharray="4 3"' if self.dashed else ""
        return (
            f'<path d="{path}" fill="{self.fill or "none"}" stroke="{self.colour}"'
            f' stroke-width="{self.width}" stroke-linejoin="round"{dashes}/>'
        )

    def draw(self, axes: Any) -> None:
        xs, ys = zip(*self.points, strict=True)
        if self.fill:
            axes.fill(xs, ys, facecolor=self.fill, edgecolor="none")
        dashes = {"dashes": (4, 3)} if self.dashed else {}
        axes.plot(xs, ys, color=self.colour, linewidth=_points(self.width), **dashes)


class Dot(NamedTuple):
    """A filled circle with a white rim."""

    x: float
    y: float
    radius: float
    fill: str

    def svg(self) -> str:
        return (
            f'<circle cx="{_number(self.x)}" cy="{_number(self.y)}" r="{_number(self.radius)}"'
            f' fill="{self.fill}" stroke="#ffffff" stroke-width="1.5"/>'
        )

    def draw(self, axes: Any) -> None:
        patches = importlib.import_module("matplotlib.patches")
        middle = (self.x, self.y)
        axes.add_patch(
            patches.Circle(middle, self.radius, facecolor=self.fill, edgecolor="white", zorder=3)
        )


class Text(NamedTuple):
    """A line of text that starts, is centred or ends at x, with its baseline at y."""

    x: float
    y: float
    text: str
    size: float = 11
    fill: str = _INK
    anchor: Literal["start", "middle", "end"] = "start"
    bold: bool = False

    def svg(self) -> str:
        anchor = f' text-anchor="{self.anchor}"' if self.anchor != "start" else ""
        weight = ' font-weight="600"' if self.bold else ""
        return (
            f'<text x="{_number(self.x)}" y="{_number(self.y)}" font-size="{self.size}"'
            f' fill="{self.fill}"{anchor}{weight}>{_xml(self.text)}</text>'
        )

    def draw(self, axes: Any) -> None:
        axes.text(
            self.x,
            self.y,
            printable(self.text),
            fontsize=_points(self.size),
            color=self.fill,
            horizontalalignment={"start": "left", "middle": "center", "end": "right"}[self.anchor],
            verticalalignment="baseline",
            fontweight="bold" if self.bold else "normal",
            parse_math=False,  # a label may have dollars in it
        )


Shape: TypeAlias = Box | Line | Dot | Text


class Page(NamedTuple):
    """A page: the size in pixels, a short title, and shapes, each drawn over the earlier ones."""

    width: float
    height: float
    title: str
    shapes: Sequence[Shape]


def save_svg(page: Page, path: str | PathLike[str]) -> None:
    """Write a page as SVG text that needs no other files."""
    width, height = _number(page.width), _number(page.height)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
        f' viewBox="0 0 {width} {height}" font-family="{escape(_SANS, {chr(34): "&quot;"})}">',
        f"<title>{_xml(page.title)}</title>",
        "<style>.span:hover { stroke: #222222; stroke-width: 1.5 }</style>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        *(shape.svg() for shape in page.shapes),
        "</svg>",
    ]
    with open(path, "w", encoding="utf-8") as file:
        file.write("\n".join(parts) + "\n")


def save_with_matplotlib(page: Page, path: str | PathLike[str]) -> None:
    """Write a page in a matplotlib format, chosen by the path's suffix.

    Raises:
        ArgumentError: matplotlib is missing.
    """
    try:
        importlib.import_module("matplotlib")
        figures = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ArgumentError(
            f"path is {fspath(path)!r}, and without matplotlib only SVG can be drawn:"
            " pip install matplotlib, or use a name that ends in .svg"
        ) from error
    size = (page.width / _PIXELS_PER_INCH, page.height / _PIXELS_PER_INCH)
    figure = figures.Figure(figsize=size, dpi=_PIXELS_PER_INCH, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.axis("off")
    for shape in page.shapes:
        shape.draw(axes)
    axes.set_xlim(0, page.width)
    axes.set_ylim(page.height, 0)
    figure.savefig(path, dpi=_PIXELS_PER_INCH * _SHARPNESS)


def _points(pixels: float) -> float:
    return pixels * 72 / _PIXELS_PER_INCH


def _number(value: float) -> str:
    """Return thousandths of a pixel, without trailing zeros."""
    return f"{value:.3f}".rstrip("0").rstrip(".")


def _xml(text: str) -> str:
    return escape(printable(text))
