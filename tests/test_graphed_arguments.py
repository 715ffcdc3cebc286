"""What arguments are besides their elements: classes, attributes, histories, parts that change."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import gc
import threading
import time
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from graphed_calls import misses, states
from lab import Lab, fresh


class Shifted(Tensor):
    """Adds a hundred to its products."""

    def __mul__(self, other: Any) -> Tensor:  # type: ignore[override]
        return Tensor.__mul__(self, other) + 100


def of_class(kind: type[Tensor], x: Tensor) -> Tensor:
    if kind is nn.Parameter:
        return nn.Parameter(x, requires_grad=False)
    return x if kind is Tensor else x.as_subclass(kind)


@pytest.mark.parametrize("outputs", ["static", "clone"])
def test_arguments_of_derived_classes_are_told_apart(lab: Lab, outputs: Any) -> None:
    def run(x: Tensor) -> Tensor:
        return x * 2 + (1000 if isinstance(x, nn.Parameter) else 0)

    graphed = cgraph.graphed(run, outputs=outputs)
    for _ in range(2):
        for kind in (Tensor, Shifted, nn.Parameter, Tensor):
            x = fresh(lab, 3)
            found = graphed(of_class(kind, x))
            assert torch.equal(
                found.as_subclass(Tensor), run(of_class(kind, x)).as_subclass(Tensor)
            )
            del found
    assert states(graphed) == ["captured"] * 3
    with misses() as missed:
        for kind in (Tensor, Shifted, nn.Parameter):
            x = of_class(kind, fresh(lab, 3))
            assert torch.equal(graphed(x), run(x))
    assert not missed


@pytest.mark.filterwarnings("ignore:.*runs eagerly for:UserWarning")
def test_a_function_sees_the_attributes_of_its_argument(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda x: x * getattr(x, "scale", 1))
    for scale in (3, 4):
        x: Any = fresh(lab, 3)
        x.scale = scale
        assert torch.equal(graphed(x), x * scale)
        x.scale += 1
        assert torch.equal(graphed(x), x * (scale + 1))
    assert "attributes of a tensor" in str(graphed.report().keys[0].reason)


class Named(nn.Parameter):
    """A parameter of a class of its own."""


def test_an_argument_is_of_the_class_of_its_parameter(lab: Lab) -> None:
    def run(x: Tensor) -> Tensor:
        return x * 2 + (1000 if isinstance(x, Named) else 0)

    graphed = cgraph.graphed(run)
    with torch.no_grad():
        for _ in range(2):
            x = Named(fresh(lab, 3), requires_grad=False)
            assert torch.equal(graphed(x), run(x))


def test_without_gradients_leaves_and_others_are_told_apart(lab: Lab) -> None:
    def run(x: Tensor) -> Tensor:
        if not x.requires_grad:
            return x * 3
        with torch.enable_grad():
            return torch.autograd.grad((x * x).sum(), x)[0]

    graphed = cgraph.graphed(run)
    with torch.no_grad():
        for _ in range(2):
            x = fresh(lab, 3).requires_grad_()
            assert torch.equal(graphed(x), x * 2)
            with torch.enable_grad():
                y = x * 1
            # It counts as one that requires no gradient.
            assert torch.equal(graphed(y), y * 3)


@dataclasses.dataclass
class Config:
    """Has a list."""

    scales: list[int]


@dataclasses.dataclass(frozen=True)
class Fixed:
    """Has a list in a tuple, of which Python knows no hash."""

    scales: tuple[list[int], ...]


class Table(dict[str, int]):
    """A dictionary that pytree does not know."""


class Row(list[int]):
    """A list that pytree does not know."""


CHANGES: dict[str, tuple[Any, Callable[[Any], int], Callable[[Any], None]]] = {
    "dataclass": (Config([1]), lambda c: sum(c.scales), lambda c: c.scales.append(2)),
    "frozen": (Fixed(([1],)), lambda c: sum(c.scales[0]), lambda c: c.scales[0].append(2)),
    "dict": (Table(k=1), lambda c: c["k"], lambda c: c.update(k=c["k"] + 1)),
    "counter": (collections.Counter("a"), lambda c: c["a"], lambda c: c.update("a")),
    "list": (Row([1]), sum, lambda c: c.append(2)),
    "namespace": (
        types.SimpleNamespace(deep={"k": [1]}),
        lambda c: sum(c.deep["k"]),
        lambda c: c.deep["k"].append(2),
    ),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_value_that_changes_deep_inside_is_another_one(lab: Lab, kind: str) -> None:
    value, scale_of, change = copy.deepcopy(CHANGES[kind])
    graphed = cgraph.graphed(lambda x, value: x * scale_of(value))
    for _ in range(3):
        for _ in range(2):
            x = fresh(lab, 3)
            assert torch.equal(graphed(x, value), x * scale_of(value))
        change(value)
    assert states(graphed) == ["captured"] * 3


@pytest.mark.filterwarnings("ignore:.*runs eagerly for:UserWarning")
@pytest.mark.parametrize("kind", CHANGES)
def test_a_function_that_changes_a_value_deep_inside_changes_it_once_in_each_call(
    lab: Lab, kind: str
) -> None:
    value, scale_of, change = copy.deepcopy(CHANGES[kind])

    def run(x: Tensor, value: Any) -> Tensor:
        change(value)
        return x * 2

    graphed = cgraph.graphed(run)
    for _ in range(3):
        before, x = scale_of(value), fresh(lab, 3)
        assert torch.equal(graphed(x, value), x * 2)
        step = 1 if kind in ("dict", "counter") else 2
        assert scale_of(value) == before + step


@dataclasses.dataclass
class Node:
    """Part of a graph with circles."""

    links: list[Node]
    number: int


def test_a_value_that_leads_back_to_itself_is_compared_in_time(lab: Lab) -> None:
    one, two = Node([], 1), Node([], 2)
    one.links += [two, two, one]
    two.links += [one, one]
    graphed = cgraph.graphed(lambda x, node: x * node.number)
    for _ in range(2):
        x = fresh(lab, 3)
        assert torch.equal(graphed(x, one), x)


@pytest.mark.filterwarnings("ignore:.*runs eagerly for:UserWarning")
def test_values_that_a_function_changes_stay_the_objects_that_they_are(lab: Lab) -> None:
    def over(row: Row, parts: list[Any]) -> None:
        row[:] = []
        row.extend(parts)

    def run(x: Tensor, row: Any) -> Tensor:
        row.pop(0)
        row[0].n += 1
        row[0].inside[0].append(3)
        return x * row[0].n

    kept = [types.SimpleNamespace(n=n, inside=([n],)) for n in range(5)]
    others = copy.deepcopy(kept)
    row, other = Row(), Row()
    over(row, kept)
    over(other, others)
    lists = [one.inside[0] for one in kept]
    graphed = cgraph.graphed(run)
    for _ in range(4):
        x = fresh(lab, 3)
        assert torch.equal(graphed(x, row), run(x, other))
        assert row == other and kept == others
        assert all(one.inside[0] is known for one, known in zip(kept, lists, strict=True))
        assert all(any(one is known for known in kept) for one in row)


def test_modules_that_eager_calls_are_given_go(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda module, x: module(x) * float(x.sum().item()), max_recording=1)
    alive = []
    with torch.no_grad(), pytest.warns(UserWarning, match="runs eagerly"):
        for _ in range(40):
            module = nn.Linear(2, 2).to(lab.device)
            graphed(module, fresh(lab, 1, 2))
            alive.append(weakref.ref(module))
            del module
    gc.collect()
    # So many are remembered with what they have.
    assert sum(one() is not None for one in alive) <= 16


class Slow:
    """A constant that is compared for a while, in which other threads run."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        time.sleep(0.002)
        return isinstance(other, Slow) and self.number == other.number

    def __hash__(self) -> int:
        return self.number


