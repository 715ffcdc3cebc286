"""The parts of random programs: each reads other places of Python, and names their changes."""

from __future__ import annotations

import itertools
import random
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import cgraph
from contract_calls import Box

if TYPE_CHECKING:
    from random_programs import World

__all__ = ["PARTS", "RARE", "VALUES", "Part", "first"]

WIDTH = 4
VALUES = [0.5, 1.5, 2.0, 3.0, -1.0]
Part = Callable[[Tensor], Tensor]

FACTOR, ITEMS, TABLE = 1.0, [1.0], {"by": 1.0}


def _by_globals(x: Tensor) -> Tensor:
    return x * FACTOR + sum(ITEMS) - TABLE["by"]


def first(world: World) -> Part:
    name, net = world.add(nn.Linear(WIDTH, WIDTH)), world.net
    shape = WIDTH, WIDTH

    def replace_data(draw: random.Random) -> None:
        net[name].weight.data = world.fresh(draw, *shape)

    def write(draw: random.Random) -> None:
        with torch.no_grad():
            net[name].weight.copy_(world.fresh(draw, *shape))

    def swap(draw: random.Random) -> None:
        torch.manual_seed(draw.getrandbits(31))
        net[name] = nn.Linear(WIDTH, WIDTH).to(world.device)

    world.actions += [replace_data, write, *([] if world.mode == "train" else [swap])]
    world.actions.append(lambda draw: net[name].bias.requires_grad_(draw.random() < 0.5))
    return lambda x: net[name](x)


def _norm(world: World) -> Part:
    box = Box(norm=world.net[world.add(nn.LayerNorm(WIDTH))])
    world.actions.append(lambda draw: setattr(box.norm, "eps", draw.choice([1e-5, 0.1, 1.0])))
    return lambda x: box.norm(x)


def _embedding(world: World) -> Part:
    table = world.net[world.add(nn.Embedding(7, WIDTH))]

    def replace_data(draw: random.Random) -> None:
        table.weight.data = world.fresh(draw, 7, WIDTH)

    world.actions.append(replace_data)
    return lambda x: x + table((x.detach()[:, 0].abs() * 3).long().clamp(0, 6))


def _layers(world: World) -> Part:
    layers = world.net[world.add(nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Tanh()]))]

    def append(_: random.Random) -> None:
        if len(layers) < 5:
            layers.append(nn.Sigmoid())

    def pop(_: random.Random) -> None:
        if len(layers) > 1:
            del layers[-1]

    def forward(x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x)
        return x

    world.actions += [append, pop, lambda _: layers.insert(0, nn.Softsign())]
    return forward


def _named(world: World) -> Part:
    both = {"a": nn.Tanh(), "b": nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))}
    box = Box(named=world.net[world.add(nn.ModuleDict(both))], which="a")
    world.actions.append(lambda draw: setattr(box, "which", draw.choice("ab")))
    world.actions.append(lambda _: box.named.update({"a": nn.Softplus()}))
    world.actions.append(lambda draw: setattr(box.named["b"][1], "p", draw.choice([0.0, 0.5])))
    return lambda x: box.named[box.which](x)


