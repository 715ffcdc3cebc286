"""What Python has is after a refused capture as after the calls alone."""

from __future__ import annotations

import dataclasses
import enum
import random
import threading
import types
from collections import Counter, OrderedDict, UserDict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import Tensor, nn

import cgraph
from cgraph import eager_break
from graphed_calls import states
from lab import Lab, fresh

# Each of these functions runs eagerly, and says so.
pytestmark = pytest.mark.filterwarnings("ignore:.*runs eagerly")

Made = tuple[Callable[[Tensor], Tensor], Callable[[], Any]]
"""A function, and what it has left so far."""

MEAN: Any = None


def of_global() -> Made:
    global MEAN
    MEAN = None

    def function(x: Tensor) -> Tensor:
        global MEAN
        MEAN = x.clone() if MEAN is None else MEAN * 0.5 + x
        return MEAN * 2  # type: ignore[no-any-return]

    return function, lambda: MEAN


def of_cell() -> Made:
    mean: Any = None

    def function(x: Tensor) -> Tensor:
        nonlocal mean
        mean = x.clone() if mean is None else mean * 0.5 + x
        return mean * 2  # type: ignore[no-any-return]

    return function, lambda: mean


def of_class() -> Made:
    class Host:
        mean: Any = None

    def function(x: Tensor) -> Tensor:
        Host.mean = x.clone() if Host.mean is None else Host.mean * 0.5 + x
        return Host.mean * 2  # type: ignore[no-any-return]

    return function, lambda: Host.mean


def of_deque() -> Made:
    last: deque[Tensor] = deque(maxlen=2)

    def function(x: Tensor) -> Tensor:
        last.append(last[-1] + x if last else x * 1)
        return last[-1] * 2

    return function, lambda: [*last]


def of_user_dict() -> Made:
    kept: UserDict[str, Tensor] = UserDict()

    def function(x: Tensor) -> Tensor:
        kept["sum"] = kept["sum"] + x if "sum" in kept else x * 1
        return kept["sum"] * 2

    return function, lambda: kept["sum"]


def of_buffer() -> Made:
    norm = nn.BatchNorm1d(3)
    norm.running_mean = None

    def function(x: Tensor) -> Tensor:
        before = norm.running_mean
        norm.running_mean = x * 0.5 if before is None else before * 0.5 + x
        return x - norm.running_mean

    return function, lambda: norm.running_mean


def of_dict_counter() -> Made:
    counts: dict[str, int] = {}

    def function(x: Tensor) -> Tensor:
        counts["calls"] = counts.get("calls", 0) + 1
        return x * counts["calls"]

    return function, lambda: dict(counts)


def of_counter() -> Made:
    counts: Counter[str] = Counter()

    def function(x: Tensor) -> Tensor:
        counts["calls"] += 1
        return x * counts["calls"]

    return function, lambda: dict(counts)


def of_schedule() -> Made:
    class Schedule:
        def __init__(self) -> None:
            self.place: Any = None
            self.sigmas = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]

        def step(self, x: Tensor) -> Tensor:
            if self.place is None:
                self.place = 0
            result = x * self.sigmas[self.place]
            self.place += 1
            return result

    schedule = Schedule()
    return schedule.step, lambda: schedule.place


def of_class_default() -> Made:
    class Host:
        count = 0

        def run(self, x: Tensor) -> Tensor:
            self.count += 1
            return x * self.count

    host = Host()
    return host.run, lambda: (host.count, Host.count)


def of_toggle() -> Made:
    last: Any = None

    def function(x: Tensor) -> Tensor:
        nonlocal last
        last = 5 if last is None else None
        return x * 2

    return function, lambda: last


def of_popped() -> Made:
    kept: dict[str, int] = {}

    def function(x: Tensor) -> Tensor:
        if kept.pop("n", None) is None:
            kept["n"] = 1
        return x * (1 + len(kept))

    return function, lambda: dict(kept)


def of_first_draw() -> Made:
    kept: dict[str, float] = {}

    def function(x: Tensor) -> Tensor:
        if "by" not in kept:
            kept["by"] = random.random()
        return x * kept["by"]

    return function, lambda: (kept["by"], random.getstate())


def of_python() -> Made:
    return lambda x: x * random.random(), random.getstate


def of_python_and_count() -> Made:
    counts = {"calls": 0}

    def function(x: Tensor) -> Tensor:
        counts["calls"] += 1
        return x * random.random()

    return function, lambda: (counts["calls"], random.getstate())


