"""Ways by which a function reads something of Python, and what is equal there."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import cgraph
from engines import Engine, Settings
from lab import Lab, fresh


@pytest.mark.parametrize("where", ["global", "builtin", "closure"])
def test_functions_in_variables_may_be_exchanged(
    lab: Lab, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    act: Callable[[Tensor], Tensor] = torch.relu

    def closed(x: Tensor) -> Tensor:
        return act(x)

    functions = {"global": by_helper, "builtin": by_builtin, "closure": closed}
    graphed = cgraph.graphed(functions[where], measure=False)
    for function in (torch.relu, torch.tanh):
        act = function
        monkeypatch.setattr(sys.modules[__name__], "BUILTIN", function)
        monkeypatch.setattr(sys.modules[__name__], "helper", lambda x, f=function: f(x))
        for _ in range(3):
            x = fresh(lab, 3)
            assert torch.equal(graphed(x), function(x))
    (key,) = graphed.report().keys
    assert key.replays == 6 and sum(one.count for one in key.rerecorded) == 1


BUILTIN: Callable[[Tensor], Tensor] = torch.relu


def helper(x: Tensor) -> Tensor:
    """Whatever a test puts here."""
    return x


def by_builtin(x: Tensor) -> Tensor:
    """By a global."""
    return BUILTIN(x)


def by_helper(x: Tensor) -> Tensor:
    """By another function."""
    return helper(x)


def test_two_objects_of_one_owner_are_told_apart(lab: Lab) -> None:
    class Pair:
        def __init__(self) -> None:
            self.left, self.right = Settings(1.0), Settings(1.0)

        def run(self, x: Tensor) -> Tensor:
            return x * self.left.scale + self.right.scale

    pair = Pair()
    graphed = cgraph.graphed(pair.run, measure=False)
    for left, right in ((1.0, 1.0), (2.0, 1.0), (1.0, 2.0), (2.0, 2.0)) * 2:
        pair.left.scale, pair.right.scale = left, right
        x = fresh(lab, 3)
        assert torch.equal(graphed(x), x * left + right)
    keys = graphed.report().keys
    assert [key.replays for key in keys] == [2] * 4 and not any(key.rerecorded for key in keys)
    assert keys[1].key.endswith("left.scale = 2.0") and keys[2].key.endswith("right.scale = 2.0")


def test_numbers_of_one_argument_are_no_matter_of_another_one(lab: Lab) -> None:
    engines = [Engine().to(lab.device) for _ in range(2)]
    graphed = cgraph.graphed(lambda engine, x: engine(x), measure=False)
    with torch.no_grad():
        for scale in (2.0, 3.0, 4.0):
            engines[0].scale = scale
            for engine in engines:
                for _ in range(2):
                    x = fresh(lab, 4, 3)
                    assert_close(graphed(engine, x), engine(x))
    assert graphed.report().captured == 4


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
def test_a_number_with_which_a_function_runs_eagerly_leaves_the_graphs_of_others(lab: Lab) -> None:
    kept = types.SimpleNamespace(mode="fast")

    def run(x: Tensor) -> Tensor:
        return x * 2 if kept.mode == "fast" else x * x.sum().item()

    graphed = cgraph.graphed(run, measure=False)
    for mode in ("fast", "slow", "fast", "slow", "fast"):
        kept.mode = mode
        for _ in range(2):
            x = fresh(lab, 3)
            assert_close(graphed(x), run(x))
    fast, slow = graphed.report().keys
    assert (fast.state, fast.replays, slow.state, slow.replays) == ("captured", 6, "eager", 0)


def test_no_code_of_a_container_of_the_users_runs_in_replays(lab: Lab) -> None:
    asked: list[str] = []

    class Rows(list[float]):
        def __iter__(self) -> Iterator[float]:
            asked.append("iter")
            return super().__iter__()

        def __len__(self) -> int:
            asked.append("len")
            return super().__len__()

    kept = types.SimpleNamespace(rows=Rows([1.0, 2.0]), chosen={1.0})
    graphed = cgraph.graphed(lambda x: x * kept.rows[0] + (1 in kept.chosen), measure=False)
    for rows in ([1.0, 2.0], [3.0, 2.0]):
        kept.rows[0] = rows[0]
        for _ in range(3):
            x = fresh(lab, 3)
            assert torch.equal(graphed(x), x * rows[0] + 1)
    assert not asked and graphed.report().captured == 2


@pytest.mark.parametrize("value", ["size", "device", "bytes", "numpy", "complex", "named"])
def test_equal_values_that_are_made_anew_are_no_others(lab: Lab, value: str) -> None:
    makers: dict[str, Callable[[], Any]] = {
        "size": lambda: torch.empty(2, 3).shape,
        "device": lambda: torch.device(lab.device),
        "bytes": lambda: bytes([1, 2]),
        "numpy": lambda: np.float32(0.5),
        "complex": lambda: complex("1+2j"),
        "named": lambda: Named(1, 2.0),
    }
    kept = types.SimpleNamespace(value=makers[value]())
    graphed = cgraph.graphed(lambda x: x + len(str(kept.value)), measure=False)
    for _ in range(4):
        kept.value = makers[value]()
        x = fresh(lab, 3)
        assert torch.equal(graphed(x), x + len(str(kept.value)))
    (key,) = graphed.report().keys
    assert key.replays == 4 and not key.rerecorded
    kept.value = "another one, of another length"
    assert torch.equal(graphed(x), x + len(kept.value))


class Named(NamedTuple):
    """Two numbers."""

    one: int
    two: float


@pytest.mark.parametrize("where", ["object", "list"])
def test_what_modules_behind_objects_read_may_change(lab: Lab, where: str) -> None:
    engine = Engine().to(lab.device)
    runner = types.SimpleNamespace(inner=types.SimpleNamespace(one=engine, several=[engine]))

    def by_object(x: Tensor) -> Tensor:
        return runner.inner.one(x)  # type: ignore[no-any-return]

    def by_list(x: Tensor) -> Tensor:
        return runner.inner.several[0](x)  # type: ignore[no-any-return]

    run = by_object if where == "object" else by_list
    graphed = cgraph.graphed(run, measure=False)
    with torch.no_grad():
        for name, value in (("scale", 2.0), ("scale", -0.5), ("activation", torch.tanh)):
            setattr(engine, name, value)
            for _ in range(3):
                x = fresh(lab, 4, 3)
                assert_close(graphed(x), run(x))
    assert sum(key.replays for key in graphed.report().keys) == 9
