"""Refusals of make_graphed_callables, effects of failures, and lifetimes."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import cgraph
from cgraph import make_graphed_callables
from cgraph.errors import (
    ArgumentError,
    CallableError,
    CaptureError,
    CgraphError,
    DriverError,
    StateError,
)
from lab import Lab, SimLab, fresh
from networks import leaf, network, random_state


class Hidden:
    def __init__(self, value: Tensor) -> None:
        self.value = value


@contextmanager
def without_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("function", "arguments", "options", "text"),
    [
        (
            [torch.sin],
            (0,),
            {},
            "callables is a list of 1, expected a callable or a tuple",
        ),
        ((torch.sin,), (0, 0), {}, "sample_args is .*expected a tuple with those of each of the 1"),
        ((torch.sin,), (0,), {}, r"the sample_args of .*sin are a tensor of shape \(4,\)"),
        ((torch.sin,), 0, {}, r"sample_args is a tensor of shape \(4,\), expected a tuple"),
        (torch.sin, 0, {}, "the sample_args of .* are a tensor"),
        (3, (0,), {}, "int 3 is not callable"),
        (None, (0,), {}, "NoneType None is not callable"),
        (torch.sin, (0,), {"sample_kwargs": (1,)}, "sample_kwargs of .*sin are tuple"),
        (
            (torch.sin,),
            ((0,),),
            {"sample_kwargs": {}},
            "sample_kwargs is dict .*, expected a tuple",
        ),
        (torch.sin, (0,), {"num_warmup_iters": -1}, "num_warmup_iters is -1, expected a number"),
        (torch.sin, (0,), {"num_warmup_iters": 1.5}, "num_warmup_iters is 1.5, expected a number"),
        (torch.sin, (0,), {"capture_error_mode": "loose"}, "got 'loose'"),
        (torch.sin, (0,), {"pool": (5, 5)}, "pool"),
    ],
)
def test_arguments_that_do_not_fit_are_named(
    lab: Lab, function: Any, arguments: Any, options: dict[str, Any], text: str
) -> None:
    def filled(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(filled(one) for one in value)
        return fresh(lab, 4) if value == 0 else value

    with pytest.raises(CgraphError, match=text):
        make_graphed_callables(function, filled(arguments), **options)


def test_a_list_of_callables_is_refused(lab: Lab) -> None:
    with pytest.raises(CallableError, match="callables is a list of 2"):
        make_graphed_callables([torch.sin, torch.cos], ((fresh(lab, 4),), (fresh(lab, 4),)))


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "forward": lambda module: module.register_forward_hook(lambda *_: None),
    "forward pre": lambda module: module.register_forward_pre_hook(lambda *_: None),
    "backward": lambda module: module.register_full_backward_hook(lambda *_: None),
    "backward pre": lambda module: module.register_full_backward_pre_hook(lambda *_: None),
}


@pytest.mark.parametrize("register", HOOKS.values(), ids=HOOKS)
def test_a_module_with_hooks_is_refused(lab: Lab, register: Callable[[nn.Module], Any]) -> None:
    module, x = network(lab), fresh(lab, 4, 6)
    handle = register(module)
    with pytest.raises(AssertionError, match="Modules must not have hooks registered") as caught:
        make_graphed_callables(module, (x,))
    assert isinstance(caught.value, CallableError)
    assert "forward" not in vars(module)
    handle.remove()
    make_graphed_callables(module, (x,))


def test_trainable_buffers_are_refused_by_name(lab: Lab) -> None:
    module = network(lab)
    module[0].register_buffer("scale", leaf(lab, 3))
    with pytest.raises(AssertionError, match=r"only parameters may be trainable.* 0\.scale has"):
        make_graphed_callables(module, (fresh(lab, 4, 6),))


def test_tensors_of_other_devices_are_refused_by_name(lab: Lab) -> None:
    def on_meta(*shape: int) -> Tensor:
        return torch.empty(*shape, device="meta")

    with pytest.raises(CallableError, match=r"sample argument args\[1\] is on meta, expected"):
        make_graphed_callables(torch.mul, (fresh(lab, 4), on_meta(4)))
    module = network(lab)
    module[2].to("meta")
    with pytest.raises(CallableError, match=r"parameter 2\.weight is on meta"):
        make_graphed_callables(module, (fresh(lab, 4, 6),))
    module = network(lab)
    module.register_buffer("table", on_meta(3))
    with pytest.raises(CallableError, match="buffer table is on meta"):
        make_graphed_callables(module, (fresh(lab, 4, 6),))


def test_calls_on_a_device_without_memory_name_the_argument_and_both_sides(lab: Lab) -> None:
    graphed = make_graphed_callables(
        torch.add, (fresh(lab, 4),), sample_kwargs={"other": fresh(lab, 4)}
    )
    x = fresh(lab, 4)
    wrong, given = x.to("meta"), "meta|cannot be read"
    with pytest.raises(ArgumentError, match=rf"argument 1 .*({given}).*float32") as caught:
        graphed(x, other=wrong)
    assert "args[0], kwargs['other']" in caught.value.__notes__[-1]
    with pytest.raises(ArgumentError, match=rf"argument 0 .*({given}).*float32"):
        graphed(wrong, other=x)
    assert_close(graphed(x, other=x), x + x)


def test_wrong_numbers_and_kinds_of_arguments_are_refused(lab: Lab) -> None:
    graphed = make_graphed_callables(torch.sin, (fresh(lab, 4),))
    x = fresh(lab, 4)
    for args in ((), (x, x), ([x],), (None,), (3,), ("text",), ({"x": x},)):
        with pytest.raises(ArgumentError, match="sin"):
            graphed(*args)
    with pytest.raises(ArgumentError, match=r"kwargs\['x'\]"):
        graphed(x=x)


def test_tensors_hidden_in_an_unknown_type_of_output_are_refused(lab: Lab) -> None:
    with pytest.raises(CallableError, match="returns a Hidden with tensors in it"):
        make_graphed_callables(lambda x: {"result": Hidden(x * 2)}, (fresh(lab, 4),))


def test_a_function_that_closes_over_all_that_it_trains_is_refused(lab: Lab) -> None:
    module = network(lab)
    with pytest.raises(CallableError, match="none of its arguments and parameters does"):
        make_graphed_callables(lambda x: module(x), (fresh(lab, 4, 6),))
    with torch.no_grad():
        graphed = make_graphed_callables(lambda x: module(x), (fresh(lab, 4, 6),))
    x = fresh(lab, 4, 6)
    assert_close(graphed(x), module(x).detach())


@pytest.mark.parametrize("when", ["warm-up", "capture", "backward capture", "second callable"])
def test_the_callables_own_exception_comes_out_and_all_is_as_before(lab: Lab, when: str) -> None:
    calls = {"forward": 0, "backward": 0}

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            calls["forward"] += 1
            if calls["forward"] == {"warm-up": 2, "capture": 4}.get(when):
                raise ValueError("its own")
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            calls["backward"] += 1
            if calls["backward"] == 4:
                raise ValueError("its own")
            return grad * 2

    module, x = network(lab), fresh(lab, 4, 6)
    before, handle = lab.current(), cgraph.graph_pool_handle()
    with pytest.raises(ValueError, match="its own"):
        make_graphed_callables((module, Failing.apply), ((x,), (leaf(lab, 4),)), pool=handle)
    assert lab.current() == before
    assert not cgraph.is_current_stream_capturing()
    assert "forward" not in vars(module)
    make_graphed_callables(module, (x,), pool=handle)
    y = fresh(lab, 4, 6)
    assert_close(module(y), nn.Sequential(*module)(y))


def test_a_callable_that_waits_for_the_device_is_refused_with_its_reason(lab: Lab) -> None:
    with pytest.raises(RuntimeError, match="captur"):
        make_graphed_callables(lambda x: x * x.sum().item(), (fresh(lab, 4),))
    x = fresh(lab, 4)
    assert_close(make_graphed_callables(torch.sin, (fresh(lab, 4),))(x), x.sin())


def test_the_forward_of_a_module_that_is_gone_says_so(lab: Lab) -> None:
    module = network(lab)
    make_graphed_callables(module, (fresh(lab, 4, 6),))
    forward = module.forward
    del module
    gc.collect()
    with pytest.raises(StateError, match="the graphed module has been freed; its forward cannot"):
        forward(fresh(lab, 4, 6))


class Remembering(torch.autograd.Function):
    """A module that autograd's graph refers to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.module = module
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * 2, None