def of_numpy() -> Made:
    def state() -> Any:
        _, keys, place, *_ = numpy.random.get_state()
        return keys.tolist(), place  # type: ignore[union-attr]

    return lambda x: x * float(numpy.random.rand()), state


def of_own_generator(made: Callable[[], Any]) -> Callable[[], Made]:
    def of_generator() -> Made:
        generator = made()
        state = generator.getstate if hasattr(generator, "getstate") else lambda: None
        return lambda x: x * float(generator.random()), state

    return of_generator


def of_own_state() -> Made:
    generator = numpy.random.RandomState(3)
    return lambda x: x * float(generator.rand()), lambda: None


def of_list() -> Made:
    counts = [0]

    def function(x: Tensor) -> Tensor:
        counts[0] += 1
        return x * counts[0]

    return function, lambda: [*counts]


def of_default_list() -> Made:
    def function(x: Tensor, counts: list[int] = [0]) -> Tensor:  # noqa: B006
        counts[0] += 1
        return x * counts[0]

    return function, lambda: function.__defaults__[0][0]  # type: ignore[index]


def of_value(then: Any, later: Callable[[Any], Any]) -> Callable[[], Made]:
    def of_value() -> Made:
        class Host:
            """An object with a value that is exchanged in each call."""

            def __init__(self) -> None:
                self.value = then

            def __call__(self, x: Tensor) -> Tensor:
                scale = self.value.count if hasattr(self.value, "count") else 2
                scale = 1 if callable(scale) else scale
                self.value = later(self.value)
                return x * scale + (1 if self.value == then else 0)

        host = Host()
        return host, lambda: hash(host.value)

    return of_value


def of_queue(kind: type[dict[str, int]], take: Callable[[Any], int]) -> Callable[[], Made]:
    def of_queue() -> Made:
        queue = kind((name, place + 1) for place, name in enumerate("abcdefgh"))
        return lambda x: x * take(queue), lambda: hash("".join(queue))

    return of_queue


def of_array() -> Made:
    counts = numpy.zeros(2)

    def function(x: Tensor) -> Tensor:
        counts[1] += 1
        return x * float(counts[1])

    return function, lambda: counts.tolist()


def of_window() -> Made:
    last = deque([1.0, 2.0, 3.0], maxlen=3)

    def function(x: Tensor) -> Tensor:
        last.append(last[0] * 2)
        return x * last[-1]

    return function, lambda: [*last]


def of_first_value(kind: str) -> Callable[[], Made]:
    def of_first_value() -> Made:
        """One that is set in the first call, whose result is another one."""
        host, kept = types.SimpleNamespace(seen=None), dict[str, int]()

        def function(x: Tensor) -> Tensor:
            if kind == "dict":
                by = 3 if "by" in kept else 2
                kept["by"] = 5
                return x * by
            by = 2 if host.seen is None else 3
            host.seen = "yes"
            return x * by

        return function, lambda: (host.seen == "yes", kept.get("by", 5))

    return of_first_value


class Phase(enum.Enum):
    """What comes next."""

    ONE = 1
    TWO = 2