def test_a_graph_that_goes_while_a_call_is_compared_with_it_is_captured_anew(lab: Lab) -> None:
    graphed = cgraph.graphed(
        lambda x, slow: x * slow.number, max_graphs=1, outputs="clone", warmup=1, measure=False
    )
    failures: list[object] = []

    def work(number: int) -> None:
        try:
            for _ in range(12):
                x = torch.ones(3, device=lab.device)
                if not torch.equal(graphed(x, Slow(number)), x * number):
                    failures.append(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in (2, 3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert not failures


class Resetting:
    """Lets all graphs go while it is compared."""

    reset: Callable[[], object] | None = None

    def __eq__(self, other: object) -> bool:
        act, Resetting.reset = Resetting.reset, None
        if act is not None:
            act()
        return isinstance(other, Resetting)

    def __hash__(self) -> int:
        return 0


@pytest.mark.filterwarnings("ignore:.*runs eagerly for:UserWarning")
def test_what_runs_eagerly_is_forgotten_also_while_it_is_compared(lab: Lab) -> None:
    is_refused = True

    def run(x: Tensor, one: Resetting) -> Tensor:
        return x * float(x.sum().item()) if is_refused else x * 2

    graphed = cgraph.graphed(run)
    for _ in range(2):
        graphed(fresh(lab, 3), Resetting())
    assert states(graphed) == ["eager"]
    is_refused, Resetting.reset = False, graphed.reset
    for _ in range(3):
        x = fresh(lab, 3)
        assert torch.equal(graphed(x, Resetting()), x * 2)
    assert states(graphed) == ["captured"]


def test_a_function_is_captured_anew_on_another_simulator() -> None:
    graphed = cgraph.graphed(lambda x: x * 2)
    for _ in range(3):
        with cgraph.sim.use():
            for _ in range(2):
                x = torch.rand(3)
                assert torch.equal(graphed(x), x * 2)
    assert states(graphed) == ["captured"] * 3


def test_a_graphed_module_stays_so_through_its_methods(lab: Lab) -> None:
    graphed: Any = cgraph.graphed(nn.Linear(2, 2).to(lab.device))
    assert graphed.eval() is graphed.train(False) is graphed.requires_grad_(False) is graphed
    assert not graphed.training
    assert isinstance(graphed.state_dict(), dict)
    graphed.__wrapped__.type = "a kind"
    assert graphed.type == "a kind"
    x = fresh(lab, 3, 2)
    assert torch.equal(graphed(x), graphed.__wrapped__(x))
    assert states(graphed) == ["captured"]


@pytest.mark.parametrize("takes_any", [False, True])
def test_a_wrapper_may_hand_on_more_than_it_gets(lab: Lab, takes_any: bool) -> None:
    calls = list[int]()

    def with_table(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        table = torch.arange(3.0, device=lab.device)

        @functools.wraps(function)
        def one(x: Tensor) -> Tensor:
            calls.append(1)
            return function(x, table)

        @functools.wraps(function)
        def anything(*args: Tensor) -> Tensor:
            calls.append(1)
            return function(*args, table)

        return anything if takes_any else one

    def lookup(x: Tensor, table: Tensor) -> Tensor:
        return x * table

    graphed = cgraph.graphed(with_table(lookup), measure=False)
    for _ in range(4):
        x = fresh(lab, 3)
        assert torch.equal(graphed(x), x * torch.arange(3.0, device=lab.device))
    assert states(graphed) == ["captured"] and graphed.report().keys[0].replays == 4
    before = len(calls)
    graphed(fresh(lab, 3))
    assert len(calls) == before
    with pytest.raises(TypeError, match="positional argument"):
        graphed(x, x, x)
    assert torch.equal(graphed(x), x * torch.arange(3.0, device=lab.device))
