"""Loops under torch's modes, with generators of their own; steps that are refused for a while."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import cgraph
from cgraph.errors import ArgumentError, CgraphWarning
from lab import Lab, fresh


@cgraph.eager_break
def halved(x: Tensor) -> None:
    x.div_(2)


@pytest.mark.parametrize(
    "mode",
    [
        torch.inference_mode,
        torch.no_grad,
        lambda: torch.device("meta"),
        lambda: torch.autocast("cpu", torch.bfloat16),
    ],
    ids=["inference", "no_grad", "default device", "autocast"],
)
@pytest.mark.parametrize("first", [True, False])
def test_a_loop_may_begin_in_a_mode_or_outside_of_it(
    lab: Lab, mode: Callable[[], AbstractContextManager[Any]], first: bool
) -> None:
    x, weight = torch.zeros(4, 4, device=lab.device), fresh(lab, 4, 4)
    looped = cgraph.loop(max_steps=3, emit="x")(lambda x: x + weight)
    for is_inside in (first, not first, first):
        x.zero_()
        if is_inside:
            with mode():
                values = [*looped(x)]
        else:
            values = [*looped(x)]
        assert torch.equal(values[-1].cpu(), (weight + weight + weight).cpu())


def test_steps_of_the_host_run_in_the_modes_in_which_the_run_has_begun(lab: Lab) -> None:
    kind = lab.device
    seen: list[tuple[bool, bool, bool]] = []

    @cgraph.eager_break
    def note(x: Tensor) -> None:
        is_autocast = torch.is_autocast_enabled(kind)
        seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), is_autocast))

    x = torch.ones(2, device=lab.device)
    with torch.autocast(kind, torch.bfloat16), torch.inference_mode():
        with pytest.warns(CgraphWarning, match="it breaks at"):
            run = cgraph.loop(note, x, max_steps=3)
    seen.clear()
    run.result()
    assert seen == [(False, True, True)] * 3


def test_a_generator_of_the_steps_own_moves_on_as_by_calls(lab: Lab) -> None:
    generator = torch.Generator(lab.device)
    seed = int(torch.randint(2**31, ()))

    def step(x: Tensor) -> None:
        x.copy_(torch.rand(x.shape, device=x.device, generator=generator))

    expected, x = (torch.zeros(4, device=lab.device) for _ in range(2))
    generator.manual_seed(seed)
    for _ in range(7):
        step(expected)
    after = torch.rand(4, device=lab.device, generator=generator)
    generator.manual_seed(seed)
    run = cgraph.loop(step, x, max_steps=7)
    assert run.report.how == "launch"
    assert torch.equal(run.result()[0], expected)
    assert torch.equal(torch.rand(4, device=lab.device, generator=generator), after)


def test_a_dispatch_mode_sees_the_operators_of_each_step(lab: Lab) -> None:
    class Counts(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.count += func is torch.ops.aten.add.Tensor
            return func(*args, **(kwargs or {}))

    looped = cgraph.loop(max_steps=4)(lambda x: x + 1)
    x = torch.zeros(1, device=lab.device)
    for _ in range(2):
        assert looped(x).report.how == "launch"
        with Counts() as mode:
            run = looped(x)
            run.result()
        assert (run.report.how, mode.count) == ("steps", 4)
    assert looped(x).result()[0].item() == 20


def test_a_state_of_another_kind_is_tried_though_one_was_refused(lab: Lab) -> None:
    def step(x: Tensor) -> None:
        x.add_(1)
        if x.dtype == torch.float64:
            x.add_(float(x.sum()))

    looped = cgraph.loop(max_steps=2)(step)
    with pytest.warns(CgraphWarning, match="reads a value on the host"):
        looped(x := torch.zeros(1, device=lab.device, dtype=torch.float64)).result()
    # One of them at the same place, as torch gives memory that was freed.
    for state in (x.view(torch.float32)[:1].zero_(), torch.zeros(1, device=lab.device)):
        run = looped(state)
        assert (run.report.how, run.result()[0].item()) == ("launch", 2)


def test_a_step_that_no_loop_could_hold_is_one_again_when_it_can_be(lab: Lab) -> None:
    class Step:
        breaks = True

        def __call__(self, x: Tensor) -> None:
            x.add_(8)
            if self.breaks:
                halved(x)

    step = Step()
    looped = cgraph.loop(max_steps=2)(step)
    x = torch.zeros(1, device=lab.device)
    with pytest.warns(CgraphWarning, match="it breaks at halved"):
        assert looped(x).report.how == "steps"
    step.breaks = False
    # The first one is tried as the function that is graphed is: by calls.
    reports = []
    for _ in range(3):
        run = looped(x)
        run.result()
        reports.append(run.report.how)
    assert reports[-1] == "launch"
    step.breaks = True
    with pytest.warns(CgraphWarning, match="it breaks at halved"):
        run = looped(x)
    assert run.report.how == "steps"
    run.result()


def test_parameters_that_are_no_state_keep_their_defaults(lab: Lab) -> None:
    def step(x: Tensor, *rest: Tensor, scale: float = 3.0, **more: object) -> None:
        x.mul_(scale)
        for one in rest:
            one.add_(x)

    state = [torch.ones(1, device=lab.device) for _ in range(3)]
    run = cgraph.loop(step, *state, max_steps=2, emit=["x", "rest[1]"])
    assert [(a.item(), b.item()) for a, b in run] == [(3, 4), (9, 13)]
    assert run.report.how == "launch"
    with pytest.raises(ArgumentError, match="the state has 66 tensors, expected at most 65"):
        cgraph.loop(step, *[state[0]] * 66, max_steps=2)
