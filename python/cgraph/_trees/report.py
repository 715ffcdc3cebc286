"""Reports of graph trees: which functions are replayed, and why others are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cgraph._text import plural, printable, table
from cgraph._trees.trees import all_trees, skips

__all__ = ["TreeFunctionReport", "TreesReport", "report"]

_HEAD = ("function", "mode", "graphs", "replays", "eager calls")
_WORDS = {
    "first run": "first run",
    "put off": "put off, as another function ran for the first time in the same step",
    "mutation": "it writes to an input that is neither static nor an output of the same step",
    "repeats": "it was called as often as a path may be long: mark where steps begin",
    "rerecords": "its static inputs are elsewhere in each call",
    "capture elsewhere": "another thread was capturing",
}


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
    """

    name: str
    mode: str
    device: int
    graphs: int
    replays: int
    eager: dict[str, int]


@dataclass(frozen=True)
class TreesReport:
    """All living functions of graph trees, and what is not captured; its text is a table.

    Attributes:
        functions: The functions.
        skips: Compiled graphs, or parts of them, that no graph can have: name and reason.
    """

    functions: tuple[TreeFunctionReport, ...]
    skips: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        """Return the functions as a table, with the reasons below."""
        if not self.functions and not self.skips:
            return 'No function is in a graph tree: use torch.compile(fn, backend="cgraph").'
        graphs = sum(one.graphs for one in self.functions)
        replays = sum(one.replays for one in self.functions)
        head = f"{plural(len(self.functions), 'function')}, {plural(graphs, 'graph')}"
        lines = [f"{head}; {plural(replays, 'replay')}"]
        if self.functions:
            lines.append(table(_HEAD, [_cells(one) for one in self.functions]))
        for one in self.functions:
            lines += [
                f"{printable(one.name)}: {plural(count, 'eager call')}: {_WORDS.get(why, why)}"
                for why, count in one.eager.items()
            ]
        lines += [f"{printable(name)}: not captured: {printable(why)}" for name, why in self.skips]
        return "\n".join(lines)


def report() -> TreesReport:
    """Return what has become of the calls of functions in graph trees of the driver in force."""
    found = []
    for device, tree in all_trees():
        nodes = tree.nodes
        for function in sorted(tree.functions, key=lambda one: one.id):
            own = [node for _, _, of, node in nodes if of == function.id]
            eager = {why: count for (of, why), count in tree.eager.items() if of == function.id}
            replays = sum(node.replays for node in own)
            one = TreeFunctionReport(function.name, function.mode, device, len(own), replays, eager)
            found.append(one)
    return TreesReport(tuple(found), tuple(skips))


def _cells(one: TreeFunctionReport) -> Sequence[str]:
    eager = sum(one.eager.values())
    return printable(one.name), one.mode, f"{one.graphs:,}", f"{one.replays:,}", f"{eager:,}"
