"""What breaks count and draw is that of the calls, and not of those before a capture."""

from __future__ import annotations

import random
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import cgraph
from cgraph import eager_break
from graphed_calls import near, states
from lab import Lab, fresh

Counted = tuple[Callable[[Tensor], Tensor], Callable[[], Any]]
"""A function with a break, and what that has left so far."""

COUNT = 0


class Net(nn.Module):
    """A module with a break that logs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.turns = nn.Linear(3, 3), 0
        self.losses: list[float] = []

    @eager_break
    def log(self, x: Tensor) -> Tensor:
        self.turns += 1
        self.losses.append(float(x.detach().sum()))
        return x * 2

    def forward(self, x: Tensor) -> Tensor:
        return self.log(self.inner(x)).relu()


def of_module(lab: Lab) -> Counted:
    torch.manual_seed(5)
    net = Net().to(lab.device)
    return net, lambda: (net.turns, net.losses[-1])


def of_containers(lab: Lab) -> Counted:
    counts = {"calls": 0, "sum": 0.0}
    last = deque([0.0, 0.0])

    @eager_break
    def log(x: Tensor) -> Tensor:
        global COUNT
        COUNT += 1
        counts["calls"] += 1
        counts["sum"] += float(x.detach().sum())
        last[0] += 1
        last.rotate()
        last[0] = random.random()
        return x + 1

    global COUNT
    COUNT = 0
    return lambda x: log(x * 2) * 3, lambda: (COUNT, dict(counts), [*last])


def of_two(lab: Lab) -> Counted:
    class Host:
        """Counts in slots and in a class."""

        __slots__ = ("turns",)
        made = 0

        def __init__(self) -> None:
            self.turns = 0

        @eager_break
        def outer(self, x: Tensor) -> Tensor:
            self.turns += 1
            return self.inner(x) * 2

        @eager_break
        def inner(self, x: Tensor) -> Tensor:
            type(self).made += 1
            return x + 1

    host = Host()
    return lambda x: host.inner(host.outer(x * 3)) * 2, lambda: (host.turns, Host.made)


@pytest.mark.parametrize("measure", [True, False])
@pytest.mark.parametrize("warmup", [0, 1, 3])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("made", [of_module, of_containers, of_two])
def test_what_a_break_leaves_in_python_is_that_of_the_calls(
    lab: Lab, made: Callable[[Lab], Counted], grad: bool, warmup: int, measure: bool
) -> None:
    inputs = [fresh(lab, 2, 3).requires_grad_(grad) for _ in range(4)]
    seen: list[list[Any]] = []
    for graphs in (False, True):
        random.seed(5)
        function, left = made(lab)
        run = cgraph.graphed(function, warmup=warmup, measure=measure) if graphs else function
        seen.append([])
        with torch.set_grad_enabled(grad):
            for x in inputs:
                y = run(x)
                gradient = torch.autograd.grad(y.sum(), x)[0].clone() if grad else None
                seen[-1].append((y.detach().clone(), gradient, left()))
        if graphs:
            assert states(run) == ["captured"]
    torch.testing.assert_close(seen[1], seen[0])


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
@pytest.mark.parametrize("warmup", [0, 1, 3])
def test_a_number_that_a_function_counts_beside_a_break_is_counted_once_a_call(
    lab: Lab, warmup: int
) -> None:
    counts, logged = {"calls": 0}, [0]

    @eager_break
    def log(x: Tensor) -> Tensor:
        logged[0] += 1
        return x + 1

    def function(x: Tensor) -> Tensor:
        counts["calls"] += 1
        return log(x) * counts["calls"]

    graphed = cgraph.graphed(function, warmup=warmup)
    for number in range(1, 6):
        x = fresh(lab, 3)
        torch.testing.assert_close(graphed(x), (x + 1) * number)
        assert logged == [number]


def numbers() -> Iterator[float]:
    yield from map(float, range(100))


class Loader:
    """An object that has an iterator of torch's."""

    def __init__(self) -> None:
        self.batches = iter(DataLoader(torch.arange(100.0).reshape(100, 1)))  # type: ignore[arg-type]

    def __call__(self, x: Tensor) -> Tensor:
        return x * float(next(self.batches))


def of_cell() -> Callable[[Tensor], Tensor]:
    given = numbers()
    return lambda x: x * next(given)


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
@pytest.mark.parametrize("made", [Loader, of_cell])
@pytest.mark.parametrize("warmup", [0, 3])
def test_an_iterator_gives_each_call_what_comes_next(
    lab: Lab, warmup: int, made: Callable[[], Callable[[Tensor], Tensor]]
) -> None:
    function = cgraph.graphed(made(), warmup=warmup)
    for number in range(5):
        x = fresh(lab, 3)
        torch.testing.assert_close(function(x), x * number)
    (key,) = function.report().keys
    assert key.state == "eager"
    assert "replays take nothing from it" in str(key.reason)


def test_an_iterator_is_named_where_it_keeps_a_function_from_being_captured(lab: Lab) -> None:
    function = cgraph.graphed(Loader(), on_fail="raise")
    with pytest.raises(cgraph.errors.CaptureError, match=r"names batches, a \w*DataLoaderIter"):
        function(fresh(lab, 3))


def test_a_break_may_take_from_an_iterator(lab: Lab) -> None:
    given = numbers()
    scale = torch.zeros((), device=lab.device)

    @eager_break
    def load() -> None:
        scale.fill_(next(given))

    def function(x: Tensor) -> Tensor:
        load()
        return x * scale

    graphed = cgraph.graphed(function)
    x = fresh(lab, 3)
    graphed(x)
    for _ in range(3):
        before = float(scale)
        torch.testing.assert_close(graphed(x), x * (before + 1))
    assert states(graphed) == ["captured"]


