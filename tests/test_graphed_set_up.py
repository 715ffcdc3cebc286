"""What a refused call has set up is not there in part: another call sets it up anew."""

from __future__ import annotations

import dataclasses
import random
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import cgraph
from lab import Lab, fresh

# Each of these functions runs eagerly, and says so.
pytestmark = pytest.mark.filterwarnings("ignore:.*runs eagerly")

Made = tuple[Callable[[Tensor], Tensor], Callable[[], Any]]
"""Gives the table that a function has set up in its first call, and what there is of it."""


class Thing:
    """What is no tensor."""


def table(x: Tensor) -> Tensor:
    return torch.arange(3.0, device=x.device)


@pytest.fixture
def library() -> Iterator[types.ModuleType]:
    """A module of Python's that sets itself up."""
    code = """
READY, TABLE = False, None
def get(x):
    global READY, TABLE
    if not READY:
        READY, TABLE = True, table(x)
    return TABLE
"""
    module = types.ModuleType("set_up_library")
    vars(module)["table"] = table
    sys.modules["set_up_library"] = module
    exec(code, vars(module))
    yield module
    del sys.modules["set_up_library"]


def of_attributes(ready: object) -> Callable[[], Made]:
    class Host:
        def get(self, x: Tensor) -> Tensor:
            if not hasattr(self, "ready"):
                self.ready, self.table = ready, table(x)
            return self.table

    def of_attributes() -> Made:
        host = Host()
        return host.get, lambda: host.table

    return of_attributes


class Plain:
    """An object whose class has the defaults."""

    ready: Any = None
    table: Any = None


class Slotted:
    """An object with slots."""

    __slots__ = ("ready", "table")

    def __init__(self) -> None:
        self.ready: Any = None
        self.table: Any = None


def of_none(kind: type[Plain | Slotted]) -> Callable[[], Made]:
    def of_none() -> Made:
        host = kind()

        def get(x: Tensor) -> Tensor:
            if host.ready is None:
                host.ready, host.table = True, table(x)
            return host.table  # type: ignore[no-any-return]

        return get, lambda: (host.ready, host.table)

    return of_none


def of_dictionary(ready: object) -> Callable[[], Made]:
    def of_dictionary() -> Made:
        kept: dict[str, Any] = {}

        def get(x: Tensor) -> Tensor:
            if "ready" not in kept:
                kept["ready"], kept["table"] = ready, table(x)
            return kept["table"]  # type: ignore[no-any-return]

        return get, lambda: kept["table"]

    return of_dictionary


def of_list(ready: object) -> Callable[[], Made]:
    def of_list() -> Made:
        kept: list[Any] = [ready]

        def get(x: Tensor) -> Tensor:
            if len(kept) == 1:
                kept.append(ready)
                kept.append(table(x))
            return kept[2]  # type: ignore[no-any-return]

        return get, lambda: (len(kept), kept[2])

    return of_list


def of_cells() -> Made:
    ready, kept = None, None

    def get(x: Tensor) -> Tensor:
        nonlocal ready, kept
        if not ready:
            ready, kept = True, table(x)
        return kept  # type: ignore[return-value]

    return get, lambda: (ready, kept)


def of_list_in_a_cell() -> Made:
    kept: Any = None

    def get(x: Tensor) -> Tensor:
        nonlocal kept
        if not kept:
            kept = [True, table(x)]
        return kept[1]  # type: ignore[no-any-return]

    return get, lambda: kept[1]


def of_two_objects() -> Made:
    one, two = types.SimpleNamespace(), types.SimpleNamespace()

    def get(x: Tensor) -> Tensor:
        if not hasattr(one, "ready"):
            one.ready, two.table = Thing(), table(x)
        return two.table  # type: ignore[no-any-return]

    return get, lambda: two.table


def of_buffer() -> Made:
    class Host(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "ready"):
                self.ready = True
                self.register_buffer("table", table(x))
            return self.table  # type: ignore[return-value]

    host = Host()
    return host, lambda: (host.ready, host.table)


