"""The ledger: device and host memory of graphs, and its causes.

>>> import torch, cgraph
>>> with cgraph.sim.use():
...     x, graph = torch.ones(1000), cgraph.CUDAGraph()
...     with cgraph.record_memory(), cgraph.graph(graph):
...         y = (x + 1) * 2
...     used = graph.memory()
...     print(used.reserved >> 20, "MiB in segments,", used.held, "bytes held by the output")
2 MiB in segments, 4096 bytes held by the output
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from os import PathLike
from typing import TYPE_CHECKING, Any, TextIO

from cgraph import _driver
from cgraph._driver import Handle
from cgraph._text import in_units, print_fitted, short_place, table
from cgraph.errors import StateError
from cgraph.mempool import MemPool
from cgraph.timeline import Timeline

if TYPE_CHECKING:
    from cgraph.cudagraph import CUDAGraph

__all__ = ["GraphMemory", "Memory", "PoolMemory", "all_graphs", "living", "memory", "of_graph"]

all_graphs: weakref.WeakValueDictionary[int, CUDAGraph] = weakref.WeakValueDictionary()
"""The graphs that captured something, by ``id``. Their destroy callbacks run at exit."""

# Of the host, for each node: measured with CUDA's driver 580 on graphs of some hundred kernels.
_TEMPLATE_NODE = 2 << 10
_EXEC_NODE = 5 << 10


@dataclass(frozen=True)
class PoolMemory:
    """Bytes of one pool.

    Attributes:
        name: The pool's number and device.
        handle: Its token.
        mapped: Of the device: memory that the pool keeps from others. Zero while it is paused.
        reserved: In segments, with memory or without.
        in_use: In blocks that tensors use.
        kept: Of the host: where a pause keeps contents or the last one did.
        limit: The most that it may reserve; None without a limit, and for torch's own pools.
        is_paused: True if its memory is given back.
        graphs: The graphs that know its addresses.
    """

    name: str
    handle: Handle
    mapped: int
    reserved: int
    in_use: int
    kept: int
    limit: int | None
    is_paused: bool
    graphs: tuple[str, ...]


@dataclass(frozen=True)
class GraphMemory:
    """Bytes of one graph, and the seconds of its capture.

    What was not measured is None: see :func:`cgraph.record_memory`.

    Attributes:
        name: A number in the order of captures.
        where: The line of the capture.
        pools: Tokens of the pools that it keeps; the capture's pool comes first.
        reserved: Growth of the pool by the capture.
        peak: The most bytes that were in the pool's blocks at once during the capture, including
            earlier blocks; None unless :func:`cgraph.record_memory` was on.
        held: In blocks that the capture allocated and that were in use at its end: outputs. On CUDA
            allocations of other threads meanwhile count too, unless it was recorded.
        workspace: Library workspaces. They lie in the pool, and later captures into it reuse the
            same bytes.
        exec: Of the device: decrease of its free memory when the exec was made. CUDA takes steps of
            2 MiB, so that one graph pays for those after it.
        host: Approximate host bytes of template and exec, from the number of nodes.
        nodes: Number of nodes that the capture recorded.
        seconds: Duration of the capture, without instantiation.
        shares_with: The other graphs that know its pools.
        timeline: The blocks of the capture, if they were recorded.
    """

    name: str
    where: str
    pools: tuple[Handle, ...]
    reserved: int | None
    peak: int | None
    held: int | None
    workspace: int | None
    exec: int | None
    host: int
    nodes: int
    seconds: float
    shares_with: tuple[str, ...]
    timeline: Timeline | None = field(repr=False, compare=False)

    @property
    def device(self) -> int:
        """Bytes of the device that capture and exec took, as far as measured."""
        return (self.reserved or 0) + (self.exec or 0)

    def as_dict(self) -> dict[str, Any]:
        """Return all numbers by name."""
        return _as_dict(self)

    def show(self, file: TextIO | None = None) -> None:
        """Print the numbers as a table, to standard output unless a file is given."""
        print_fitted(_graphs_table([self]), file)

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw the blocks of the capture in their order; see :meth:`Memory.plot`."""
        _recorded(self.timeline, self.name).draw(path)


