"""The recording of one call of a function as a node."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch

from cgraph import _core, _torch
from cgraph._captures.capture_options import CaptureOptions
from cgraph._captures.fresh_results import can_be_fresh
from cgraph._captures.pool_blocks import PoolBlocks
from cgraph._driver import Driver, Handle
from cgraph._trees.node import Node, Outputs
from cgraph.cudagraph import CUDAGraph
from cgraph.errors import CaptureError
from cgraph.graphs import graph

__all__ = ["record"]


def record(
    driver: Driver,
    blocks: PoolBlocks,
    stream: Any,
    model: Callable[[list[Any]], Sequence[Any]],
    inputs: list[Any],
    new: _core.NewNode,
    *,
    keeps_held: bool,
    described: Callable[[int], str],
) -> tuple[Node | None, list[Any]]:
    """Record a call and add its node; return the node, and what the call returns.

    The memory of what is returned has no contents before the node's graph is replayed. Where a
    tensor in the pool that is no result outlives the call, there is no node, as replays would
    overwrite it, and the call has run. Static inputs have the memory that they had, whatever fails.

    Args:
        driver: The driver in force.
        blocks: The blocks of the pool before; outputs of the path own theirs.
        stream: The stream of all recordings into the pool.
        model: The function. It takes a list, which it empties.
        inputs: The inputs, likewise.
        new: The node to be.
        keeps_held: Outputs that are held when the path ends get memory of their own.
        described: Describes the input at a place.

    Raises:
        CaptureError: A result is on another device, or a static input was given other memory.
    """
    pool, in_place = blocks.token, {*new.managed, *new.statics}
    copied = [
        place
        for place, one in enumerate(inputs)
        if isinstance(one, torch.Tensor)
        and one.numel() > 0
        and not one.is_meta
        and place not in in_place
    ]
    holders = {address: (node, piece) for node, piece, address in new.live}
    managed = [(place, inputs[place]) for place in new.managed]
    stand_ins = [(place, _another(one, *holders[_torch.start_of(one)])) for place, one in managed]
    del managed
    taken = _Taken(inputs, new.statics, {*new.managed, *copied})
    slots, spans = [], []
    # Replays outside of the mode of this call write to them.
    with torch.inference_mode(False), torch.no_grad(), driver.stream(stream):
        for number, place in enumerate(copied):
            slot, span = _slot(driver, pool, inputs[place])
            if span is not None:
                spans.append((number, span.numel()))
            slots.append(_torch.unowned([slot if span is None else span])[0])
            taken.note(place, slot)
            inputs[place] = slot
            del slot, span
    made = CUDAGraph()
    made._options = CaptureOptions(statics=tuple(slots), is_weighed=True)
    try:
        with torch.no_grad(), graph(made, pool, stream, capture_error_mode="thread_local"):
            returned = model(inputs)
            _torch.wait_for_collectives(returned)
            results = list(returned) if isinstance(returned, (list, tuple)) else [returned]
            del returned
            outputs = _outputs(driver, pool, results, new, taken)
            if made._capture is not None:
                made._capture.may_be_empty = True
                if new.is_fresh and all(map(can_be_fresh, outputs.new)):
                    made._capture.results = tuple(outputs.new)
    finally:
        moved = taken.put_back()
    inputs.clear()
    if moved:
        del results, outputs
        made.reset()
        raise CaptureError(
            f"a function gives other memory to {described(moved[0])}, which its replays would not"
            " do. Fix: write in place, as parameter.data.copy_(new)"
        )
    known_blocks = {one.address for one in outputs.storages}
    if blocks.are_left(known_blocks):
        # What it keeps has its contents then, and its block for good.
        made.replay()
        return None, results
    node = Node(
        made,
        copied,
        spans,
        stand_ins,
        outputs,
        keeps_held,
        None if made._captured is None else made._captured.results,
        may_be_fresh=not new.is_fresh,
    )
    node.checkpoint = driver.checkpoint(pool)
    new.close(node, [one.address for one in outputs.storages])
    return node, results


class _Taken:
    """The inputs of a recording, as results of it may be one of them.

    Args:
        inputs: The inputs.
        statics: The places of those that stay where they are.
        others: The places of those that the function may let go of.

    Attributes:
        statics: Those that stay, by place.
    """

    def __init__(
        self, inputs: Sequence[Any], statics: Iterable[int], others: Collection[int]
    ) -> None:
        self.statics: dict[int, torch.Tensor] = {place: inputs[place] for place in statics}
        self._before = [
            (place, one, one.detach(), _torch.place_of(one)) for place, one in self.statics.items()
        ]
        self._others = {place: weakref.ref(inputs[place]) for place in others}
        self._with_gradients = {place for place in others if inputs[place].requires_grad}

    def note(self, place: int, tensor: torch.Tensor) -> None:
        """Note that the function is given another tensor in place of an input."""
        self._others[place] = weakref.ref(tensor)

    def put_back(self) -> list[int]:
        """Give inputs that stay the memory that they had; return the places of those moved."""
        moved = [found for found in self._before if _torch.place_of(found[1]) != found[3]]
        for _, one, same, _ in moved:
            one.data = same
        return [place for place, *_ in moved]

    def with_gradients(self) -> set[int]:
        """Return the identities of the other inputs that live and require gradients."""
        living = (self._others[place]() for place in self._with_gradients)
        return {id(one) for one in living if one is not None}


def _slot(
    driver: Driver, pool: Handle, tensor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a copy of an input in the pool, and the elements to copy if some lie in one place."""
    slot = driver.new_block(tensor, pool)
    if not _torch.overlaps_itself(tensor):
        slot.copy_(tensor)
        return slot, None
    span, source = _torch.row_of(slot), _torch.row_of(tensor)
    span.copy_(source)
    return slot, span


