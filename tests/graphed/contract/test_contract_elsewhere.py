"""The contract, "Elsewhere": each test quotes its sentence."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import cgraph
from cgraph import _driver
from contract_calls import Box, counted, equal, runs_of
from graphed_calls import numbers
from lab import Lab, fresh


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


class Dispatched(TorchDispatchMode):
    """A counter of operators."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """A counter of functions."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def cubed(x: Tensor) -> Tensor:
    return x * x * x


def _dispatch_mode(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with Dispatched() as mode:
        found = function(x)
    assert mode.count == 2
    return found


def _function_mode(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with Functions() as mode:
        found = function(x)
    assert mode.count == 2
    return found


def _flops(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False):
        return function(x)


def _vmap(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.vmap(function)(x)


def _grad(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    slope = torch.func.grad(lambda one: function(one).sum())(x)
    equal(slope, torch.func.grad(lambda one: cubed(one).sum())(x))
    return cubed(x)


def _jvp(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    found, slope = torch.func.jvp(function, (x,), (torch.ones_like(x),))
    torch.testing.assert_close(slope, 3 * x * x)
    return found


def _functionalize(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.func.functionalize(function)(x)


def _make_fx(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    module = make_fx(lambda one: function(one))(x)
    assert len([one for one in module.graph.nodes if one.op == "call_function"]) == 2
    return module(x)


def _jit(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    traced = torch.jit.trace(lambda one: function(one), torch.ones_like(x), check_trace=False)
    return traced(x)


def _fx(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    module = torch.fx.symbolic_trace(lambda one: function(one))
    assert len([one for one in module.graph.nodes if one.op == "call_function"]) == 2
    return module(x)


def _fake(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with FakeTensorMode() as mode:
        found = function(mode.from_tensor(x))
    assert (found.shape, found.dtype) == (x.shape, x.dtype)
    return cubed(x)


def _export(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    class Module(torch.nn.Module):
        def forward(self, one: Tensor) -> Tensor:
            return function(one)

    return torch.export.export(Module(), (torch.ones_like(x),)).module()(x)


AROUND: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "dispatch mode": _dispatch_mode,
    "function mode": _function_mode,
    "flops": _flops,
    "vmap": _vmap,
    "grad": _grad,
    "jvp": _jvp,
    "functionalize": _functionalize,
    "make_fx": _make_fx,
    "jit.trace": _jit,
    "fx": _fx,
    "fake": _fake,
    "export": _export,
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace", "ignore::FutureWarning")
@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("case", AROUND)
def test_inside_a_mode_a_transform_or_a_tracer_it_is_the_plain_function(
    lab: Lab, case: str, is_captured: bool
) -> None:
    """**Elsewhere**: inside … a mode, a transform or a tracer, a graphed call is the plain one."""
    graphed = cgraph.graphed(cubed)
    if is_captured:
        for _ in range(3):
            graphed(fresh(lab, 2, 3))
    before = numbers(graphed)
    for _ in range(4):
        x = fresh(lab, 2, 3)
        torch.testing.assert_close(AROUND[case](graphed, x), cubed(x))
    assert numbers(graphed) == before
    for _ in range(3):
        x = fresh(lab, 2, 3)
        equal(graphed(x), cubed(x))
    assert graphed.report().captured == 1


def _graph(lab: Lab, function: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], Tensor]:
    graph = cgraph.CUDAGraph()
    with cgraph.graph(graph):
        found = function(x)
    return lambda: graph.replay() or found  # type: ignore[no-any-return]


def _segments(lab: Lab, function: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], Tensor]:
    graph, found = cgraph.SegmentedGraph.capture(lambda: function(x))
    return lambda: graph.replay() or found  # type: ignore[no-any-return]


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("capture", [_graph, _segments])
def test_inside_another_capture_it_is_the_plain_function(
    lab: Lab, capture: Callable[..., Callable[[], Tensor]], is_captured: bool
) -> None:
    """… inside another capture … a graphed call is the plain function."""
    counting, counter = counted(cubed)
    graphed = cgraph.graphed(counting)
    if is_captured:
        for _ in range(3):
            graphed(fresh(lab, 2, 3))
    before, runs, x = numbers(graphed), runs_of(counter), fresh(lab, 2, 3)
    replay = capture(lab, graphed, x)
    assert numbers(graphed) == before
    assert runs_of(counter) == runs + 1
    for _ in range(3):
        x.copy_(fresh(lab, 2, 3))
        found = replay()
        lab.sync()
        equal(found.clone(), cubed(x))


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("depth", [1, 3])
def test_inside_an_observed_or_capturing_graphed_call_it_is_the_plain_function(
    lab: Lab, depth: int, is_captured: bool
) -> None:
    """… inside … an observed or capturing graphed call … is the plain function."""
    counting, counter = counted(cubed)
    inner = cgraph.graphed(counting)
    if is_captured:
        for _ in range(3):
            inner(fresh(lab, 2, 3))
    before, runs = numbers(inner), runs_of(counter)
    outer: Any = inner
    for _ in range(depth):
        outer = cgraph.graphed(lambda x, inside=outer: inside(x) * 2)
    for _ in range(6):
        x = fresh(lab, 2, 3)
        equal(outer(x), cubed(x) * 2**depth)
    assert numbers(inner) == before
    assert runs_of(counter) == runs + 2
    assert numbers(outer) == (1, 5, 1)


def test_what_an_inner_graphed_function_reads_is_guarded(lab: Lab) -> None:
    """… is the plain function: its values under names are guarded as those of any other code."""
    box = Box(scale=2.0, table=fresh(lab, 3))
    inner = cgraph.graphed(lambda x: x * box.scale + box.table)
    outer = cgraph.graphed(lambda x: inner(x) * 2)
    changes = [lambda: None, lambda: setattr(box, "scale", 3.0)]
    changes += [lambda: setattr(box, "table", fresh(lab, 3)), lambda: box.table.mul_(2)]
    for change in changes:
        change()
        for _ in range(4):
            x = fresh(lab, 2, 3)
            equal(outer(x), (x * box.scale + box.table) * 2)
    assert outer.report().captured >= 1


def test_inside_explain_and_a_dry_run_it_is_the_plain_function(lab: Lab) -> None:
    """… a mode … a graphed call is the plain function."""
    graphed = cgraph.graphed(cubed)
    x = fresh(lab, 2, 3)
    equal(cgraph.explain(graphed, x).result, cubed(x))
    assert graphed.report().keys == ()


def test_calls_of_other_threads_are_not_affected(lab: Lab) -> None:
    """While one captures, … in other threads."""
    graphed, other, wrong = cgraph.graphed(cubed), cgraph.graphed(cubed), []

    def work() -> None:
        with torch.no_grad():
            for _ in range(20):
                x = torch.ones(2, 3, device=lab.device)
                if not torch.equal(other(x), x):
                    wrong.append(x)

    thread = threading.Thread(target=work)
    thread.start()
    for rows in range(1, 20):
        for number in range(2):
            x = torch.full((rows, 3), float(number + rows), device=lab.device)
            equal(graphed(x), cubed(x))
    thread.join()
    assert not wrong


def test_a_call_runs_eagerly_where_another_thread_captures_on_the_device(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA allows no wait for a device on which a stream captures."""
    graphed, driver = cgraph.graphed(cubed), _driver.current()
    x = fresh(lab, 4)
    with torch.no_grad():
        equal(graphed(x), cubed(x))

        def refuse(_self: object) -> None:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

        with monkeypatch.context() as patch:
            # A restored attribute of the object would hide the class's own for good.
            patch.setattr(type(driver), "synchronize", refuse)
            result = graphed(x)
        equal(result, cubed(x))
        key = graphed.report().keys[0]
        assert key.state != "captured" and "another thread captures" in str(key.reason)
        for _ in range(2):
            equal(graphed(x), cubed(x))
    assert graphed.report().keys[0].state == "captured"
