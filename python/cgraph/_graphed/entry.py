"""Native entries: the calls that replay a captured graph, and the results they return."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from cgraph import _core, _torch
from cgraph._graphed.call import Call
from cgraph._graphed.recorded import Recorded
from cgraph._graphed.results import Result
from cgraph._graphed.static_memory import PoolUse
from cgraph._graphed.train import Trained
from cgraph._graphed.writeback import Fed
from cgraph._python.guards import Guards
from cgraph._torch import tree_unflatten

__all__ = ["entry_of", "entry_of_graph", "returned"]


def entry_of(
    recorded: Recorded | Trained,
    call: Call,
    signatures: Sequence[_core.Signature],
    guards: Guards,
    lock: _core.FunctionLock,
    use: PoolUse,
    **more: Any,
) -> _core.Entry:
    """Build the entry of calls like this one; by default it passes them on to captured passes.

    Args:
        recorded: The capture.
        call: A call.
        signatures: The signatures of the tensors to copy.
        guards: The guards of the key.
        lock: The lock that lets one thread at a time replay.
        use: The use of the pool that the function's calls share.
        more: Other arguments of the entry.
    """
    if isinstance(recorded, Trained):
        of_passes = {"outputs": None, "is_open": recorded.is_open}
        more = {"work": recorded.debugged or recorded.replay, **of_passes, **more}
    return _core.Entry(
        *call.patterns(signatures),
        is_in_order=call.is_in_order,
        modes=call.mode[:3],
        settings=call.mode.settings,
        guards=guards.native,
        last_stream=use.last_stream,
        lock=lock,
        written=recorded.writes,
        **more,
    )


def entry_of_graph(
    recorded: Recorded,
    call: Call,
    guards: Guards,
    lock: _core.FunctionLock,
    use: PoolUse,
    *,
    is_fresh: bool,
    warn: Callable[[], None],
) -> _core.Entry:
    """Build the entry of a graph; ``warn`` warns that a static result is still held."""
    work: Any = recorded.graph
    if recorded.debugged is not None:
        work = recorded.debugged
    elif recorded.leaves_more:
        work = Fed(recorded)
    signatures = [_torch.signature(static) for static in recorded.statics]
    count = len(signatures) - len(call.placed)
    return entry_of(
        *(recorded, call, signatures[:count], guards, lock, use),
        placed=signatures[count:],
        assigns=recorded.assign if recorded.assign.targets else None,
        work=work,
        outputs=returned(recorded, recorded.result, is_fresh=is_fresh, warn=warn),
        lent=use.lent,
    )


def returned(
    recorded: Recorded, result: Result, *, is_fresh: bool, warn: Callable[[], None]
) -> tuple[list[tuple[Any, ...]], Any, Callable[[], None]]:
    """Describe what a native entry returns: leaves, how to build the result, and ``warn``."""
    fresh = [] if recorded.debugged else result.fresh("fresh" if is_fresh else "static")
    copies = recorded.copies
    maker = copies.cut(fresh) if fresh and copies is not None else None
    numbers = {id(one): number for number, one in enumerate(fresh)}
    leaves: list[tuple[Any, ...]] = [
        ("fresh", numbers[id(leaf)], maker)
        if maker is not None and id(leaf) in numbers
        else _leaf(result, number, is_fresh or number >= len(result.leaves) - result.lasting)
        for number, leaf in enumerate(result.leaves)
    ]
    build: Any = functools.partial(tree_unflatten, treespec=recorded.spec)
    if recorded.spec.is_leaf():
        build = "single"
    elif recorded.is_flat_tuple:
        build = "tuple"
    return leaves, build, warn


def _leaf(result: Result, number: int, is_fresh: bool) -> tuple[Any, ...]:
    leaf, kind = result.leaves[number], result.kinds[number]
    if kind in ("argument", "constant"):
        return kind, leaf
    if kind == "input" and (view := result.view(number)) is not None:
        return "view", view.place, view
    if kind == "input" or is_fresh or leaf.numel() == 0 or leaf.is_conj() or leaf.is_neg():
        return "copied", leaf
    return "static", leaf.detach(), _torch.signature(leaf)
