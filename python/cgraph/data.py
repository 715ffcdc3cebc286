"""The contents of a captured graph as plain values: ``torch.cuda``'s structure, and more.

>>> import torch, cgraph
>>> with cgraph.sim.use():
...     x, graph = torch.ones(4), cgraph.CUDAGraph(keep_graph=True)
...     with cgraph.graph(graph):
...         y = (x * 2).exp()
...     graph.instantiate()
...     for node in cgraph.graph_data(graph)["nodes"]:
...         print(node["index"], node["node_type"], node["kernel_name"], node["dependencies"])
0 kernel aten.mul.Tensor []
1 kernel aten.exp.default [0]
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cgraph import _core, _torch
from cgraph._given import require_type
from cgraph.errors import StateError
from cgraph.labels import as_dict

if TYPE_CHECKING:
    from cgraph.cudagraph import CUDAGraph

__all__ = ["export_dot", "export_graph_data", "graph_data"]

# Kinds whose names in torch differ from ours.
_TORCH_NAMES = {"child": "child_graph", "event_wait": "wait_event"}


def graph_data(graph: CUDAGraph) -> dict[str, Any]:
    """Return all data of a graph with a live template and an exec.

    Works on every driver without further packages: numbers that a driver cannot report (before CUDA
    13.1) are None.

    Returns:
        A new dictionary, of ``exec_graph_id``, ``nodes`` and ``edges``.

        A node has ``index``, ``node_type``, ``tools_id``, ``graph_id`` and ``node_id`` (the exec's,
        as profilers report them), ``kernel_name``, ``grid_dim``, ``block_dim`` and
        ``shared_mem_bytes`` (of a kernel), ``event_ptr`` (0 if it has no event), ``host_fn_addr``
        and ``host_fn_name`` (0 and None if it calls no function, or one without an exported name),
        ``dependencies`` and ``dependents`` (indices). Beyond torch it has ``handle`` (a
        ``cudaGraphNode_t``), ``bytes``, ``dst``, ``src``, ``address`` and ``condition``, each None
        where it means nothing, and ``bodies``: the graphs of a child-graph or conditional node,
        each with ``nodes`` and ``edges``. A node that is in no body also has ``label``: None, or
        what :func:`cgraph.labels.as_dict` gives. Execs number the nodes in bodies anew, so their
        numbers here are those in the template. Bodies of conditional nodes are known from CUDA 13.2
        on.

        An edge has ``from`` and ``to`` (indices), ``from_port``, ``to_port`` and ``type`` (CUDA's
        number: 0 for a full dependency, 1 for a programmatic one).

    Raises:
        ArgumentError: It is no graph of cgraph's.
        StateError: The template is not live, or the graph is not instantiated.
    """
    require_type("graph", graph, _core.Graph, "a cgraph.CUDAGraph")
    template = graph._require_template("get_graph_data()")
    if graph._exec_handle is None:
        raise StateError(
            "get_graph_data() needs the exec, which the graph does not have yet: call instantiate()"
            " first"
        )
    exec_id = graph._exec_id
    data = _described(json.loads(template.json()))
    for node in data["nodes"]:
        label = graph._labels.get(node["handle"])
        node["label"] = None if label is None else as_dict(label)
        node["graph_id"] = exec_id
        node["tools_id"] = None if exec_id is None else exec_id << 32 | node["node_id"]
    return {"exec_graph_id": exec_id, **data}


def export_dot(
    path: str | os.PathLike[str], *, verbose: bool = True
) -> Callable[[CUDAGraph], None]:
    """Return a capture-end hook that writes the graph for Graphviz, kept template or not.

    Args:
        path: The file to write at each capture.
        verbose: Include launch dimensions and bytes.
    """

    def export(graph: CUDAGraph) -> None:
        graph.debug_dump(os.fspath(path), verbose=verbose)

    return export


def export_graph_data(path: str | os.PathLike[str]) -> Callable[[CUDAGraph], None]:
    """Return a post-instantiate hook that pickles :func:`graph_data`, kept template or not.

    Args:
        path: The file to write at each instantiation.
    """

    def export(graph: CUDAGraph) -> None:
        data = graph_data(graph)
        with open(path, "wb") as file:
            pickle.dump(data, file)

    return export


def _described(data: dict[str, Any]) -> dict[str, Any]:
    """Return a template's nodes and edges in torch's terms."""
    nodes = [_node(node) for node in data["nodes"]]
    edges = []
    for edge in data["edges"]:
        nodes[edge["from"]]["dependents"].append(edge["to"])
        nodes[edge["to"]]["dependencies"].append(edge["from"])
        edges.append({key: edge[key] for key in ("from", "to", "from_port", "to_port", "type")})
    return {"nodes": nodes, "edges": edges}


def _node(node: dict[str, Any]) -> dict[str, Any]:
    kind = node["kind"]
    function = node.get("host_function", 0)
    return {
        "index": node["index"],
        "node_type": _TORCH_NAMES.get(kind, kind),
        "tools_id": node.get("tools_id"),
        "graph_id": node.get("graph_id"),
        "node_id": node.get("node_id"),
        "kernel_name": node.get("name"),
        "grid_dim": _dim(node.get("grid")),
        "block_dim": _dim(node.get("block")),
        "shared_mem_bytes": node.get("shared_bytes"),
        "event_ptr": node.get("event", 0),
        "host_fn_addr": function,
        "host_fn_name": _symbol_at(function) if function else None,
        "dependencies": [],
        "dependents": [],
        "handle": node["handle"],
        "bytes": node.get("bytes"),
        "dst": node.get("dst"),
        "src": node.get("src"),
        "address": node.get("address"),
        "condition": node.get("condition"),
        "bodies": [_described(body) for body in node.get("bodies", ())],
    }


def _dim(dim: dict[str, int] | None) -> tuple[int, int, int] | None:
    return None if dim is None else (dim["x"], dim["y"], dim["z"])


class _Symbol(ctypes.Structure):
    """C's ``Dl_info``."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _symbol_at(address: int) -> str | None:
    """Return the exported name of the function at an address, where the system can tell."""
    find = _dladdr()
    found = _Symbol()
    if find is None or not find(ctypes.c_void_p(address), ctypes.byref(found)) or not found.name:
        return None
    return _torch.demangled(found.name.decode(errors="replace"))


@functools.cache
def _dladdr() -> Any:
    """Return C's function of that name; None on a system without it."""
    try:
        return ctypes.CDLL(None).dladdr
    except (AttributeError, OSError, TypeError):  # Windows has no such name, or no such call
        return None
