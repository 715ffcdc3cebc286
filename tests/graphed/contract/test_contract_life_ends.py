"""The contract, "Life of a key", captures that end early: each test quotes its sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from broken import scaled
from cgraph.errors import EagerWarning
from contract_calls import Box, counted, equal, runs_of, states_of
from lab import Lab, fresh


@pytest.fixture(autouse=True)
def _without_gradients() -> Any:
    with torch.no_grad():
        yield


UNCAPTURED: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda y: y.sum().item(),
    "float": lambda y: float(y.sum()),
    "branch": lambda y: 1.0 if y.sum() > 0 else 2.0,
    "tolist": lambda y: y.flatten().tolist()[0],
    "nonzero": lambda y: y.nonzero().shape[0],
    "mask": lambda y: y[y > 0].sum(),
    "unique": lambda y: y.unique().sum(),
    "numpy": lambda y: float(y.cpu().numpy().sum()),
}


@pytest.mark.parametrize("what", UNCAPTURED)
def test_a_capture_that_meets_what_cannot_be_captured_goes_on_eagerly_once(
    lab: Lab, what: str
) -> None:
    """If a capture meets what cannot be captured, … the rest of this call runs eagerly: once."""
    reads = UNCAPTURED[what]
    state, twin = torch.zeros(2, 3, device=lab.device), torch.zeros(2, 3, device=lab.device)

    def work(into: Tensor, x: Tensor) -> Tensor:
        into.add_(x)
        y = into * 2
        y = y * reads(y)
        into.mul_(0.5)
        return y

    function, counter = counted(lambda x: work(state, x))
    graphed = cgraph.graphed(function)
    for number in range(5):
        x = fresh(lab, 2, 3)
        expected = work(twin, x)
        if number == 1:
            with pytest.warns(EagerWarning, match=r"test_contract_life_ends\.py"):
                found = graphed(x)
        else:
            found = graphed(x)
        equal(found, expected)
        equal(state, twin)
        found.fill_(77)
        assert runs_of(counter) == number + 1
    assert states_of(graphed) == {"eager"}


def test_where_the_driver_invalidates_a_capture_the_call_runs_again_with_a_warning(
    lab: Lab,
) -> None:
    """Only where the driver itself invalidates a capture are guarded places put back and."""
    box = Box(n=0)

    def function(x: Tensor) -> Tensor:
        box.n = 5
        y = x * 2
        lab.sync()
        box.n = 0
        return y

    graphed = cgraph.graphed(function, guards={"lab": False})
    for number in range(3):
        x = fresh(lab, 3)
        if number == 1:
            with pytest.warns(EagerWarning):
                found = graphed(x)
        else:
            found = graphed(x)
        equal(found, x * 2)
        assert box.n == 0
    assert states_of(graphed) == {"eager"}


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
def test_where_the_driver_invalidates_a_capture_behind_a_break_the_call_raises(lab: Lab) -> None:
    """… behind a break that has run, it raises."""

    def function(x: Tensor) -> Tensor:
        y = scaled(x)
        z = y * 2
        lab.sync()
        return z

    graphed = cgraph.graphed(function, guards={"lab": False})
    x = fresh(lab, 3)
    equal(graphed(x), scaled(x) * 2)
    with pytest.raises(RuntimeError):
        graphed(x)
    equal(graphed(x), scaled(x) * 2)
    assert states_of(graphed) == {"eager"}


@pytest.mark.parametrize(
    "options", [{"debug": "compare"}, {"check_every": 1}], ids=["debug", "check_every"]
)
def test_python_runs_in_replays_that_are_checked(lab: Lab, options: dict[str, Any]) -> None:
    """(Python also runs for `check_padding`, `check_every` and `debug`)."""
    function, counter = counted(lambda x: x * 2)
    graphed = cgraph.graphed(function, **options)
    for _ in range(3):
        graphed(fresh(lab, 3))
    before = runs_of(counter)
    for _ in range(3):
        x = fresh(lab, 3)
        equal(graphed(x), x * 2)
    assert runs_of(counter) >= before + 3


@pytest.mark.parametrize("grad", [False, True])
def test_a_compilation_inside_the_first_call_is_no_part_of_it(lab: Lab, grad: bool) -> None:
    """Call 1 is observed: the compiler's own code and random states do not count."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(lab.device)
    torch.compiler.reset()
    graphed = cgraph.graphed(torch.compile(model, backend="aot_eager"))
    with torch.set_grad_enabled(grad):
        for _ in range(4):
            x = fresh(lab, 2, 4)
            equal(graphed(x), model(x))
    (key,) = graphed.report().keys
    assert key.state == "captured" and key.eager_calls == 1, key.reason
    torch.compiler.reset()
