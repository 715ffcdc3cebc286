"""Reports of graph trees: which functions are replayed, and why others are not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from cgraph import _torch
from cgraph._text import in_units, plural, printable, table
from cgraph._trees.function import Function
from cgraph._trees.graph_tree import GraphTree
from cgraph._trees.node import Node
from cgraph._trees.skips import EAGER, skips
from cgraph._trees.trees import all_trees

__all__ = ["TreeFunctionReport", "TreeNodeReport", "TreeReport", "TreesReport", "report"]

_Nodes: TypeAlias = Sequence[tuple[int, int | None, int, Node]]
_HEAD = ("function", "mode", "graphs", "replays", "eager calls")


@dataclass(frozen=True)
class TreeFunctionReport:
    """A function of a graph tree.

    Attributes:
        name: Its name.
        mode: ``"inference"``, ``"forward"`` or ``"backward"``.
        device: The number of the device.
        graphs: The number of its graphs: one for each way in which a step has come to it.
        replays: The number of their replays.
        eager: How often it ran without a graph, by reason.
        rerecords: How often it was captured anew as static inputs had moved.
        moved: Which of these had, the last time, with their addresses.
        copied_bytes: The bytes of inputs that a replay of its last graph copies.
        moving: Which static inputs are copied, as they were elsewhere in too many captures.
    """

    name: str
    mode: str
    device: int
    graphs: int
    replays: int
    eager: dict[str, int]
    rerecords: int = 0
    moved: str | None = None
    copied_bytes: int = 0
    moving: str | None = None


@dataclass(frozen=True)
class TreeNodeReport:
    """A recorded call of a tree.

    Attributes:
        function: The name of its function.
        mode: ``"inference"``, ``"forward"`` or ``"backward"``.
        parent: The place of the call before it in the tree's list; None where steps begin.
        replays: How often it was replayed.
        nodes: The number of nodes of its graph.
        held_bytes: The bytes of the pool's blocks that its recording left in use: its outputs.
        copied_bytes: The bytes of inputs that a replay copies.
        kept_bytes: The bytes of its outputs that were copied, as they were held when a step ended.
    """

    function: str
    mode: str
    parent: int | None
    replays: int
    nodes: int
    held_bytes: int
    copied_bytes: int
    kept_bytes: int


@dataclass(frozen=True)
class TreeReport:
    """A tree: the graphs of one device and thread.

    Attributes:
        device: The number of the device.
        roots: The number of graphs with which steps begin.
        graphs: The number of its graphs, each of which has a checkpoint of the allocator.
        longest: The most graphs of one step.
        held_outputs: The number of outputs of the step that somebody holds.
        has_pending_backward: A forward pass waits for its backward pass.
        reserved_bytes: The bytes of its pool.
        kept_bytes: The bytes of outputs that were copied, as they were held when their step ended.
        nodes: Its recorded calls, each behind its parent.
    """

    device: int
    roots: int
    graphs: int
    longest: int
    held_outputs: int
    has_pending_backward: bool
    reserved_bytes: int
    kept_bytes: int = 0
    nodes: tuple[TreeNodeReport, ...] = ()

    def __str__(self) -> str:
        """Return one line."""
        parts = [
            plural(self.roots, "root"),
            f"up to {plural(self.longest, 'graph')} in a step",
            f"{plural(self.held_outputs, 'output')} in use",
            in_units(self.reserved_bytes),
        ]
        if self.has_pending_backward:
            parts.append("a backward pass is awaited")
        if self.kept_bytes:
            parts.append(f"{in_units(self.kept_bytes)} of held outputs copied")
        return f"tree of device {self.device}: {', '.join(parts)}"


@dataclass(frozen=True)
class TreesReport:
    """All living functions of graph trees, and what is not captured; its text is a table.

    Attributes:
        functions: The functions.
        trees: The trees that have graphs.
        skips: Compiled graphs, or parts of them, that no graph can have: name and reason.
    """

    functions: tuple[TreeFunctionReport, ...]
    skips: tuple[tuple[str, str], ...]
    trees: tuple[TreeReport, ...] = ()

    def __str__(self) -> str:
        """Return the functions as a table, with the reasons below."""
        if not self.functions and not self.skips:
            return _nothing(_torch.count_of_frames())
        graphs = sum(one.graphs for one in self.functions)
        replays = sum(one.replays for one in self.functions)
        head = f"{plural(len(self.functions), 'function')}, {plural(graphs, 'graph')}"
        lines = [f"{head}; {plural(replays, 'replay')}", *map(str, self.trees)]
        if self.functions:
            lines.append(table(_HEAD, [_cells(one) for one in self.functions]))
        for one in self.functions:
            lines += [
                f"{printable(one.name)}: {plural(count, 'eager call')}: {EAGER[why].text}"
                for why, count in one.eager.items()
            ]
            if one.moved:
                times = "once" if one.rerecords == 1 else f"{one.rerecords:,} times"
                lines.append(f"{printable(one.name)}: captured anew {times}: {one.moved}")
            if one.moving:
                copies = f"{in_units(one.copied_bytes)} are copied in each call"
                lines.append(f"{printable(one.name)}: {copies}, as these moved: {one.moving}")
        lines += [f"{printable(name)}: not captured: {printable(why)}" for name, why in self.skips]
        return "\n".join(lines)


def report() -> TreesReport:
    """Return what has become of the calls of functions in graph trees of the driver in force."""
    found, described = [], []
    for device, tree in all_trees():
        nodes = tree.nodes
        # Lists are made at once, whatever other threads do.
        refs, counts = tree.functions.valuerefs(), list(tree.eager.items())
        functions = [one for one in (ref() for ref in refs) if one is not None]
        for function in sorted(functions, key=lambda one: one.id):
            own = [node for _, _, of, node in nodes if of == function.id]
            eager = {why: count for (of, why), count in counts if of == function.id}
            replays = sum(node.replays for node in own)
            moved = tree.rerecords.get(function.id, (0, None))
            place = function.description.name, function.description.mode, device
            copied = own[-1].copied_bytes if own else 0
            moving = tree.moving.get(function.id)
            numbers = len(own), replays, eager, *moved, copied, moving
            found.append(TreeFunctionReport(*place, *numbers))
        if nodes:
            described.append(_described(device, tree, nodes, functions))
    return TreesReport(tuple(found), tuple(skips), tuple(described))


def _nothing(frames: int) -> str:
    """Return the text of a report without functions, after so many that torch has looked at."""
    if not frames:
        return 'No function is in a graph tree: use torch.compile(fn, backend="cgraph").'
    return (
        "No function is in a graph tree: torch.compile looked at"
        f" {plural(frames, 'function')} and gave no backend a graph of them. Code of libraries is"
        " left as it is where calls go through it first, as nn.Sequential inside of"
        " DistributedDataParallel or fully_shard. Fix: compile modules of your own, or the model"
        " before it is wrapped"
    )


def _described(
    device: int, tree: GraphTree, nodes: _Nodes, functions: Sequence[Function]
) -> TreeReport:
    # A node comes behind its parent.
    depths: dict[int | None, int] = {None: 0}
    roots = 0
    for number, parent, _, _ in nodes:
        depths[number] = depths[parent] + 1
        roots += parent is None
    return TreeReport(
        device,
        roots,
        len(nodes),
        max(depths.values()),
        tree.held_outputs,
        tree.has_pending_backward,
        tree.reserved_bytes,
        sum(node.kept_bytes for *_, node in nodes),
        tuple(_calls(nodes, functions)),
    )


def _calls(nodes: _Nodes, functions: Sequence[Function]) -> Iterator[TreeNodeReport]:
    """List the recorded calls of a tree."""
    said = {one.id: one.description for one in functions}
    places = {number: place for place, (number, *_) in enumerate(nodes)}
    for _, parent, of, node in nodes:
        known = said.get(of)
        yield TreeNodeReport(
            "a function that is gone" if known is None else known.name,
            "inference" if known is None else known.mode,
            None if parent is None else places[parent],
            node.replays,
            *_sizes(node),
            node.copied_bytes,
            node.kept_bytes,
        )


def _sizes(node: Node) -> tuple[int, int]:
    """Return the number of nodes of a recorded call's graph, and the bytes that it left in use."""
    captured = node.graph._captured
    if captured is None or captured.footprint is None:
        return 0, 0
    return node.graph._nodes, captured.footprint.held or 0


def _cells(one: TreeFunctionReport) -> Sequence[str]:
    eager = sum(one.eager.values())
    return printable(one.name), one.mode, f"{one.graphs:,}", f"{one.replays:,}", f"{eager:,}"
