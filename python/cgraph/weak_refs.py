"""``weak_ref``: tensors that do not keep their memory, for programs that replay many graphs.

>>> import torch, cgraph
>>> with cgraph.sim.use():
...     pool, kept = cgraph.MemPool(), {}
...     for rows in (8, 4):  # the largest first
...         x, graph = torch.ones(rows, 1000), cgraph.CUDAGraph()
...         with cgraph.graph(graph, pool=pool):
...             y = x * 2
...         kept[rows] = graph, x, cgraph.weak_ref(y)  # the next capture takes the memory of y
...         del y
...     graph, x, y = kept[8]
...     graph.replay()
...     print(y.sum().item(), "in", pool.stats()["peak"], "bytes")
16000.0 in 32256 bytes
"""

from __future__ import annotations

from typing import Any

import torch

from cgraph import _driver, _torch
from cgraph._torch import tree_flatten, tree_unflatten
from cgraph.errors import ArgumentError

__all__ = ["weak_ref"]


def weak_ref(tree: Any) -> Any:
    """Return a tree with tensors over the same memory that neither own it nor keep it alive.

    For the outputs of a captured graph: captures to come into its pool may use their memory, so
    that graphs of many sizes take what the largest one takes. The caller keeps the graph, or its
    pool, as long as the tensors are used, and reads them before another graph of the pool is
    replayed.

    Args:
        tree: A tensor, or containers of anything as torch's pytree knows them. Tensors of the host
            and those without elements or contents stay as they are, and so does what is no tensor.
            On the simulator all tensors are of the host except those in its pools.

    Returns:
        A tree of the same form. Its tensors have no history; those that shared memory share it.
        ``resize_`` of one raises, and ``record_stream`` does nothing.

    Raises:
        ArgumentError: A tensor of the device has no memory of its own: it is sparse, nested,
            quantized, or of a class that wraps others.
    """
    driver = _driver.current()
    leaves, spec = tree_flatten(tree)
    places = []
    for place, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor) or leaf.numel() == 0 or _torch.is_imagined(leaf):
            continue
        if driver.is_of_device(leaf):
            if not _torch.can_be_unowned(leaf):
                raise ArgumentError(
                    f"weak_ref() of a {type(leaf).__name__} of layout {leaf.layout}, expected plain"
                    " strided tensors: give the tensors that it is made of"
                )
            places.append(place)
    for place, made in zip(places, _torch.unowned([leaves[p] for p in places]), strict=True):
        leaves[place] = made
    return tree_unflatten(leaves, spec)
