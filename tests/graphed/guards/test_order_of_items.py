"""The order of items, attributes of metaclasses, and layouts: part of what a function reads."""

from __future__ import annotations

import collections
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from lab import Lab, fresh


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
    fast = cgraph.graphed(lambda x: folded(x, items))
    for _ in range(3):
        for _ in range(4):
            x = fresh(lab, 4)
            assert torch.equal(fast(x), folded(x, items))
        [key] = fast.report().keys
        assert key.state == "captured"
        moved_to_the_end(items)


def test_the_order_of_modules_in_a_container_is_seen(lab: Lab) -> None:
    net = nn.Sequential(collections.OrderedDict(a=nn.ReLU(), b=nn.Tanh(), c=nn.Softsign()))
    fast = cgraph.graphed(net)
    with torch.no_grad():
        for _ in range(3):
            for _ in range(4):
                x = fresh(lab, 8)
                assert torch.equal(fast(x), net(x))
            net._modules["a"] = net._modules.pop("a")


def test_the_order_of_items_in_an_object_among_the_arguments_is_seen(lab: Lab) -> None:
    fast = cgraph.graphed(lambda x, box: folded(x, box.items))
    for items in ({"a": 1.0, "b": 5.0}, {"b": 5.0, "a": 1.0}, {"a": 1.0, "b": 5.0}):
        box = SimpleNamespace(items=items)
        for _ in range(4):
            x = fresh(lab, 4)
            assert torch.equal(fast(x, box), folded(x, items))
        assert fast.report().keys[-1].state == "captured"


class OfClasses(type):
    """A class of classes."""

    scale = 2.0


class Scaled(metaclass=OfClasses):
    """A class with an attribute of its own class."""


def test_an_attribute_of_a_metaclass_is_seen(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = cgraph.graphed(lambda x: x * Scaled.scale)
    for scale in (2.0, 3.0, 2.0):
        monkeypatch.setattr(OfClasses, "scale", scale)
        for _ in range(4):
            x = fresh(lab, 4)
            assert torch.equal(fast(x), x * scale)


class ByClass(metaclass=OfClasses):
    """An object that reads an attribute of its class's class."""

    def __call__(self, x: Tensor) -> Tensor:
        return x * type(self).scale


def test_an_attribute_of_the_class_of_an_objects_class_is_seen(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = ByClass()
    fast = cgraph.graphed(lambda x: one(x))
    for scale in (2.0, 3.0, 2.0):
        monkeypatch.setattr(OfClasses, "scale", scale)
        for _ in range(4):
            x = fresh(lab, 4)
            assert torch.equal(fast(x), x * scale)


@pytest.mark.parametrize("key", [(1, "a"), 1.5, b"a", None, "a"])
def test_a_dictionary_that_is_made_anew_with_equal_keys_is_the_same(lab: Lab, key: Any) -> None:
    def made() -> dict[Any, float]:
        again = tuple(key) if isinstance(key, tuple) else key
        return {again: 1.0, ("b", 2): 5.0}

    box = SimpleNamespace(items=made())
    fast = cgraph.graphed(lambda x: folded(x, box.items))
    for _ in range(6):
        box.items = made()
        x = fresh(lab, 4)
        assert torch.equal(fast(x), folded(x, box.items))
    [one] = fast.report().keys
    assert one.state == "captured"


def test_layouts_whose_words_once_made_one_number_are_told_apart(lab: Lab) -> None:
    multiplier, mask = 0x9E3779B97F4A7C15, (1 << 64) - 1

    def rotated(value: int) -> int:
        return ((value << 5) | (value >> 59)) & mask

    def mixed(*words: int) -> int:
        number = 0
        for word in words:
            number = (rotated(number) ^ word) * multiplier & mask
        return number

    pairs = (
        (step, 1 ^ rotated(mixed(2, 1, 1)) ^ rotated(mixed(2, step, 1))) for step in range(2, 40)
    )
    step, other = next((step, other) for step, other in pairs if other < 1 << 62)
    memory = torch.arange(100.0, device=lab.device)
    box = SimpleNamespace(rows=memory.as_strided((2, 1), (1, 1)))
    fast = cgraph.graphed(lambda x: x + box.rows)
    x = torch.zeros(2, 1, device=lab.device)
    for _ in range(3):
        fast(x)
    # The stride of a dimension of one means nothing.
    box.rows = memory.as_strided((2, 1), (step, other))
    assert torch.equal(fast(x), box.rows)
