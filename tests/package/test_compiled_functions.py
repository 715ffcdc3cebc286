"""Functions that torch will compile, and that cgraph calls, captures and observes."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import cgraph
from cgraph import _torch
from cgraph._operators.rollback import Rollback
from cgraph.errors import CaptureError
from cgraph.sim import Simulator
from graphed_calls import near, same_gradients
from lab import Lab, fresh
from networks import leaf


@pytest.fixture
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Return both ways of capturing compilable functions on the simulator; CUDA has the second.

    The simulator can capture what the compilers here make: operators.
    """
    monkeypatch.setattr(Simulator, "captures_compiled", request.param)


def both_ways(test: Any) -> Any:
    """Run a test in both ways."""
    ways = pytest.mark.parametrize(
        "_way", [False, True], ids=["written", "compiled"], indirect=True
    )
    return pytest.mark.usefixtures("_way")(ways(test))


# torch 2.8 and 2.9 may compile once more in the simulator's capture, whose mode CUDA lacks.
IS_OLD = torch.torch_version.TorchVersion(torch.__version__) < (2, 10)
ONCE = (1, 2) if IS_OLD and not torch.cuda.is_available() else (1,)


class Compiler:
    """A backend that compiles nothing, and counts.

    Attributes:
        compiled: Number of compilations.
        runs: Number of runs of compiled functions.
    """

    def __init__(self) -> None:
        torch.compiler.reset()
        self.compiled = self.runs = 0

    def __call__(self, module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        self.compiled += 1

        def run(*args: Any) -> Any:
            self.runs += 1
            return module.forward(*args)

        return run


class Counting(nn.Module):
    """A layer, and a buffer with the number of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return torch.tanh(self.inner(x)) * self.calls


@both_ways
def test_a_graph_has_what_torch_has_compiled(lab: Lab) -> None:
    compiler = Compiler()
    compiled = torch.compile(lambda x: x.sin() * 2 + 1, backend=compiler)
    graphed = cgraph.graphed(lambda x: compiled(x) - 1, side_effects="ignore")
    with torch.no_grad():
        for _ in range(3):
            x = fresh(lab, 4)
            assert near(graphed(x), x.sin() * 2)
        assert graphed.report().captured == 1
        if lab.device == "cuda" or Simulator.captures_compiled:
            # The first call and the capture.
            assert compiler.compiled in ONCE and compiler.runs >= 2
        runs = compiler.runs
        assert near(compiled(x), x.sin() * 2 + 1)
    assert compiler.compiled in ONCE and compiler.runs == runs + 1


@both_ways
def test_compiled_code_that_was_there_before_is_captured_and_stays(lab: Lab) -> None:
    compiler = Compiler()
    compiled = torch.compile(lambda x: x.cos() + 3, backend=compiler)
    graphed = cgraph.graphed(lambda x: compiled(x) * 2, side_effects="ignore")
    with torch.no_grad():
        compiled(fresh(lab, 5))
        for _ in range(3):
            x = fresh(lab, 5)
            assert near(graphed(x), (x.cos() + 3) * 2)
        runs = compiler.runs
        assert near(compiled(x), x.cos() + 3)
    assert compiler.compiled in ONCE and compiler.runs == runs + 1


@both_ways
def test_state_that_a_compiled_module_writes_is_as_after_eager_calls(lab: Lab) -> None:
    net = Counting().to(lab.device)
    eager, compiler = copy.deepcopy(net), Compiler()
    graphed = cgraph.graphed(torch.compile(net, backend=compiler), side_effects="ignore")
    with torch.no_grad():
        for _ in range(4):
            x = fresh(lab, 2, 4)
            assert near(graphed(x), eager(x))
            assert torch.equal(net.calls, eager.calls)
    assert graphed.report().captured == 1


@both_ways
def test_arguments_that_a_compiled_function_writes_are_the_callers(lab: Lab) -> None:
    compiled = torch.compile(lambda x, y: x.add_(y).sum(), backend=Compiler())
    graphed = cgraph.graphed(compiled, side_effects="ignore")
    with torch.no_grad():
        for _ in range(3):
            x, y = fresh(lab, 4), fresh(lab, 4)
            right = x + y
            assert near(graphed(x, y), right.sum())
            assert near(x, right)
    assert graphed.report().captured == 1


@both_ways
def test_a_compiled_module_is_trained_as_in_eager(lab: Lab) -> None:
    net = Counting().to(lab.device)
    eager, compiler = copy.deepcopy(net), Compiler()
    graphed = cgraph.graphed(torch.compile(net, backend=compiler), side_effects="ignore")
    for _ in range(3):
        x = leaf(lab, 2, 4)
        same = x.detach().clone().requires_grad_()
        graphed(x).square().sum().backward()
        eager(same).square().sum().backward()
        assert near(x.grad, same.grad)
        assert same_gradients(net, eager) and torch.equal(net.calls, eager.calls)
    assert graphed.report().captured == 1
    if lab.device == "cuda":
        assert compiler.runs >= 2
    runs = compiler.runs
    torch.compile(net, backend=compiler)(leaf(lab, 2, 4))
    assert compiler.runs == runs + 1


@both_ways
def test_a_step_with_a_compiled_module_adds_the_gradients_of_eager(lab: Lab) -> None:
    net = Counting().to(lab.device)
    eager, compiled = copy.deepcopy(net), torch.compile(net, backend=Compiler())

    def step(model: Any, x: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return loss.detach()

    graphed = cgraph.graphed(lambda x: step(compiled, x))
    for _ in range(3):
        x = fresh(lab, 2, 4)
        assert near(graphed(x), step(eager, x))
        assert same_gradients(net, eager) and torch.equal(net.calls, eager.calls)


# Functions compiled anew for other rows run eagerly: Dynamo restores random states.
@pytest.mark.filterwarnings("ignore:.*runs eagerly")
@both_ways
def test_padded_calls_of_a_compiled_function_are_those_of_eager(lab: Lab) -> None:
    net = nn.Linear(4, 3).to(lab.device)
    graphed = cgraph.graphed(torch.compile(net, backend=Compiler()), sizes=[2, 4])
    with torch.no_grad():
        for rows in (4, 3, 1, 2, 3, 4, 1):
            x = fresh(lab, rows, 4)
            assert near(graphed(x), net(x))


@pytest.mark.parametrize("way", ["explain", "graphed", "dry_run", "debug"])
def test_a_function_with_a_branch_can_be_called_as_before(lab: Lab, way: str) -> None:
    def chosen(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return torch.cond(x.sum() > 0, lambda one: one * 2, lambda one: one + 1, (x,))

    torch.compiler.reset()
    x = fresh(lab, 4)
    if way == "explain":
        assert "branch" in [one.kind for one in cgraph.explain(chosen, x).findings]
    elif way == "dry_run":
        with pytest.raises((CaptureError, RuntimeError), match=r"captur"):
            cgraph.dry_run(chosen, x)
    else:
        graphed = cgraph.graphed(chosen, debug="compare" if way == "debug" else None)
        with pytest.warns(UserWarning, match="runs eagerly"):
            for _ in range(4):
                assert near(graphed(x), torch.where(x.sum() > 0, x * 2, x + 1))
    for _ in range(2):
        y = fresh(lab, 4)
        assert near(chosen(y), torch.where(y.sum() > 0, y * 2, y + 1))


@both_ways
def test_a_dry_run_of_a_compiled_function_leaves_nothing(lab: Lab) -> None:
    net = Counting().to(lab.device)
    compiled = torch.compile(net, backend=Compiler())
    with torch.no_grad():
        found = cgraph.dry_run(compiled, fresh(lab, 2, 4))
    assert found.memory.nodes > 0 and torch.equal(net.calls, torch.zeros_like(net.calls))


def test_other_threads_go_on_compiling(lab: Lab) -> None:
    here, there = Compiler(), Compiler()
    x = fresh(lab, 4)
    compiled = torch.compile(lambda x: x * 2, backend=here)
    others = torch.compile(lambda x: x * 3, backend=there)
    # torch 2.11 crashes where the first thread that compiles has ended.
    torch.compile(lambda x: x * 4, backend=Compiler())(x)
    with Rollback() as rollback:
        assert near(compiled(x), x * 2)
        thread = threading.Thread(target=others, args=(x,))
        thread.start()
        thread.join()
        assert rollback.has_uncompiled
    assert (here.runs, there.runs) == (0, 1)
    compiled(x)
    assert here.runs == 1


def test_what_torch_is_to_leave_alone_does_not_count_as_compiled(lab: Lab) -> None:
    torch.compiler.reset()
    x = fresh(lab, 4)
    with _torch.Uncompiled() as uncompiled:
        assert near(torch.compiler.disable(lambda x: x * 2)(x), x * 2)
    assert not uncompiled.has_met


def test_a_stance_of_the_users_holds_inside_and_after(lab: Lab) -> None:
    compiler = Compiler()
    x = fresh(lab, 4)
    compiled = torch.compile(lambda x: x * 2, backend=compiler)
    with torch.compiler.set_stance("force_eager"):
        compiled(x)
        with Rollback() as rollback:
            compiled(x)
        compiled(x)
    # No function would have been compiled.
    assert (compiler.runs, rollback.has_uncompiled) == (0, False)
    compiled(x)
    assert compiler.runs == 1


@pytest.mark.parametrize("stance", ["default", "fail_on_recompile", "eager_on_recompile"])
def test_a_stance_that_is_taken_inside_compiles_nothing_either(lab: Lab, stance: str) -> None:
    compiler = Compiler()
    x = fresh(lab, 4)
    compiled = torch.compile(lambda x: x * 2, backend=compiler)
    compiled(x)
    with Rollback() as rollback, torch.compiler.set_stance(stance):
        assert near(compiled(x), x * 2)
    assert (compiler.runs, rollback.has_uncompiled) == (1, True)
    compiled(x)
    assert compiler.runs == 2


def test_a_mode_that_another_thread_has_left_keeps_nobody_from_compiling(lab: Lab) -> None:
    compiler, rollback = Compiler(), Rollback()
    rollback.__enter__()
    thread = threading.Thread(target=rollback.__exit__)
    thread.start()
    thread.join()
    torch.compile(lambda x: x * 2, backend=compiler)(fresh(lab, 4))
    assert compiler.runs == 1
    with Rollback():
        pass


@pytest.mark.parametrize("where", ["leave_mode", "__exit__"])
def test_an_interrupt_where_watching_is_left_leaves_all_as_it_was(lab: Lab, where: str) -> None:
    patch = pytest.MonkeyPatch()

    def interrupted(*_: object) -> None:
        patch.undo()
        raise KeyboardInterrupt

    before = _torch.mode_count()
    with pytest.raises(KeyboardInterrupt), Rollback() as rollback:
        patch.setattr(_torch if where == "leave_mode" else _torch.Uncompiled, where, interrupted)
        with rollback.aside():
            raise AssertionError
    assert _torch.mode_count() == before
    compiler = Compiler()
    torch.compile(lambda x: x * 2, backend=compiler)(fresh(lab, 4))
    assert compiler.runs == 1


def test_an_interrupt_in_a_call_that_is_timed_leaves_all_as_it_was(lab: Lab) -> None:
    rollback = Rollback()
    before = _torch.mode_count()
    with pytest.raises(KeyboardInterrupt), rollback, rollback.aside():
        raise KeyboardInterrupt
    assert _torch.mode_count() == before
    compiler = Compiler()
    torch.compile(lambda x: x * 2, backend=compiler)(fresh(lab, 4))
    assert compiler.runs == 1


def test_a_compiler_that_is_loaded_inside_compiles_afterwards(lab: Lab) -> None:
    compiler, frames = Compiler(), sys.modules["torch._dynamo.eval_frame"]
    x = fresh(lab, 4)
    compiled = torch.compile(lambda x: x * 2, backend=compiler)
    with _torch.Uncompiled():
        pass
    uncompiled = _torch.Uncompiled()
    del sys.modules["torch._dynamo.eval_frame"]
    try:
        uncompiled.__enter__()
    finally:
        sys.modules["torch._dynamo.eval_frame"] = frames
    try:
        compiled(x)
        assert uncompiled.has_met
    finally:
        uncompiled.__exit__()
    assert uncompiled.has_met
    runs = compiler.runs
    compiled(x)
    assert compiler.runs == runs + 1