def test_what_a_function_leaves_behind_a_break_is_that_of_the_last_call(lab: Lab) -> None:
    class Host:
        def __init__(self) -> None:
            self.last: Any = None
            self.all: deque[Tensor] = deque(maxlen=2)

        def __call__(self, x: Tensor) -> Tensor:
            y = eager_break(lambda one: one * 2)(x)
            self.last = y + 1
            self.all.append(y * 3)
            return y

    host = Host()
    graphed = cgraph.graphed(host)
    with pytest.warns(UserWarning, match="runs eagerly"):
        graphed(fresh(lab, 3))
    for _ in range(3):
        x = fresh(lab, 3)
        torch.testing.assert_close(graphed(x), x * 2)
        torch.testing.assert_close(host.last, x * 2 + 1)
        torch.testing.assert_close(host.all[-1], x * 6)


@pytest.mark.parametrize("grad", [False, True])
def test_what_a_break_sets_up_once_stays_for_the_code_behind_it(lab: Lab, grad: bool) -> None:
    kept: dict[str, Any] = {"ready": False}

    @eager_break
    def prepare(x: Tensor) -> Tensor:
        if not kept["ready"]:
            kept["ready"], kept["table"] = True, torch.arange(3.0, device=x.device)
        return x * 2

    graphed = cgraph.graphed(lambda x: prepare(x) + kept["table"])
    table = torch.arange(3.0, device=lab.device)
    for _ in range(4):
        x = fresh(lab, 3).requires_grad_(grad)
        torch.testing.assert_close(graphed(x), x * 2 + table)


@pytest.mark.parametrize("grad", [False, True])
def test_a_module_that_a_break_lets_train_or_not_does_so(lab: Lab, grad: bool) -> None:
    net = nn.Linear(3, 3, device=lab.device)

    @eager_break
    def turn(x: Tensor) -> Tensor:
        net.train(not net.training)
        return x * (2 if net.training else 3)

    graphed = cgraph.graphed(lambda x: turn(x * 2) + 1)
    for number in range(5):
        x = fresh(lab, 3).requires_grad_(grad)
        torch.testing.assert_close(graphed(x), x * 2 * (2 if number % 2 else 3) + 1)
        assert net.training == bool(number % 2)


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("where", ["module", "attribute", "variable"])
def test_modules_that_a_function_exchanges_beside_a_break_take_turns(
    lab: Lab, where: str, grad: bool
) -> None:
    one, two = nn.Linear(3, 3, device=lab.device), nn.Linear(3, 3, device=lab.device)
    net, host, mine = nn.Module(), types.SimpleNamespace(part=one), one
    net.part = one

    @eager_break
    def noted(x: Tensor) -> Tensor:
        return x * 1

    def function(x: Tensor) -> Tensor:
        nonlocal mine
        if where == "module":
            net.part = two if net.part is one else one
        mine = two if mine is one else one
        host.part = two if host.part is one else one
        part: Any = {"module": net.part, "attribute": host.part, "variable": mine}[where]
        return noted(part(x))

    graphed = cgraph.graphed(function)
    for number in range(5):
        x = fresh(lab, 2, 3).requires_grad_(grad)
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(graphed(x), (one if number % 2 else two)(x))


@pytest.mark.parametrize("sizes", [None, [4]])
def test_a_count_in_a_break_is_that_of_the_calls_with_padding_as_well(
    lab: Lab, sizes: list[int] | None
) -> None:
    host = types.SimpleNamespace(calls=0, last=None)

    @eager_break
    def counted(x: Tensor) -> Tensor:
        host.calls += 1
        host.last = x.sum()
        return x * host.calls

    graphed = cgraph.graphed(lambda x: counted(x * 2) + 1, sizes=sizes)
    for number in range(1, 5):
        x = fresh(lab, 3, 2)
        torch.testing.assert_close(graphed(x), x * 2 * number + 1)
        assert host.calls == number


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
def test_random_numbers_beside_a_break_are_drawn_in_each_call(lab: Lab) -> None:
    generator, expected = random.Random(3), random.Random(3)

    @eager_break
    def noted(x: Tensor) -> Tensor:
        return x * 1

    graphed = cgraph.graphed(lambda x: noted(x) * generator.random())
    for _ in range(4):
        x = fresh(lab, 3)
        torch.testing.assert_close(graphed(x), x * expected.random())


META: dict[str, Any] = {}


@pytest.mark.parametrize("has_gradients", [False, True])
@pytest.mark.parametrize("counts", [False, True])
def test_numbers_in_dictionaries_that_only_a_break_reads_make_no_keys(
    lab: Lab, has_gradients: bool, counts: bool
) -> None:
    net = nn.Linear(4, 4).to(lab.device)

    @cgraph.eager_break
    def attention(x: Tensor) -> Tensor:
        current = META["current"]
        if counts:
            current["calls"] = current.get("calls", 0) + 1
        return x * current["scale"].sum().item()

    def layer(x: Tensor) -> Tensor:
        return net(attention(net(x)))

    graphed = cgraph.graphed(layer)
    for number in range(12):
        with torch.set_grad_enabled(has_gradients):
            META["current"] = {"scale": fresh(lab, 2), "number": number}
            x = fresh(lab, 2, 4)
            y = graphed(x)
            if counts and not has_gradients:
                assert META["current"]["calls"] == 1
            assert near(y, net(net(x) * META["current"]["scale"].sum().item()))
        if has_gradients:
            y.sum().backward()
    META.clear()
    assert states(graphed) == ["captured"]
    assert graphed.report().replays == 12
