"""``view``: a captured graph, the memory of a pool, or graph trees as one page to look at.

>>> import torch, cgraph
>>> with cgraph.sim.use():
...     x, graph = torch.ones(4), cgraph.CUDAGraph(keep_graph=True)
...     with cgraph.record_memory(), cgraph.graph(graph, enable_annotations=True):
...         y = (x * 2).exp()
...     shown = cgraph.view(graph, title="two operators")
...     print(shown)
<cgraph.View of two operators: 2 nodes, 2 blocks>
"""

from __future__ import annotations

import json
import pickle
import tempfile
import webbrowser
from functools import cached_property
from os import PathLike
from pathlib import Path

from cgraph import trees
from cgraph._text import plural, shown
from cgraph._trees.report import TreesReport
from cgraph._viewer.exports import memory_snapshot, trace_events
from cgraph._viewer.lanes import in_lanes, ordered
from cgraph._viewer.nesting import nested
from cgraph._viewer.nodes import Node, break_node, nodes_of
from cgraph._viewer.page import Drawing, frame, page
from cgraph._viewer.times import add_times, profiled
from cgraph._viewer.tree import of_trees
from cgraph.cudagraph import CUDAGraph
from cgraph.dryrun import DryRun
from cgraph.errors import ArgumentError, StateError
from cgraph.ledger import GraphMemory
from cgraph.mempool import MemPool
from cgraph.segments import SegmentedGraph
from cgraph.timeline import Timeline

__all__ = ["View", "view"]

_KINDS = (
    "a CUDAGraph, a SegmentedGraph, a MemPool or its token, a Timeline, what memory() or dry_run()"
    " returned, cgraph.trees or its report()"
)
_RECORD = "Fix: capture inside `with cgraph.record_memory():`"


def view(what: object, *, title: str | None = None, measure: bool = False) -> View:
    """Return a graph, a pool's memory or graph trees as a page for a browser or a notebook.

    The page of a graph has its nodes in their modules, equal layers folded into one, branches side
    by side; a click tells all about a node. If its blocks were recorded, another tab has its
    memory.

    Args:
        what: A :class:`CUDAGraph` that keeps its template, best captured with
            ``enable_annotations=True`` and inside :func:`record_memory`; a
            :class:`SegmentedGraph` of such graphs; a :class:`MemPool` or its token, a
            :class:`~cgraph.timeline.Timeline`, or what ``graph.memory()`` or :func:`dry_run`
            returned, for the memory alone; ``cgraph.trees``, or its ``report()``.
        title: The heading. Default: a name of what is shown.
        measure: Replay a CUDAGraph twice, under torch's profiler, and show the time of each node.
            The replays write what replays write.

    Returns:
        The view: ``view.save("graph.html")``, ``view.show()``, or the last line of a notebook's
        cell.

    Raises:
        StateError: The graph has no template, no blocks were recorded, no tree has a graph, or
            times are wanted of the simulator.
        ArgumentError: It is nothing of these, or times are wanted of something else than a graph.
        ForeignError: The pool is torch's own, or gone.
    """
    if measure and not isinstance(what, CUDAGraph):
        raise ArgumentError(f"measure is True, and what is {shown(what):.80}, expected a CUDAGraph")
    if isinstance(what, CUDAGraph):
        nodes = _nodes(what, measures=measure)
        return View(title or what._name, _drawing(nodes, what), what.memory().timeline)
    if isinstance(what, SegmentedGraph):
        nodes = _segments(what)
        drawing = _drawing(nodes, what.segments[0])
        return View(title or "a function with breaks", drawing, _joined(what))
    if isinstance(what, TreesReport) or what is trees:
        report = what if isinstance(what, TreesReport) else trees.report()
        return View(title or "graph trees", _trees(report), None)
    timeline = _timeline(what)
    return View(title or timeline.title, None, timeline)


