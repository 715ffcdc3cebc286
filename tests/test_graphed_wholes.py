"""Containers that code uses as a whole, as in a loop, and that others fill between its calls."""

from __future__ import annotations

import collections
import contextvars
import functools
import types
import warnings
import weakref
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
        """[n, 3] → [n, 3]."""
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


def test_tables_that_others_fill_are_not_captured_anew_where_code_looks_things_up(lab: Lab) -> None:
    tables: dict[int, Tensor] = {3: fresh(lab, 3)}
    caches = [fresh(lab, 3)]

    def table(size: int) -> Tensor:
        if size not in tables:
            tables[size] = fresh(lab, size)
        return tables[size]

    def run(x: Tensor) -> Tensor:
        return x + table(x.shape[-1]) + caches[0]

    graphed = cgraph.graphed(run)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for size in range(4, 10):
            x = fresh(lab, 2, 3)
            assert torch.equal(graphed(x), run(x))
            table(size)
            caches.append(fresh(lab, 3))
    (key,) = graphed.report().keys
    assert key.replays == 6 and not key.rerecorded


def test_what_a_context_variable_holds_counts(lab: Lab) -> None:
    number = contextvars.ContextVar("number", default=1.0)
    state: contextvars.ContextVar[Any] = contextvars.ContextVar("state")
    state.set(types.SimpleNamespace(shift=fresh(lab, 3), by=2))

    def run(x: Tensor) -> Tensor:
        now = state.get()
        return x * number.get() + now.shift * now.by

    changes: list[Callable[[], object]] = [
        lambda: number.set(2.0),
        lambda: state.set(types.SimpleNamespace(shift=fresh(lab, 3), by=2)),
        lambda: setattr(state.get(), "by", 5),
        lambda: setattr(state.get(), "shift", fresh(lab, 3)),
        lambda: number.set(1.0),
    ]
    alike_after(lab, run, *changes, grad=True)


def test_what_is_behind_a_weak_reference_counts(lab: Lab) -> None:
    class Owner:
        def __init__(self) -> None:
            self.by, self.shift = 2.0, fresh(lab, 3)

    owner = Owner()
    reference = weakref.ref(owner)

    def run(x: Tensor) -> Tensor:
        found: Any = reference()
        return x * found.by + found.shift

    changes: list[Callable[[], object]] = [
        lambda: setattr(owner, "by", 3.0),
        lambda: setattr(owner, "shift", fresh(lab, 3)),
    ]
    alike_after(lab, run, *changes, grad=True)


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


@pytest.mark.parametrize("how", ["tested", "alias", "looked at"])
def test_a_table_that_others_fill_is_no_reason_to_capture_anew(lab: Lab, how: str) -> None:
    tables: dict[int, Tensor] = {3: fresh(lab, 3)}

    def run(x: Tensor) -> Tensor:
        if how == "tested":
            return x + tables[3] if tables else x
        if how == "looked at":
            return x + tables[3] if isinstance(tables, dict) else x
        found = tables
        if x.shape[-1] not in found:
            found[x.shape[-1]] = x.clone()
        return x + found[x.shape[-1]]

    graphed = cgraph.graphed(run)
    for size in range(4, 10):
        x = fresh(lab, 2, 3)
        assert torch.equal(graphed(x), run(x))
        tables[size] = fresh(lab, size)
    (key,) = graphed.report().keys
    assert key.replays == 6 and not key.rerecorded


def test_whether_there_is_something_counts_where_code_asks(lab: Lab) -> None:
    some: list[Tensor] = []
    graphed = cgraph.graphed(lambda x: x + some[0] if some else x)
    for _ in range(2):
        for _ in range(3):
            x = fresh(lab, 3)
            assert torch.equal(graphed(x), x + some[0] if some else x)
        some.append(fresh(lab, 3))


def test_a_weak_reference_to_a_module_lets_calls_be_replays(lab: Lab) -> None:
    class Child(nn.Module):
        def __init__(self, parent: nn.Module) -> None:
            super().__init__()
            self.parent = weakref.ref(parent)

        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if self.parent() is not None else x

    parent = nn.Module()
    parent.child = Child(parent)
    graphed = cgraph.graphed(parent.child)
    for _ in range(4):
        x = fresh(lab, 3)
        assert torch.equal(graphed(x), x * 2)
    (key,) = graphed.report().keys
    assert key.replays == 4 and not key.rerecorded


def test_none_in_a_context_variable_is_not_its_default(lab: Lab) -> None:
    scale: contextvars.ContextVar[float | None] = contextvars.ContextVar("scale", default=2.0)

    def run(x: Tensor) -> Tensor:
        now = scale.get()
        return x if now is None else x * now

    alike_after(lab, run, lambda: scale.set(None), lambda: scale.set(3.0), grad=True)


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


def test_a_generator_that_a_partial_function_was_given_is_its_own_affair(lab: Lab) -> None:
    linear = nn.Linear(3, 3).to(lab.device)
    finalizers = [functools.partial(list, one) for one in [iter(())]]

    def run(x: Tensor) -> Tensor:
        return x * next(linear.parameters()).sum() + len(finalizers)

    graphed = cgraph.graphed(run)
    with torch.no_grad():
        for _ in range(3):
            x = fresh(lab, 3)
            assert torch.equal(graphed(x), run(x))
    (key,) = graphed.report().keys
    assert key.replays == 3
