"""Arguments that share memory with what a graphed function writes and finds elsewhere."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from graphed_calls import states
from lab import Lab, fresh

Pick = Callable[[Tensor], Tensor]


class Counter(nn.Module):
    """Writes the first four rows of a buffer, and then reads its argument."""

    memory: Tensor

    def __init__(self, lab: Lab) -> None:
        super().__init__()
        self.register_buffer("memory", torch.rand(8, 4, device=lab.device))

    def forward(self, x: Tensor) -> Tensor:
        self.memory[:4].mul_(0.5).add_(1)
        return x * 3 + self.memory[4:]


class Scaled(Counter):
    """The same with a weight."""

    def __init__(self, lab: Lab) -> None:
        super().__init__(lab)
        self.scale = nn.Parameter(torch.rand(4, device=lab.device))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Broken(Counter):
    """The same with a break."""

    def forward(self, x: Tensor) -> Tensor:
        cgraph.eager_break(lambda: None)()
        return super().forward(x)


def twins(lab: Lab, kind: type[Counter] = Counter) -> tuple[Counter, Counter]:
    module, other = kind(lab), kind(lab)
    other.load_state_dict(module.state_dict())
    return module, other


WRITTEN = {
    "whole": lambda memory: memory[:4],
    "transposed": lambda memory: memory[:4].T,
    "overlapping": lambda memory: memory[3:7],
}


@pytest.mark.parametrize("kind", [Counter, Scaled, Broken])
@pytest.mark.parametrize("pick", WRITTEN.values(), ids=WRITTEN)
def test_a_later_argument_in_written_memory_is_read_as_written(
    lab: Lab, pick: Pick, kind: type[Counter]
) -> None:
    module, other = twins(lab, kind)
    graphed = cgraph.graphed(module)
    with torch.set_grad_enabled(kind is Scaled):
        for _ in range(2):
            x = fresh(lab, 4, 4)
            assert torch.equal(graphed(x), other(x))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            y = graphed(pick(module.memory))
        # Other strides are another key, which is captured by another call.
        is_own = pick(module.memory).is_contiguous()
        assert any("x shares memory with a ten" in str(one.message) for one in caught) == is_own
        assert torch.equal(y, other(pick(other.memory)))
        x = fresh(lab, 4, 4)
        assert torch.equal(graphed(x), other(x))
    assert torch.equal(module.memory, other.memory)
    key, *others = graphed.report().keys
    assert (key.state, key.replays) == ("captured", 3)
    assert [one.eager_calls for one in (others or [key])] == [1]


@pytest.mark.parametrize("options", [{}, {"outputs": "clone"}, {"sizes": [4]}, {"warmup": 0}])
@pytest.mark.parametrize("kind", [Counter, Scaled])
def test_first_arguments_in_written_memory_run_eagerly(
    lab: Lab, kind: type[Counter], options: Any
) -> None:
    module, other = twins(lab, kind)
    graphed = cgraph.graphed(module, **options)
    with torch.set_grad_enabled(kind is Scaled):
        for _ in range(2):
            assert torch.equal(graphed(module.memory[:4]), other(other.memory[:4]))
        # Others are captured.
        for _ in range(2):
            x = fresh(lab, 4, 4)
            assert torch.equal(graphed(x), other(x))
    assert torch.equal(module.memory, other.memory)
    assert states(graphed) == ["captured"]


def test_a_function_that_is_only_given_written_memory_stays_eager(lab: Lab) -> None:
    module, other = twins(lab)
    graphed = cgraph.graphed(module)
    with torch.no_grad(), pytest.warns(UserWarning, match="x shares memory with .*anew each time"):
        for _ in range(5):
            assert torch.equal(graphed(module.memory[:4]), other(other.memory[:4]))
    assert torch.equal(module.memory, other.memory)
    assert states(graphed) == ["eager"]


def test_an_argument_beside_written_memory_is_replayed(lab: Lab) -> None:
    module, other = twins(lab)
    graphed = cgraph.graphed(module)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            assert torch.equal(graphed(module.memory[4:]), other(other.memory[4:]))
    assert graphed.report().replays == 3


def test_results_as_arguments_are_replayed(lab: Lab) -> None:
    module, other = twins(lab)
    graphed = cgraph.graphed(module, on_held="ignore")
    mine = right = fresh(lab, 4, 4)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            mine, right = graphed(mine), other(right)
            assert torch.equal(mine, right)
    assert graphed.report().replays == 4


@pytest.mark.parametrize("where", ["list", "dict", "keyword"])
def test_an_argument_in_written_memory_is_found_inside_of_others(lab: Lab, where: str) -> None:
    module, other = twins(lab)

    def over(module: Counter) -> Callable[..., Tensor]:
        def run(given: Any, *, also: Tensor) -> Tensor:
            y = module(also)
            return y + (given["x"] if where == "dict" else given[0])

        return run

    graphed, eager = cgraph.graphed(over(module)), over(other)

    def call(run: Callable[..., Tensor], memory: Tensor, x: Tensor, shares: bool) -> Tensor:
        one = memory[:4] if shares and where != "keyword" else x
        also = memory[:4] if shares and where == "keyword" else x
        return run({"x": one} if where == "dict" else [one], also=also)

    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for shares in (False, True, False, True, False):
            x = fresh(lab, 4, 4)
            mine = call(graphed, module.memory, x, shares)
            assert torch.equal(mine, call(eager, other.memory, x, shares))
    assert len([one for one in caught if "shares memory" in str(one.message)]) == 1
    assert graphed.report().replays == 3


def test_a_padded_argument_in_written_memory_is_read_as_written(lab: Lab) -> None:
    memory = torch.rand(4, 3, device=lab.device)
    other = memory.clone()

    def over(memory: Tensor) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            memory.mul_(0.5)
            return x + 1

        return run

    graphed, eager = cgraph.graphed(over(memory), sizes=[4]), over(other)
    for rows in (4, 2, 3):
        x = fresh(lab, rows, 3)
        assert torch.equal(graphed(x), eager(x))
    with pytest.warns(UserWarning, match="x shares memory with a tensor that the function writes"):
        for rows in (2, 3, 4):
            assert torch.equal(graphed(memory[:rows]), eager(other[:rows]))
    assert torch.equal(memory, other)
    assert states(graphed) == ["captured"]


def test_a_call_in_written_memory_is_refused_where_errors_are_to_come_out(lab: Lab) -> None:
    module, other = twins(lab)
    graphed = cgraph.graphed(module, on_fail="raise")
    with torch.no_grad():
        for _ in range(2):
            x = fresh(lab, 4, 4)
            assert torch.equal(graphed(x), other(x))
            with pytest.raises(cgraph.errors.CaptureError, match="give it a copy"):
                graphed(module.memory[:4])
            copy, right = module.memory[:4].clone(), other.memory[:4].clone()
            assert torch.equal(graphed(copy), other(right))
    assert torch.equal(module.memory, other.memory)


def test_a_frozen_function_runs_a_call_in_written_memory(lab: Lab) -> None:
    module, other = twins(lab)
    graphed = cgraph.graphed(module)
    with torch.no_grad():
        x = fresh(lab, 4, 4)
        assert torch.equal(graphed(x), other(x))
        graphed.freeze()
        with pytest.warns(UserWarning, match="runs eagerly in this call: x shares memory"):
            assert torch.equal(graphed(module.memory[:4]), other(other.memory[:4]))


def test_a_captured_step_takes_no_gradient_as_an_argument(lab: Lab) -> None:
    weights = [nn.Parameter(torch.rand(3, device=lab.device)) for _ in range(2)]
    weights[1].data.copy_(weights[0].data)
    for weight in weights:
        weight.grad = torch.rand(3, device=lab.device)
    weights[1].grad.copy_(weights[0].grad)  # type: ignore[union-attr,arg-type]

    def over(weight: nn.Parameter) -> Callable[[Tensor], Tensor]:
        def step(x: Tensor) -> Tensor:
            (weight * weight).sum().backward()
            return x * 2

        return step

    graphed, eager = cgraph.graphed(over(weights[0])), over(weights[1])
    for shares in (False, True, False):
        x = fresh(lab, 3)
        mine, right = (one.grad if shares else x for one in weights)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert torch.equal(graphed(mine), eager(right))
        assert torch.equal(weights[0].grad, weights[1].grad)  # type: ignore[arg-type]