@dataclass(frozen=True)
class Memory:
    """Bytes of all graphs and pools of the driver in force.

    Attributes:
        pools: The living pools of cgraph, and those of torch that graphs keep.
        graphs: The graphs that hold something captured.
    """

    pools: tuple[PoolMemory, ...]
    graphs: tuple[GraphMemory, ...]
    _timelines: dict[Handle, Timeline | None] = field(repr=False, compare=False)

    @property
    def device(self) -> int:
        """Bytes of the device: mapped by the pools and taken by execs, as far as measured."""
        return sum(one.mapped for one in self.pools) + sum(one.exec or 0 for one in self.graphs)

    @property
    def host(self) -> int:
        """Bytes of the host: approximately those of templates and execs, and kept contents."""
        return sum(one.kept for one in self.pools) + sum(one.host for one in self.graphs)

    def as_dict(self) -> dict[str, Any]:
        """Return all numbers by name."""
        pools, graphs = map(_as_dict, self.pools), map(_as_dict, self.graphs)
        totals = {"device": self.device, "host": self.host}
        return {**totals, "pools": list(pools), "graphs": list(graphs)}

    def __str__(self) -> str:
        """Return tables of the pools and the graphs, and their sums."""
        total = f"device {in_units(self.device)}, host {in_units(self.host)}"
        tables = [_pools_table(self.pools), _graphs_table(self.graphs)]
        return "\n\n".join([total, *filter(None, tables)])

    def show(self, file: TextIO | None = None) -> None:
        """Print the tables, to standard output unless a file is given."""
        print_fitted(self, file)

    def plot(
        self, path: str | PathLike[str], pool: MemPool | CUDAGraph | Handle | None = None
    ) -> None:
        """Draw the blocks of a pool in the order of the captures into it.

        Args:
            path: The file: ``.svg``, or with matplotlib ``.png`` or ``.pdf``.
            pool: The pool; by default the largest recorded one.

        Raises:
            StateError: The pool was not recorded: capture inside ``with cgraph.record_memory()``.
        """
        if pool is not None:
            mem_pool = MemPool.of(pool)
            _recorded(mem_pool._timeline, mem_pool.name).draw(path)
            return
        found = [timeline for timeline in self._timelines.values() if timeline is not None]
        largest = max(found, key=lambda timeline: timeline.reserved, default=None)
        _recorded(largest, "any pool").draw(path)


def memory() -> Memory:
    """Measure all graphs and pools of the driver in force."""
    driver = _driver.current()
    driver.settle()
    own = list(driver.mem_pools())  # alive until all is counted
    graphs = living(driver)
    users: dict[Handle, list[str]] = {(one.id[0], one.id[1]): [] for one in own}
    for graph in graphs:
        for handle in _pools_of(graph):
            users.setdefault(handle, []).append(graph._name)
    pools = [_of_pool(driver, handle, tuple(names)) for handle, names in users.items()]
    timelines = {handle: _timeline(driver, handle) for handle in users}
    return Memory(tuple(pools), tuple(_of_living(graphs)), timelines)


def living(driver: _driver.Driver) -> list[CUDAGraph]:
    """List the graphs of a driver that hold something captured, in the order of their captures."""
    # A list of the references is made at once, whatever other threads do.
    known = [one() for one in all_graphs.valuerefs()]
    graphs = [graph for graph in known if graph is not None and graph._captured is not None]
    return sorted(
        (graph for graph in graphs if graph._driver is driver), key=lambda graph: graph._number
    )