class Step(NamedTuple):
    """A count that is a tuple."""

    count: int


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A count that does not change."""

    count: int


VALUES = [
    of_value(Phase.ONE, lambda one: Phase.TWO if one is Phase.ONE else Phase.ONE),
    of_value(Step(1), lambda one: Step(one.count + 1)),
    of_value(Frozen(1), lambda one: Frozen(one.count + 1)),
    of_value((1, (False, 0.0)), lambda one: (1, (0, 0.0) if one[1][0] is False else (False, 0.0))),
    of_value(torch.float32, lambda one: torch.float64 if one == torch.float32 else torch.float32),
    of_queue(dict, lambda queue: queue.pop(next(iter(queue)))),
    of_queue(OrderedDict, lambda queue: queue.popitem(last=False)[1]),
    *(of_array, of_window),
]
ALL = [
    *VALUES,
    *(of_list, of_default_list, of_own_state),
    *(
        of_own_generator(lambda: random.Random(3)),
        of_own_generator(lambda: numpy.random.default_rng(3)),
    ),
    *(of_global, of_cell, of_class, of_deque, of_user_dict, of_buffer),
    *(of_dict_counter, of_counter, of_schedule, of_class_default, of_python, of_numpy),
    *(of_toggle, of_popped, of_first_draw, of_python_and_count),
]


@pytest.mark.parametrize("warmup", [3, 1])
@pytest.mark.parametrize("made", ALL)
def test_calls_leave_what_eager_calls_leave(
    lab: Lab, made: Callable[[], Made], warmup: int
) -> None:
    inputs = [fresh(lab, 3) for _ in range(5)]
    seen: list[list[Any]] = []
    for graphs in (False, True):
        random.seed(5)
        numpy.random.seed(5)
        function, left = made()
        run = cgraph.graphed(function, warmup=warmup) if graphs else function
        with torch.no_grad():
            seen.append([(run(x).clone(), left()) for x in inputs])
    torch.testing.assert_close(seen[1], seen[0], rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["attribute", "dict"])
def test_a_first_call_that_returns_something_else_does_so(lab: Lab, kind: str) -> None:
    # With a warm-up of one call there is none to compare it with.
    test_calls_leave_what_eager_calls_leave(lab, of_first_value(kind), warmup=3)


def test_an_error_leaves_what_was_none(lab: Lab) -> None:
    function, left = of_cell()
    graphed = cgraph.graphed(function, on_fail="raise")
    for _ in range(2):
        with pytest.raises(cgraph.errors.CaptureError, match="assigns mean, or what is in it"):
            graphed(fresh(lab, 3))
        assert left() is None


def test_random_numbers_of_python_in_a_break_are_drawn_in_each_call(lab: Lab) -> None:
    drawn: list[float] = []

    @eager_break
    def noted(x: Tensor) -> None:
        drawn.append(random.random())

    def function(x: Tensor) -> Tensor:
        y = x * 2
        noted(y)
        return y + 1

    graphed = cgraph.graphed(function)
    random.seed(3)
    for number in range(1, 4):
        graphed(fresh(lab, 3))
        last = drawn[-1]
        state = random.getstate()
        random.seed(3)
        assert last == [random.random() for _ in range(number)][-1]
        random.setstate(state)
    assert states(graphed) == ["captured"]


def test_tensors_that_a_break_assigns_are_those_of_its_own_calls(lab: Lab) -> None:
    class Cache:
        def __init__(self) -> None:
            self.sum, self.rows = torch.zeros(3, device=lab.device), {"k": fresh(lab, 1, 3)}

        @eager_break
        def added(self, x: Tensor) -> Tensor:
            self.sum = self.sum + x
            self.rows["k"] = torch.cat([self.rows["k"], x[None]])
            return self.sum

    mine, eager = Cache(), Cache()
    eager.rows["k"] = mine.rows["k"].clone()
    graphed = cgraph.graphed(lambda x: mine.added(x * 2) * 1)
    for _ in range(4):
        x = fresh(lab, 3)
        assert torch.equal(graphed(x), eager.added(x * 2))
        assert torch.equal(mine.sum, eager.sum)
        assert torch.equal(mine.rows["k"], eager.rows["k"])
    assert states(graphed) == ["captured"]


def test_items_of_other_threads_stay_where_a_count_is_put_back(lab: Lab) -> None:
    kept: dict[Any, Any] = {}
    added: list[int] = []

    def add() -> None:
        while not is_over.is_set():
            added.append(len(added))
            kept[added[-1]] = object()
            is_over.wait(0.001)

    def function(x: Tensor) -> Tensor:
        kept["hits"] = kept.get("hits", 0) + 1
        return x * 2

    is_over = threading.Event()
    thread = threading.Thread(target=add)
    thread.start()
    graphed = cgraph.graphed(function)
    for _ in range(8):
        graphed(fresh(lab, 3))
    is_over.set()
    thread.join()
    assert kept["hits"] == 8
    assert all(one in kept for one in added)


def test_numbers_that_another_thread_draws_are_no_concern(lab: Lab) -> None:
    drawn: list[float] = []

    def draw() -> None:
        while not is_over.is_set():
            drawn.append(random.random())
            is_over.wait(0.001)

    is_over = threading.Event()
    thread = threading.Thread(target=draw)
    thread.start()
    graphed = cgraph.graphed(lambda x: x * 2)
    for rows in range(1, 5):
        graphed(fresh(lab, rows))
    is_over.set()
    thread.join()
    assert len(set(drawn)) == len(drawn)
    assert states(graphed) == ["captured"] * 4