def of_modules() -> Made:
    class Host(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.is_made, self.parts = False, nn.ModuleList()

        def forward(self, x: Tensor) -> Tensor:
            if not self.is_made:
                part = nn.Linear(3, 3, bias=False, device=x.device)
                nn.init.ones_(part.weight)
                self.parts.append(part)
                self.is_made = True
            return self.parts[0](table(x))  # type: ignore[no-any-return]

    host = Host()
    return host, lambda: (host.is_made, len(host.parts), len(host.state_dict()))


# What is no tensor and lies in a dictionary or an object without one may be another thread's: only
# where a later call has left it alone, it is known to be the first one's.
SHARED = [of_dictionary(Thing()), of_list(Thing()), of_two_objects]
ALL = [
    *(of_attributes(True), of_attributes(Thing()), of_none(Plain), of_none(Slotted), of_cells),
    *(of_dictionary(True), of_list(True), of_list_in_a_cell, of_buffer, of_modules),
]


def waits(x: Tensor) -> float:
    return float(x.sum().item())


def draws(x: Tensor) -> float:
    return random.random()


@pytest.mark.parametrize("refused", [waits, draws])
@pytest.mark.parametrize(
    ("made", "warmup"),
    [
        *((made, n) for made in ALL for n in (0, 1, 3)),
        *((made, n) for made in SHARED for n in (1, 3)),
    ],
)
def test_a_refused_call_leaves_what_an_eager_one_leaves(
    lab: Lab, made: Callable[[], Made], warmup: int, refused: Callable[[Tensor], float]
) -> None:
    inputs = [fresh(lab, 3) for _ in range(3)]
    seen: list[list[Any]] = []
    for graphs in (False, True):
        random.seed(5)
        get, left = made()

        def function(x: Tensor, get: Callable[[Tensor], Tensor] = get) -> Tensor:
            return x * get(x) * refused(x)

        run = cgraph.graphed(function, warmup=warmup) if graphs else function
        with torch.no_grad():
            seen.append([(run(x).clone(), left()) for x in inputs])
    torch.testing.assert_close(seen[1], seen[0])


@pytest.mark.parametrize("warmup", [0, 1, 3])
def test_a_library_whose_first_call_was_refused_sets_itself_up(
    lab: Lab, warmup: int, library: types.ModuleType
) -> None:
    graphed = cgraph.graphed(lambda x: x * library.get(x) * waits(x), warmup=warmup)
    for _ in range(3):
        x = fresh(lab, 3)
        torch.testing.assert_close(graphed(x), x * table(x) * waits(x))
    assert library.READY
    assert torch.equal(library.TABLE, table(x))


@pytest.mark.parametrize("warmup", [0, 1, 3])
@pytest.mark.parametrize("made", ALL)
def test_a_call_that_raises_after_it_has_set_up_something_spoils_no_other(
    lab: Lab, made: Callable[[], Made], warmup: int
) -> None:
    get, _ = made()

    def function(x: Tensor, is_bad: bool = False) -> Tensor:
        y = x * get(x)
        if is_bad:
            raise ValueError("the user's own")
        return y

    graphed = cgraph.graphed(function, warmup=warmup)
    with torch.no_grad():
        for is_bad in (True, False, True, False):
            x = fresh(lab, 3)
            if is_bad:
                with pytest.raises(ValueError, match="the user's own"):
                    graphed(x, is_bad)
            else:
                torch.testing.assert_close(graphed(x), function(x))


def once(lab: Lab, kind: str) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """A module, and a function whose first call changes what it consists of."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to(lab.device)
    part: Any = net[0]
    host = types.SimpleNamespace(done=False, count=0, parts=nn.ParameterList())

    def change() -> None:
        if kind == "hook":
            part.register_forward_hook(lambda _module, _args, result: result * 2)
        elif kind == "buffer":
            part.register_buffer("scale", torch.full((3,), 2.0, device=lab.device))
        elif kind == "larger":
            part.weight = nn.Parameter(torch.ones(4, 3, device=lab.device))
            part.out_features = 4
        elif kind == "list":
            host.parts.append(nn.Parameter(torch.ones(3, device=lab.device)))
        elif kind == "pruned":
            prune.l1_unstructured(part, "weight", amount=0.5)
        else:
            parametrize.register_parametrization(part, "weight", nn.Tanh())

    def function(x: Tensor) -> Tensor:
        if not host.done:
            change()
            host.done = True
        host.count += 1
        y = nn.functional.linear(x, part.weight) if kind == "larger" else net(x)
        return y.sum(-1) * len(host.parts or [1]) * host.count

    return net, function


@pytest.mark.parametrize("kind", ["hook", "buffer", "larger", "list", "pruned", "parametrized"])
@pytest.mark.parametrize("grad", [False, True])
def test_modules_that_a_refused_call_has_changed_are_changed_once(
    lab: Lab, kind: str, grad: bool
) -> None:
    torch.manual_seed(5)
    net, function = once(lab, kind)
    torch.manual_seed(5)
    other, eager = once(lab, kind)
    graphed = cgraph.graphed(function)
    with torch.set_grad_enabled(grad):
        for _ in range(4):
            x = fresh(lab, 2, 3)
            torch.testing.assert_close(graphed(x), eager(x))
    assert [*net.state_dict()] == [*other.state_dict()]


def test_what_other_threads_put_where_a_call_was_refused_stays(lab: Lab) -> None:
    host = types.SimpleNamespace(calls=0, rows=[0.5], table={}, seen=None)
    is_over, count = threading.Event(), [0]

    def fill() -> None:
        while not is_over.is_set():
            host.rows.append(count[0])
            host.table[count[0]] = count[0]
            count[0] += 1
            time.sleep(0.0005)

    def function(x: Tensor) -> Tensor:
        if host.seen is None:
            host.seen, host.table["own"] = True, table(x)
        host.calls += 1
        return x * host.table["own"] * host.rows[0] * host.calls

    thread = threading.Thread(target=fill)
    thread.start()
    try:
        graphed = cgraph.graphed(function)
        for number in range(1, 4):
            x = fresh(lab, 3)
            torch.testing.assert_close(graphed(x), x * table(x) * 0.5 * number)
    finally:
        is_over.set()
        thread.join()
    assert len(host.rows) == len(host.table) == count[0] + 1


@pytest.mark.parametrize("grad", [False, True])
def test_weights_that_the_first_call_sets_from_its_data_are_set(lab: Lab, grad: bool) -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3, device=lab.device))

        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "is_set"):
                with torch.no_grad():
                    self.scale.copy_(x.std(0) + 0.5)
                self.is_set = True
            return x * self.scale

    net = Norm()
    graphed = cgraph.graphed(net)
    with torch.set_grad_enabled(grad):
        first = fresh(lab, 4, 3)
        expected = first.std(0) + 0.5
        torch.testing.assert_close(graphed(first), first * expected)
        for _ in range(3):
            x = fresh(lab, 4, 3)
            torch.testing.assert_close(graphed(x), x * expected)


def test_a_counter_is_put_back_beside_weights_that_torch_computes_in_each_call(lab: Lab) -> None:
    calls = 0
    net = nn.LSTM(3, 3).to(lab.device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(net, "weight_hh_l0")

    def function(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x * calls + (net(x)[0] * 0).detach()

    graphed = cgraph.graphed(function)
    with torch.no_grad():
        for number in range(1, 5):
            x = fresh(lab, 2, 1, 3)
            torch.testing.assert_close(graphed(x), x * number)


class Odd:
    """Answers to no question."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparison")

    __hash__ = None  # type: ignore[assignment]


class Tree(NamedTuple):
    """What may consist of itself many times."""

    one: Any
    two: Any


@dataclasses.dataclass(frozen=True)
class Node:
    """What leads back to itself."""

    name: str
    others: list[Any]


def test_odd_values_on_the_way_are_no_concern(lab: Lab) -> None:
    tree: Any = Tree(1, 2)
    for _ in range(60):
        tree = Tree(tree, tree)
    node = Node("one", [])
    node.others.append(node)
    host = types.SimpleNamespace(
        odd=Odd(), tree=tree, node=node, by=random.SystemRandom(), table={"odd": Odd()}
    )

    def function(x: Tensor) -> Tensor:
        known = (host.odd, host.tree, host.node, host.by, host.table)
        return x * len(known)

    graphed = cgraph.graphed(function, on_fail="raise")
    for _ in range(3):
        x = fresh(lab, 3)
        torch.testing.assert_close(graphed(x), x * 5)
    assert graphed.report().captured == 1
