"""Containers that code uses as a whole, as in a loop: what is in them, and in which order."""

from __future__ import annotations

import collections
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from graphed_calls import agree, alike_after, sets, states
from lab import Lab, fresh


class Adapted(nn.Module):
    """A layer with adapters, of which there may be none."""

    def __init__(self, adapters: dict[str, Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.adapters = adapters

    def forward(self, x: Tensor) -> Tensor:
        """Return [n, 3] → [n, 3]."""
        y: Tensor = self.linear(x)
        for weight in self.adapters.values():
            y = y + x @ weight
        return y


def in_a_loop(kept: Any, x: Tensor) -> Tensor:
    for one in kept.some:
        x = x + one
    return x


def passed_on(kept: Any, x: Tensor) -> Tensor:
    def added(of: Any) -> Tensor:
        total = x
        for one in of:
            total = total + one
        return total

    return added(kept.some)


READERS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a loop": in_a_loop,
    "operators": lambda kept, x: x + sum(kept.some) + torch.stack([*kept.some]).mean(0),
    "its length": lambda kept, x: x + len(kept.some),
    "its last item": lambda kept, x: x + kept.some[-1],
    "all but its first item": lambda kept, x: x + sum(kept.some[1:]),
    "a function that gets it": passed_on,
}


@pytest.mark.parametrize("by", READERS)
def test_tensors_that_callers_add_to_a_list_count_in(lab: Lab, by: str) -> None:
    kept: Any = SimpleNamespace(some=[fresh(lab, 3), fresh(lab, 3)])

    def exchange() -> None:
        kept.some = [*kept.some, fresh(lab, 3)]

    changes: list[Callable[[], object]] = [
        lambda: kept.some.append(fresh(lab, 3)),
        exchange,
        lambda: kept.some.pop(),
        lambda: kept.some.insert(0, fresh(lab, 3)),
    ]
    alike_after(lab, lambda x: READERS[by](kept, x), *changes, grad=True)


@pytest.mark.parametrize("begins", ["empty", "with one"])
def test_adapters_that_a_module_gets_later_count(lab: Lab, begins: str) -> None:
    adapters = {} if begins == "empty" else {"first": fresh(lab, 3, 3)}
    module = Adapted(adapters).to(lab.device)
    changes: list[Callable[[], object]] = [
        lambda: adapters.update(second=fresh(lab, 3, 3)),
        lambda: adapters.update(third=fresh(lab, 3, 3)),
        lambda: adapters.pop("second"),
        adapters.clear,
    ]
    alike_after(lab, module, *changes)


KINDS: dict[str, Callable[[], Any]] = {
    "a deque": lambda: collections.deque(maxlen=3),
    "a dictionary with an order": collections.OrderedDict,
    "a dictionary with defaults": lambda: collections.defaultdict(list),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_comes_later_counts_in(lab: Lab, kind: str) -> None:
    some = KINDS[kind]()

    def run(x: Tensor) -> Tensor:
        for one in some if kind == "a deque" else some.values():
            x = x + one
        return x

    def add() -> None:
        some.append(fresh(lab, 3)) if kind == "a deque" else some.update({len(some): fresh(lab, 3)})

    alike_after(lab, run, add, add, grad=True)


def test_what_a_dictionary_is_asked_for_may_come_later(lab: Lab) -> None:
    some: dict[str, Tensor] = {"other": fresh(lab, 3)}

    def run(x: Tensor) -> Tensor:
        if "shift" in some:
            x = x + some["shift"]
        scale = some.get("scale")
        return x if scale is None else x * scale

    changes = [*sets(some, "shift", fresh(lab, 3)), *sets(some, "scale", fresh(lab, 3))]
    alike_after(lab, run, *changes, grad=True)


class Shape:
    """A class that is a key."""


@pytest.mark.parametrize("kind", ["class", "device"])
def test_numbers_by_classes_and_devices_count(lab: Lab, kind: str) -> None:
    shape, key = Shape(), Shape if kind == "class" else fresh(lab, 3).device
    scales: dict[Any, float] = {Shape: 2.0, fresh(lab, 3).device: 2.0}

    def run(x: Tensor) -> Tensor:
        return x * scales[type(shape) if kind == "class" else x.device]

    alike_after(lab, run, *sets(scales, key, 4.0, 2.0), grad=True)


def test_whether_there_is_something_counts_where_code_asks(lab: Lab) -> None:
    some: list[Tensor] = []
    more: list[Callable[[], object]] = [lambda: some.append(fresh(lab, 3))]
    alike_after(lab, lambda x: x + some[0] if some else x, *more, grad=True)


def test_a_dictionary_named_grad_beside_a_break_is_no_gradient(lab: Lab) -> None:
    kept: Any = SimpleNamespace(grad={"other": None, "scale": 2.0})
    pause = cgraph.eager_break(lambda x: x * 2)
    graphed = cgraph.graphed(lambda x: pause(x + 1) * kept.grad["scale"])
    for _ in range(3):
        x = fresh(lab, 3)
        assert torch.equal(graphed(x), (x + 1) * 2 * 2)


def test_a_module_that_is_found_again_by_its_parts_is_followed_once(lab: Lab) -> None:
    class Block(nn.Module):
        def __init__(self, root: nn.Module) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(3, 3), 1.0
            self.note = root.note  # type: ignore[operator]

        def forward(self, x: Tensor) -> Tensor:
            return self.note(self.linear(x)) * self.scale  # type: ignore[no-any-return]

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = 1.0
            self.blocks = nn.ModuleList(Block(self) for _ in range(3))

        def note(self, x: Tensor) -> Tensor:
            return x + self.shift

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    root = Root().to(lab.device)
    changes: list[Callable[[], object]] = [
        lambda: setattr(root, "shift", 2.0),
        lambda: setattr(root.blocks[1], "scale", 3.0),
    ]
    alike_after(lab, root, *changes)


def folded(x: Tensor, items: dict[str, float]) -> Tensor:
    for value in items.values():
        x = x * 2 + value
    return x


def moved_to_the_end(items: Any) -> None:
    if isinstance(items, collections.OrderedDict):
        items.move_to_end("a")
    else:
        items["a"] = items.pop("a")


@pytest.mark.parametrize("make", [dict, collections.OrderedDict, collections.defaultdict])
def test_an_item_that_moves_to_the_end_of_a_dictionary_is_seen(
    lab: Lab, make: Callable[..., Any]
) -> None:
    items: Any = make()
    items.update(a=1.0, b=5.0, c=2.0)
    graphed = cgraph.graphed(lambda x: folded(x, items))
    for _ in range(3):
        alike_after(lab, graphed, grad=True, calls=4)
        assert states(graphed) == ["captured"]
        moved_to_the_end(items)


def test_the_order_of_modules_in_a_container_is_seen(lab: Lab) -> None:
    net = nn.Sequential(collections.OrderedDict(a=nn.ReLU(), b=nn.Tanh(), c=nn.Softsign()))
    alike_after(lab, net, *[lambda: moved_to_the_end(net._modules)] * 2, calls=4)


def test_the_order_of_items_in_an_object_among_the_arguments_is_seen(lab: Lab) -> None:
    fast = cgraph.graphed(lambda x, box: folded(x, box.items))
    for items in ({"a": 1.0, "b": 5.0}, {"b": 5.0, "a": 1.0}, {"a": 1.0, "b": 5.0}):
        box = SimpleNamespace(items=items)
        for _ in range(4):
            agree(fast, lambda x, box: folded(x, box.items), fresh(lab, 4), box)
        assert fast.report().keys[-1].state == "captured"


@pytest.mark.parametrize("key", [(1, "a"), 1.5, b"a", None, "a"])
def test_a_dictionary_that_is_made_anew_with_equal_keys_is_the_same(lab: Lab, key: Any) -> None:
    def made() -> dict[Any, float]:
        again = tuple(key) if isinstance(key, tuple) else key
        return {again: 1.0, ("b", 2): 5.0}

    box = SimpleNamespace(items=made())
    changes = sets(box, "items", *(made() for _ in range(5)))
    graphed = alike_after(lab, lambda x: folded(x, box.items), *changes, grad=True, calls=1)
    assert states(graphed) == ["captured"]