def of_graph(graph: CUDAGraph, others: Sequence[CUDAGraph] | None = None) -> GraphMemory:
    """Measure one graph, which holds something captured.

    Args:
        graph: The graph.
        others: The living graphs of its driver, where the caller has them.
    """
    captured = graph._captured
    if captured is None or captured.footprint is None:
        raise StateError("memory() before a successful capture: capture something first")
    handles = tuple((handle[0], handle[1]) for handle in captured.pools)
    mine = set(handles)
    sharing = {
        other._name
        for other in (living(graph._driver) if others is None else others)
        if other is not graph and mine.intersection(_pools_of(other))
    }
    per_node = _TEMPLATE_NODE * graph._has_template + _EXEC_NODE * graph._has_exec
    footprint = captured.footprint
    return GraphMemory(
        name=graph._name,
        where=footprint.where,
        pools=handles,
        reserved=footprint.reserved,
        peak=footprint.peak,
        held=footprint.held,
        workspace=footprint.workspace,
        exec=graph._exec_bytes if graph._has_exec else 0,
        host=graph._nodes * per_node,
        nodes=graph._nodes,
        seconds=footprint.seconds,
        shares_with=tuple(sorted(sharing)),
        timeline=footprint.timeline,
    )


def _of_living(graphs: list[CUDAGraph]) -> Iterator[GraphMemory]:
    for graph in graphs:
        # Another thread may reset it meanwhile.
        with suppress(StateError):
            yield of_graph(graph, graphs)


def _pools_of(graph: CUDAGraph) -> list[tuple[int, int]]:
    """Return the tokens of a graph's pools; none if another thread has reset it meanwhile."""
    captured = graph._captured
    return [] if captured is None else [(handle[0], handle[1]) for handle in captured.pools]


def _of_pool(driver: _driver.Driver, handle: Handle, graphs: tuple[str, ...]) -> PoolMemory:
    state, mem_pool = driver.pool_state(handle), driver.mem_pool(handle)
    if mem_pool is None:
        size = state.reserved
        name = f"torch's pool {handle[0] or handle[1]}"
        return PoolMemory(name, handle, size, size, state.in_use, 0, None, False, graphs)
    stats = mem_pool.stats()
    return PoolMemory(
        name=mem_pool.name,
        handle=handle,
        mapped=stats["mapped"],
        reserved=stats["reserved"],
        in_use=state.in_use,
        kept=stats["kept"],
        limit=mem_pool.limit,
        is_paused=mem_pool.is_paused,
        graphs=graphs,
    )


def _timeline(driver: _driver.Driver, handle: Handle) -> Timeline | None:
    mem_pool = driver.mem_pool(handle)
    return None if mem_pool is None else mem_pool._timeline


def _recorded(timeline: Timeline | None, what: str) -> Timeline:
    if timeline is None:
        raise StateError(
            f"plot() of {what}, which was not recorded: capture inside"
            " `with cgraph.record_memory():`"
        )
    return timeline


def _as_dict(one: PoolMemory | GraphMemory) -> dict[str, Any]:
    names = [each.name for each in fields(one) if each.name != "timeline"]
    everything = asdict(one)
    return {name: everything[name] for name in names}


def _pools_table(pools: Iterable[PoolMemory]) -> str:
    rows = [
        [
            one.name + (" (paused)" if one.is_paused else ""),
            in_units(one.mapped),
            in_units(one.in_use),
            in_units(one.kept),
            in_units(one.limit),
            str(len(one.graphs)),
        ]
        for one in pools
    ]
    head = ["pool", "mapped", "in use", "kept on host", "limit", "graphs"]
    return table(head, rows) if rows else ""


def _graphs_table(graphs: Iterable[GraphMemory]) -> str:
    rows = [
        [
            one.name,
            *map(in_units, (one.reserved, one.peak, one.held, one.workspace, one.exec)),
            in_units(one.host),
            str(one.nodes),
            f"{one.seconds * 1e3:.1f}",
            str(len(one.shares_with)),
            short_place(one.where),
        ]
        for one in graphs
    ]
    head = ["graph", "reserved", "peak", "held", "workspace", "exec", "host, about", "nodes"]
    head += ["capture ms", "shares with", "captured at"]
    return table(head, rows) if rows else ""