class View:
    """A page that shows something; :func:`view` makes it.

    Attributes:
        title: Its heading.
    """

    def __init__(self, title: str, drawing: Drawing | None, timeline: Timeline | None) -> None:
        self.title = title
        self._drawing = drawing
        self._timeline = timeline

    @cached_property
    def html(self) -> str:
        """The page, which needs no other files."""
        return page(self.title, self._drawing, self._timeline)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the page.

        Args:
            path: The file, as ``graph.html``.
        """
        Path(path).write_text(self.html, encoding="utf-8")

    def show(self) -> None:
        """Open the page in a browser, from a new temporary file."""
        with tempfile.NamedTemporaryFile(
            "w", suffix=".html", prefix="cgraph-", delete=False, encoding="utf-8"
        ) as file:
            file.write(self.html)
        webbrowser.open(Path(file.name).as_uri())

    def save_perfetto(self, path: str | PathLike[str]) -> None:
        """Write the graph as trace events, for ``ui.perfetto.dev`` or ``chrome://tracing``.

        Tracks are lanes, and slices nodes, in the slices of their modules. Without measured times
        each node takes a microsecond.

        Args:
            path: The file, as ``graph.json``.

        Raises:
            StateError: The view has memory only.
        """
        if self._drawing is None:
            raise StateError(
                "save_perfetto() of a view without a graph: it has the memory of"
                f" {self.title!r} only. Fix: use save_memory_snapshot(), or view a CUDAGraph"
            )
        events = trace_events(self.title, self._drawing.nodes)
        Path(path).write_text(json.dumps(events, separators=(",", ":")), encoding="utf-8")

    def save_memory_snapshot(self, path: str | PathLike[str]) -> None:
        """Write the memory as a snapshot of torch's, for ``pytorch.org/memory_viz``.

        Args:
            path: The file, as ``memory.pickle``.

        Raises:
            StateError: The view has no memory, as no blocks were recorded.
        """
        if self._timeline is None:
            raise StateError(
                f"save_memory_snapshot() of a view without memory: the blocks of {self.title!r}"
                f" were not recorded. {_RECORD}"
            )
        Path(path).write_bytes(pickle.dumps(memory_snapshot(self._timeline), protocol=4))

    def _repr_html_(self) -> str:
        """Return the page in a frame, for notebooks."""
        return frame(self.html, self.title)

    def __repr__(self) -> str:
        """Return what there is to see."""
        parts = []
        if self._drawing is not None:
            parts.append(plural(len(self._drawing.nodes), self._drawing.noun))
        if self._timeline is not None:
            parts.append(plural(len(self._timeline.spans), "block"))
        return f"<cgraph.View of {self.title}: {', '.join(parts)}>"


def _drawing(nodes: list[Node], graph: CUDAGraph) -> Drawing:
    nodes = ordered(nodes)
    in_lanes(nodes)
    is_simulated = graph._driver.device_type == "cpu"
    note = "operators of the simulator, for which a GPU runs kernels" if is_simulated else ""
    return Drawing(nodes, nested(nodes), "Graph", "node", note)


def _nodes(graph: CUDAGraph, *, measures: bool = False) -> list[Node]:
    """Return the nodes of a graph's template, with what is known of the memory that they name."""
    template = graph._require_template("view()")
    timeline = graph.memory().timeline
    data = json.loads(template.json())
    if measures:
        if graph._driver.device_type == "cpu":
            raise StateError("view(measure=True) on the simulator, whose replays have no times")
        add_times(data["nodes"], profiled(graph.replay))
    return nodes_of(data, graph._labels, template.addresses(), timeline)


def _segments(segmented: SegmentedGraph) -> list[Node]:
    """Return the nodes of all segments, with the breaks between them."""
    nodes = list[Node]()
    number = 0
    if not segmented._order:
        raise StateError("view() of a SegmentedGraph after reset(). Fix: capture again")
    if not all(one._has_template for one in segmented.segments):
        raise StateError(
            "view() needs the templates of the segments, which were not kept. Fix:"
            " SegmentedGraph.capture(..., keep_graph=True)"
        )
    for step in segmented._order:
        before = _last_of(nodes)
        if isinstance(step, str):
            nodes.append(break_node(step, before))
            continue
        number += 1
        first = len(nodes)
        for one in _nodes(step):
            one.depends = [first + place for place in one.depends] or before
            one.path = (f"segment {number}", *one.path)
            nodes.append(one)
    return nodes


def _last_of(nodes: list[Node]) -> list[int]:
    """Return the places of nodes that none comes after: the next segment waits for them."""
    passed = {before for node in nodes for before in node.depends}
    return [place for place in range(len(nodes)) if place not in passed]


def _joined(segmented: SegmentedGraph) -> Timeline | None:
    """Return the blocks of all segments in their order; None if any was not recorded."""
    joined: Timeline | None = None
    for one in segmented.segments:
        timeline = one.memory().timeline
        if timeline is None:
            return None
        joined = timeline if joined is None else joined.joined(timeline)
    return joined


def _trees(report: TreesReport) -> Drawing:
    nodes, root = of_trees(report)
    if not nodes:
        raise StateError(
            "view() of graph trees without a graph. Fix: call a function of"
            ' torch.compile(backend="cgraph") or trees.cudagraphify() twice before'
        )
    return Drawing(nodes, root, "Trees", "call")


def _timeline(what: object) -> Timeline:
    """Return the recorded blocks of something."""
    if isinstance(what, Timeline):
        return what
    if isinstance(what, DryRun):
        what = what.memory
    if isinstance(what, GraphMemory):
        name, timeline = what.name, what.timeline
    elif isinstance(what, (MemPool, tuple)):
        pool = MemPool.of(what)
        name, timeline = pool.name, pool._timeline
    else:
        text = f"what is {shown(what):.80}, expected {_KINDS}"
        if callable(what):
            text += ". Fix: capture a call with cgraph.graph, or cgraph draw file.py:function"
        raise ArgumentError(text)
    if timeline is None:
        raise StateError(f"view() of {name}, whose blocks were not recorded. {_RECORD}")
    return timeline
