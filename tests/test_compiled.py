"""Functions that torch is to compile, and that cgraph calls, captures and looks at."""

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
from graphed_calls import near, same_gradients
from lab import Lab, fresh
from networks import leaf


class Compiler:
    """A backend that compiles nothing, and counts.

    Attributes:
        compiled: How often it was asked to compile something.
        runs: How often that ran.
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


@pytest.mark.parametrize("preserve_state", [False, True])
def test_a_graph_has_what_torch_has_compiled(lab: Lab, preserve_state: bool) -> None:
    compiler = Compiler()
    compiled = torch.compile(lambda x: x.sin() * 2 + 1, backend=compiler)
    graphed = cgraph.graphed(lambda x: compiled(x) - 1, preserve_state=preserve_state)
    with torch.no_grad():
        for _ in range(3):
            x = fresh(lab, 4)
            near(graphed(x), x.sin() * 2)
        assert graphed.report().captured == 1
        if lab.device == "cuda":
            # A warm-up call, one that is timed, and the capture.
            assert (compiler.compiled, compiler.runs >= 3) == (1, True)
        runs = compiler.runs
        near(compiled(x), x.sin() * 2 + 1)
    assert (compiler.compiled, compiler.runs) == (1, runs + 1)


def test_compiled_code_that_was_there_before_is_captured_and_stays(lab: Lab) -> None:
    compiler = Compiler()
    compiled = torch.compile(lambda x: x.cos() + 3, backend=compiler)
    graphed = cgraph.graphed(lambda x: compiled(x) * 2)
    with torch.no_grad():
        compiled(fresh(lab, 5))
        for _ in range(3):
            x = fresh(lab, 5)
            near(graphed(x), (x.cos() + 3) * 2)
        runs = compiler.runs
        near(compiled(x), x.cos() + 3)
    assert (compiler.compiled, compiler.runs) == (1, runs + 1)


def test_state_that_a_compiled_module_writes_is_as_after_eager_calls(lab: Lab) -> None:
    net = Counting().to(lab.device)
    eager, compiler = copy.deepcopy(net), Compiler()
    graphed = cgraph.graphed(torch.compile(net, backend=compiler))
    with torch.no_grad():
        for _ in range(4):
            x = fresh(lab, 2, 4)
            near(graphed(x), eager(x))
            assert torch.equal(net.calls, eager.calls)
    assert graphed.report().captured == 1


def test_arguments_that_a_compiled_function_writes_are_the_callers(lab: Lab) -> None:
    compiled = torch.compile(lambda x, y: x.add_(y).sum(), backend=Compiler())
    graphed = cgraph.graphed(compiled)
    with torch.no_grad():
        for _ in range(3):
            x, y = fresh(lab, 4), fresh(lab, 4)
            right = x + y
            near(graphed(x, y), right.sum())
            near(x, right)
    assert graphed.report().captured == 1


def test_a_compiled_module_is_trained_as_in_eager(lab: Lab) -> None:
    net = Counting().to(lab.device)
    eager, compiler = copy.deepcopy(net), Compiler()
    graphed = cgraph.graphed(torch.compile(net, backend=compiler))
    for _ in range(3):
        x = leaf(lab, 2, 4)
        same = x.detach().clone().requires_grad_()
        graphed(x).square().sum().backward()
        eager(same).square().sum().backward()
        near(x.grad, same.grad)
        assert same_gradients(net, eager) and torch.equal(net.calls, eager.calls)
    assert graphed.report().captured == 1
    if lab.device == "cuda":
        assert compiler.runs >= 3
    runs = compiler.runs
    torch.compile(net, backend=compiler)(leaf(lab, 2, 4))
    assert compiler.runs == runs + 1


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
        near(graphed(x), step(eager, x))
        assert same_gradients(net, eager) and torch.equal(net.calls, eager.calls)


def test_padded_calls_of_a_compiled_function_are_those_of_eager(lab: Lab) -> None:
    net = nn.Linear(4, 3).to(lab.device)
    graphed = cgraph.graphed(torch.compile(net, backend=Compiler()), sizes=[2, 4])
    with torch.no_grad():
        for rows in (4, 3, 1, 2, 3):
            x = fresh(lab, rows, 4)
            near(graphed(x), net(x))


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
        with pytest.raises(Exception, match=r"."):
            cgraph.dry_run(chosen, x)
    else:
        graphed = cgraph.graphed(chosen, debug="compare" if way == "debug" else None)
        with pytest.warns(UserWarning, match="runs eagerly"):
            near(graphed(x), torch.where(x.sum() > 0, x * 2, x + 1))
    for _ in range(2):
        y = fresh(lab, 4)
        near(chosen(y), torch.where(y.sum() > 0, y * 2, y + 1))


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
    with _torch.Uncompiled() as uncompiled:
        near(compiled(x), x * 2)
        thread = threading.Thread(target=others, args=(x,))
        thread.start()
        thread.join()
        assert uncompiled.has_met
    assert (here.runs, there.runs) == (0, 1)
    compiled(x)
    assert here.runs == 1


def test_what_torch_is_to_leave_alone_does_not_count_as_compiled(lab: Lab) -> None:
    torch.compiler.reset()
    x = fresh(lab, 4)
    with _torch.Uncompiled() as uncompiled:
        near(torch.compiler.disable(lambda x: x * 2)(x), x * 2)
    assert not uncompiled.has_met


def test_a_stance_of_the_users_holds_inside_and_after(lab: Lab) -> None:
    compiler = Compiler()
    x = fresh(lab, 4)
    compiled = torch.compile(lambda x: x * 2, backend=compiler)
    with _torch.Uncompiled():
        near(compiled(x), x * 2)
    with torch.compiler.set_stance("force_eager"):
        compiled(x)
        with _torch.Uncompiled():
            compiled(x)
        compiled(x)
    assert compiler.runs == 0
    compiled(x)
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
    compiled(x)
    uncompiled.__exit__()
    assert uncompiled.has_met
    runs = compiler.runs
    compiled(x)
    assert compiler.runs == runs + 1
