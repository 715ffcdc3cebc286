"""Parts of random programs that assign, or that read what no operator takes."""

from __future__ import annotations

import contextvars
import random
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from contract_calls import Box
from random_parts import VALUES, WIDTH, Part

if TYPE_CHECKING:
    from random_programs import World

__all__ = ["ASSIGNING"]


def _last(world: World) -> Part:
    box = Box(last=None, by=2.0, which="a", seen={"a": None, "b": None})
    world.tensors.append(lambda: [box.last, *box.seen.values()])
    world.values.append(lambda: (box.by, box.which))
    world.actions.append(lambda draw: setattr(box, "by", draw.choice(VALUES)))
    world.actions.append(lambda draw: setattr(box, "which", draw.choice("ab")))

    def forward(x: Tensor) -> Tensor:
        y = x * box.by
        box.last = y.detach() + 1
        box.seen[box.which] = y.detach().amax(0)
        box.by, box.which = 1.5, "b"
        return y

    return forward


def _state(world: World) -> Part:
    box = Box(state=torch.zeros(WIDTH, device=world.device), held=[])
    world.tensors.append(lambda: [box.state, *box.held])
    world.actions.append(lambda draw: setattr(box, "state", world.fresh(draw, WIDTH)))
    world.actions.append(lambda _: box.held.append(box.state))

    def forward(x: Tensor) -> Tensor:
        box.state = box.state * 0.5 + x.detach().amax(0)
        return x + box.state.clone()

    return forward


def _moved(world: World) -> Part:
    box = Box(tensor=torch.ones(WIDTH, device=world.device), moves=True)

    def move(draw: random.Random) -> None:
        if box.moves:
            box.tensor = world.fresh(draw, WIDTH)

    world.steady.append(move)
    world.actions.append(lambda draw: setattr(box, "moves", draw.random() < 0.8))
    return lambda x: x * box.tensor


def _metadata(world: World) -> Part:
    box = Box(table=torch.ones(3, 2), bias=torch.ones(WIDTH), mask=None)

    def other_table(draw: random.Random) -> None:
        box.table = torch.ones(draw.choice([1, 2, 3]), 2, dtype=draw.choice(_DTYPES))

    def other_bias(draw: random.Random) -> None:
        box.bias = draw.choice([None, torch.ones(WIDTH)])

    def other_mask(draw: random.Random) -> None:
        box.mask = draw.choice([None, box.table, box.bias, torch.ones(2, requires_grad=True)])

    world.actions += [other_table, other_bias, other_mask]

    def forward(x: Tensor) -> Tensor:
        y = x * (box.table.shape[0] + (0.5 if box.table.dtype is torch.int32 else 0.0))
        if box.bias is not None:
            y = y + len(box.bias)
        if box.mask is box.table:
            return y * 2
        return y - 1 if box.mask is not None and box.mask.requires_grad else y

    return forward


_DTYPES = [torch.int32, torch.float32]


def _library(world: World) -> Part:
    function = nn.functional.hardtanh
    world.exits.callback(setattr, nn.functional, "hardtanh", function)
    own = Box(by=None)

    def patched(x: Tensor, by: Any = None) -> Tensor:
        return function(x) * (own.by or 1.0)

    def patch(_: random.Random) -> None:
        nn.functional.hardtanh = function if own.by is None else patched

    world.steady.append(patch)
    world.actions.append(lambda draw: setattr(own, "by", draw.choice([None, *VALUES])))
    return lambda x: nn.functional.hardtanh(x) + x


def _context(world: World) -> Part:
    by: contextvars.ContextVar[float] = contextvars.ContextVar("by", default=1.0)
    world.actions.append(lambda draw: by.set(draw.choice(VALUES)))
    return lambda x: x * by.get()


def _peak(world: World) -> Part:
    box = Box(peak=torch.zeros(WIDTH, device=world.device))
    world.tensors.append(lambda: [box.peak])

    def forward(x: Tensor) -> Tensor:
        # Rows that repeat another one change nothing.
        torch.maximum(box.peak, x.detach().amax(0), out=box.peak)
        return x

    return forward


ASSIGNING = [_last, _state, _moved, _metadata, _library, _context, _peak]