class Circular(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return Remembering.apply(self.linear(x), self)


@pytest.mark.parametrize("called", [True, False])
def test_modules_and_their_graphs_go_without_the_garbage_collector(lab: Lab, called: bool) -> None:
    # At the first capture of a process torch leaves cycles with the objects of its loading.
    make_graphed_callables(network(lab), (leaf(lab, 4, 6),))
    with without_gc():
        module = nn.Sequential(Circular(), nn.Tanh()).to(lab.device)
        graphs: list[weakref.ref[cgraph.CUDAGraph]] = []
        with cgraph.register_graph_capture_end_hook(lambda g: graphs.append(weakref.ref(g))):
            make_graphed_callables(module, (leaf(lab, 4, 6),))
        gone = weakref.ref(module)
        if called:
            x = leaf(lab, 4, 6)
            loss = module(x).sum()
            loss.backward()
            del loss
        assert len(graphs) == 2
        assert all(graph() is not None for graph in graphs)
        del module
        assert gone() is None
        assert [graph() for graph in graphs] == [None, None]


def test_functions_and_their_graphs_go_without_the_garbage_collector(lab: Lab) -> None:
    with without_gc():
        closed_over = nn.Linear(6, 3).to(lab.device)
        gone = weakref.ref(closed_over)
        graphed = make_graphed_callables(
            lambda x, module=closed_over: module(x), (leaf(lab, 4, 6),)
        )
        del closed_over
        x = leaf(lab, 4, 6)
        graphed(x).sum().backward()
        assert gone() is not None
        del graphed
        assert gone() is None


def test_backward_works_after_the_callable_is_gone(lab: Lab) -> None:
    graphed = make_graphed_callables(torch.sin, (leaf(lab, 4),))
    x = leaf(lab, 4)
    loss = graphed(x).sum()
    del graphed
    gc.collect()
    loss.backward()
    assert_close(x.grad, x.cos())


def test_gradients_outlive_the_callable(lab: Lab) -> None:
    module = network(lab)
    make_graphed_callables(module, (fresh(lab, 4, 6),))
    weight = module[0].weight
    module(fresh(lab, 4, 6)).sum().backward()
    expected = weight.grad.clone()
    del module
    gc.collect()
    assert_close(weight.grad, expected)


def test_inside_a_capture_it_is_refused_and_the_capture_is_abandoned(lab: Lab) -> None:
    graph, x = cgraph.CUDAGraph(), fresh(lab, 4)
    with pytest.raises((CaptureError, DriverError, RuntimeError)), cgraph.graph(graph):
        make_graphed_callables(torch.sin, (x,))
    assert not cgraph.is_current_stream_capturing()
    assert_close(make_graphed_callables(torch.sin, (fresh(lab, 4),))(x), x.sin())


def test_each_failing_driver_call_is_named_and_leaves_all_as_before(sim: SimLab) -> None:
    simulator = sim.simulator
    module = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.BatchNorm1d(8))
    sample = leaf(sim, 4, 6)
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    gc.collect()
    before, current, state = simulator.live(), sim.current(), random_state(sim)
    failures = failed = 0
    while True:
        made = len(simulator.calls())
        simulator.fail_call(failures, 999)
        try:
            make_graphed_callables((module, torch.sin), ((sample,), (sample,)), preserve_state=True)
        except CgraphError as error:
            # If the change of the capture mode fails, the call that needed it is refused (900).
            assert error.code in (999, 900), error
            assert re.search(r"\b(cu[A-Z]\w+|instantiate) failed", str(error)), error
            error.__traceback__ = None
            assert "forward" not in vars(module)
            failed += 1
        else:
            if len(simulator.calls()) - made <= failures:
                simulator.clear_faults()
                break
            # What ends or frees something is tried again, or not reported.
            vars(module).pop("forward")
        simulator.clear_faults()
        failures += 1
        assert sim.current() == current
        assert not cgraph.is_current_stream_capturing()
        assert torch.equal(random_state(sim), state)
        for name, buffer in module.named_buffers():
            assert torch.equal(buffer, buffers[name])
        gc.collect()
        simulator.synchronize()
        simulator.device.collect()
        assert simulator.live() == before, failures
    assert failed > 30
    x = fresh(sim, 4, 6)
    torch.manual_seed(2)
    found = module(x).clone()
    del module.forward
    torch.manual_seed(2)
    assert_close(found, module(x))


def test_each_failing_driver_call_of_a_step_is_raised_and_the_next_step_is_right(
    sim: SimLab,
) -> None:
    simulator = sim.simulator
    graphed = make_graphed_callables(torch.sin, (leaf(sim, 4),))
    failures = 0
    while True:
        made = len(simulator.calls())
        simulator.fail_call(failures, 999)
        x = leaf(sim, 4)
        try:
            graphed(x).sum().backward()
        except CgraphError as error:
            assert error.code == 999
        else:
            if len(simulator.calls()) - made <= failures:
                break
        finally:
            simulator.clear_faults()
        failures += 1
        y = leaf(sim, 4)
        result = graphed(y)
        result.sum().backward()
        assert_close(result, y.sin())
        assert_close(y.grad, y.cos())
    assert failures > 1


def test_the_warm_ups_results_are_gone_when_the_capture_begins(lab: Lab) -> None:
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def function(x: Tensor) -> Tensor:
        alive.append(sum(one() is not None for one in made))
        result = x.sin()
        made.append(weakref.ref(result))
        return result

    with without_gc():
        graphed = make_graphed_callables(function, (leaf(lab, 4),))
    assert alive[-1] == 0
    assert all(one() is None for one in made)
    del graphed
