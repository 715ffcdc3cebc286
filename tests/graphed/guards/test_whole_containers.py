"""Containers that code uses as a whole, as in a loop, and that others fill between its calls."""

from __future__ import annotations

import collections
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from graphed_calls import alike_after
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


def by_operators(kept: Any, x: Tensor) -> Tensor:
    return x + sum(kept.some) + torch.stack([*kept.some]).mean(0)


def counted(kept: Any, x: Tensor) -> Tensor:
    return x + len(kept.some)


def the_last(kept: Any, x: Tensor) -> Tensor:
    return x + kept.some[-1]


def all_but_the_first(kept: Any, x: Tensor) -> Tensor:
    return x + sum(kept.some[1:])


def passed_on(kept: Any, x: Tensor) -> Tensor:
    def added(of: Any) -> Tensor:
        total = x
        for one in of:
            total = total + one
        return total

    return added(kept.some)


READERS = [in_a_loop, by_operators, counted, the_last, all_but_the_first, passed_on]


@pytest.mark.parametrize("read", READERS)
def test_tensors_that_callers_add_to_a_list_count(
    lab: Lab, read: Callable[[Any, Tensor], Tensor]
) -> None:
    kept: Any = types.SimpleNamespace(some=[fresh(lab, 3), fresh(lab, 3)])

    def run(x: Tensor) -> Tensor:
        return read(kept, x)

    def exchange() -> None:
        kept.some = [*kept.some, fresh(lab, 3)]

    changes: list[Callable[[], object]] = [
        lambda: kept.some.append(fresh(lab, 3)),
        exchange,
        lambda: kept.some.pop(),
        lambda: kept.some.insert(0, fresh(lab, 3)),
    ]
    alike_after(lab, run, *changes, grad=True)


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


@pytest.mark.parametrize("kind", ["deque", "ordered", "default"])
def test_what_other_containers_get_counts(lab: Lab, kind: str) -> None:
    kinds: dict[str, Callable[[], Any]] = {
        "deque": lambda: collections.deque(maxlen=3),
        "ordered": collections.OrderedDict,
        "default": lambda: collections.defaultdict(lambda: fresh(lab, 3)),
    }
    some = kinds[kind]()

    def run(x: Tensor) -> Tensor:
        for one in some if kind == "deque" else some.values():
            x = x + one
        return x

    graphed = cgraph.graphed(run)
    for name in "abc":
        for _ in range(3):
            x = fresh(lab, 3)
            assert torch.equal(graphed(x), run(x))
        some.append(fresh(lab, 3)) if kind == "deque" else some.update({name: fresh(lab, 3)})


def test_what_a_dictionary_is_asked_for_may_come_later(lab: Lab) -> None:
    some: dict[str, Tensor] = {"other": fresh(lab, 3)}

    def run(x: Tensor) -> Tensor:
        if "shift" in some:
            x = x + some["shift"]
        scale = some.get("scale")
        return x if scale is None else x * scale

    graphed = cgraph.graphed(run)
    for name in ("", "shift", "scale"):
        some.update({name: fresh(lab, 3)} if name else {})
        for _ in range(3):
            x = fresh(lab, 3)
            assert torch.equal(graphed(x), run(x))


@pytest.mark.parametrize("kind", ["class", "device"])
def test_numbers_by_classes_and_devices_count(lab: Lab, kind: str) -> None:
    class Shape:
        pass

    shape, device = Shape(), fresh(lab, 3).device
    scales: dict[Any, float] = {Shape: 2.0, device: 3.0}

    def run(x: Tensor) -> Tensor:
        return x * scales[type(shape) if kind == "class" else x.device]

    graphed = cgraph.graphed(run)
    for scale in (2.0, 4.0, 2.0):
        scales.update({Shape: scale, device: scale + 1})
        for _ in range(3):
            x = fresh(lab, 3)
            assert torch.equal(graphed(x), run(x))


def test_whether_there_is_something_counts_where_code_asks(lab: Lab) -> None:
    some: list[Tensor] = []
    graphed = cgraph.graphed(lambda x: x + some[0] if some else x)
    for _ in range(2):
        for _ in range(3):
            x = fresh(lab, 3)
            assert torch.equal(graphed(x), x + some[0] if some else x)
        some.append(fresh(lab, 3))


def test_a_dictionary_named_grad_beside_a_break_is_no_gradient(lab: Lab) -> None:
    kept: Any = types.SimpleNamespace(grad={"other": None, "scale": 2.0})
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