def _outputs(
    driver: Driver,
    pool: Handle,
    results: list[Any],
    new: _core.NewNode,
    taken: _Taken,
) -> Outputs:
    known = {_torch.start_of(one) for one in taken.statics.values()}
    places = {id(one): place for place, one in taken.statics.items()}
    with_gradients = taken.with_gradients()
    # The block of one that nobody holds any more may be that of a result.
    of_path = {address: (node, piece) for node, piece, address in new.live if node.is_held(piece)}
    found = Outputs([], [], [], [], [])
    pieces: dict[int, int] = {}
    for place, one in enumerate(results):
        if not isinstance(one, torch.Tensor):
            found.described.append(("constant", one))
            continue
        if id(one) in with_gradients:
            # What a backward pass is differentiated by: the compiler looks for it.
            found.with_gradients.append(place)
            one.requires_grad_()
        start = _torch.start_of(one)
        if id(one) in places:
            found.described.append(("input", places[id(one)]))
        elif start in of_path:
            node, piece = of_path[start]
            found.described.append(("path", _another(one, node, piece)))
        elif start == 0 or start in known or not driver.is_in_pool(one, pool):
            if start and one.device.type != driver.device_type:
                raise CaptureError(
                    f"result {place} of a recording is on {one.device}, expected a tensor of the"
                    " GPU: a graph cannot compute it. Move it to the GPU in the function, or leave"
                    " the function uncompiled"
                )
            found.described.append(("static", one))
        else:
            if start not in pieces:
                pieces[start] = len(pieces)
                found.storages.append(_torch.WeakStorage(one))
            found.described.append(("own", len(found.new)))
            found.new.append(one)
            found.pieces.append(pieces[start])
    found.new = [one.detach() for one in found.new]
    return found


def _another(tensor: torch.Tensor, node: Node, piece: int) -> Callable[[], torch.Tensor]:
    """Return what makes a tensor like another one over an output of a node that was replayed."""
    layout = tensor.storage_offset(), tensor.shape, tensor.stride()
    form = tensor.dtype, *layout, tensor.is_conj(), tensor.is_neg()
    return functools.partial(_over, node, piece, form)


def _over(node: Node, piece: int, form: tuple[Any, ...]) -> torch.Tensor:
    dtype, offset, shape, strides, is_conj, is_neg = form
    root = node.first_prototype(piece)
    with torch.no_grad(), torch.inference_mode(False):
        made = torch.empty(0, dtype=dtype, device=root.device)
        made.set_(root.untyped_storage(), offset, shape, strides)
        return _torch.lazy_view(_torch.with_version_of(root, made), is_conj, is_neg)