class Seen(nn.Module):
    """A module that writes a buffer in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.rate = 0.5

    def forward(self, x: Tensor) -> Tensor:
        self.seen.mul_(self.rate).add_(x.detach().mean(0))
        return x + self.seen.clone()


def _buffer(world: World) -> Part:
    module = world.net[world.add(Seen())]
    world.actions.append(lambda draw: setattr(module, "rate", draw.choice(VALUES)))
    world.actions.append(lambda draw: setattr(module, "seen", world.fresh(draw, WIDTH)))
    world.actions.append(lambda _: module.seen.zero_())
    return lambda x: module(x)


def _closure(world: World) -> Part:
    by, function = 1.0, torch.tanh

    def change(draw: random.Random) -> None:
        nonlocal by, function
        by, function = draw.choice(VALUES), draw.choice([torch.tanh, torch.sigmoid])

    world.actions.append(change)
    return lambda x: function(x) * by


def _globals(world: World) -> Part:
    own: dict[str, Any] = {"FACTOR": 1.0, "ITEMS": [1.0], "TABLE": {"by": 1.0}}
    own["__builtins__"] = __builtins__
    world.actions.append(lambda draw: own.update(FACTOR=draw.choice(VALUES)))
    world.actions.append(lambda draw: own["ITEMS"].append(draw.choice(VALUES)))
    world.actions.append(lambda draw: own["TABLE"].update(by=draw.choice(VALUES)))
    return types.FunctionType(_by_globals.__code__, own)


def _object(world: World) -> Part:
    class Kept(Box):
        by = 1.0

    box = Kept(items=[1.0], table={"a": 1.0}, inner=Box(by=1.0), tensor=torch.ones(WIDTH))
    box.tensor = box.tensor.to(world.device)
    world.actions.append(lambda draw: setattr(Kept, "by", draw.choice(VALUES)))
    world.actions.append(lambda draw: setattr(box, "by", draw.choice(VALUES)))
    world.actions.append(lambda _: vars(box).pop("by", None))
    world.actions.append(lambda draw: box.items.append(draw.choice(VALUES)))
    world.actions.append(lambda _: box.items.pop() if box.items else None)
    world.actions.append(lambda draw: box.table.update({draw.choice("abc"): draw.choice(VALUES)}))
    world.actions.append(lambda draw: setattr(box, "inner", Box(by=draw.choice(VALUES))))
    world.actions.append(lambda draw: setattr(box, "tensor", world.fresh(draw, WIDTH)))
    return lambda x: (
        x * box.by * box.tensor + sum(box.items) + sum(box.table.values()) * box.inner.by
    )


def _lazy(world: World) -> Part:
    box = Box(cache=None, state=[torch.zeros(WIDTH, device=world.device)])
    world.tensors.append(lambda: [box.cache, *box.state])
    world.actions.append(lambda _: setattr(box, "cache", None))

    def forward(x: Tensor) -> Tensor:
        if box.cache is None:
            box.cache = torch.full((WIDTH,), 2.0, device=x.device)
        box.state[0].add_(box.cache)
        return x * box.cache.clone() + box.state[0].clone()

    return forward


def _break(world: World) -> Part:
    box = Box(n=0, by=1.0)
    world.values.append(lambda: box.n)
    world.actions.append(lambda draw: setattr(box, "by", draw.choice(VALUES)))

    @cgraph.eager_break
    def work(x: Tensor) -> Tensor:
        if world.sizes is not None:  # a comparison calls it as well, and padding has a sum
            return x * box.by
        box.n += 1
        return x * (box.by + (box.n % 3) + (1.0 if float(x.detach().sum()) > 0 else 2.0))

    return lambda x: work(x * 1.5) - 1


class Slotted:
    """A class with a slot, a property and a method."""

    __slots__ = ("by", "items")
    more = 1.0

    @property
    def both(self) -> float:
        return self.by + sum(self.items)

    @staticmethod
    def halved(x: Tensor) -> Tensor:
        return x * 0.5


def _slots(world: World) -> Part:
    kind = type("Own", (Slotted,), {"__slots__": ()})
    one = kind()
    one.by, one.items = 1.0, {1.0}
    world.actions.append(lambda draw: setattr(one, "by", draw.choice(VALUES)))
    world.actions.append(lambda draw: one.items.symmetric_difference_update({draw.choice(VALUES)}))
    world.actions.append(lambda draw: setattr(kind, "more", draw.choice(VALUES)))
    return lambda x: one.halved(x) * one.both + one.more


def _hooks(world: World) -> Part:
    module = world.net[world.add(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))]
    handles: list[Any] = []

    def add(draw: random.Random) -> None:
        by = draw.choice(VALUES)
        handles.append(module[0].register_forward_hook(lambda _, given, found: found * by))

    world.actions += [add, add, lambda _: handles.pop().remove() if handles else None]
    return lambda x: module(x)


def _inner(world: World) -> Part:
    box = Box(by=1.0, weight=world.net[world.add(nn.Linear(WIDTH, WIDTH))])
    world.actions.append(lambda draw: setattr(box, "by", draw.choice(VALUES)))
    plain: Part = lambda x: box.weight(x) * box.by  # noqa: E731
    inner = cgraph.graphed(plain) if world.has_graphs else plain
    return lambda x: inner(x) + x


def _random(_: World) -> Part:
    return lambda x: nn.functional.dropout(x, 0.3) + torch.rand_like(x)


def _counter(world: World) -> Part:
    counter, box = itertools.count(1), Box(n=0)
    world.values.append(lambda: box.n)

    def forward(x: Tensor) -> Tensor:
        box.n += 1
        return x * float(next(counter) % 5)

    return forward


def _host(_: World) -> Part:
    return lambda x: x * (1.0 if x.detach().sum().item() > 0 else 2.0)


PARTS = [first, _norm, _embedding, _layers, _named, _buffer, _closure, _globals, _object]
PARTS += [_lazy, _break, _random, _slots, _hooks, _inner]
RARE = [_counter, _host] * 4
