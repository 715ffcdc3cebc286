"""Results of graphed functions: owner, lifetime, and no leaks."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils import weak

import cgraph
from lab import Lab, SimLab, fresh


def twice(x: Tensor) -> Tensor:
    return x * 2


def pair(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, x + 1


def test_results_that_are_let_go_are_not_warned_about(lab: Lab) -> None:
    function = cgraph.graphed(pair)
    for _ in range(5):
        first, second = function(fresh(lab, 4))
        first.add_(second)
        value = first.sum()
        del first, second
        function(fresh(lab, 2))
    assert torch.isfinite(value)


def test_a_held_result_of_one_key_is_not_disturbed_by_another_key(lab: Lab) -> None:
    function = cgraph.graphed(pair)
    x = fresh(lab, 4)
    kept = function(x)
    for _ in range(3):
        function(fresh(lab, 5))
    assert_close(kept, pair(x))


def test_clone_keeps_the_values_of_every_held_result(lab: Lab) -> None:
    function = cgraph.graphed(pair)
    inputs = [fresh(lab, 4) for _ in range(6)]
    results = [function(x) for x in inputs]
    assert_close(results, [pair(x) for x in inputs])


def test_clone_keeps_the_values_of_one_of_two_outputs(lab: Lab) -> None:
    function = cgraph.graphed(pair)
    inputs = [fresh(lab, 4) for _ in range(4)]
    results = [function(x)[1] for x in inputs]
    assert_close(results, [pair(x)[1] for x in inputs])


def test_clone_keeps_what_autograd_of_the_caller_saved(lab: Lab) -> None:
    function = cgraph.graphed(twice)
    weight = fresh(lab, 4).requires_grad_()
    inputs = [fresh(lab, 4) for _ in range(3)]
    results = [function(x) for x in inputs]
    loss = torch.stack([(y * weight).sum() for y in results]).sum()
    function(fresh(lab, 4))
    loss.backward()
    assert_close(weight.grad, sum(x * 2 for x in inputs))


def test_clones_are_the_callers_alone(lab: Lab) -> None:
    function = cgraph.graphed(pair)
    inputs = [fresh(lab, 4) for _ in range(4)]
    results = [function(x) for x in inputs]
    assert_close(results, [pair(x) for x in inputs])
    results[0][0].fill_(7)
    x = fresh(lab, 4)
    assert_close(function(x), pair(x))
    assert_close(results[1:], [pair(x) for x in inputs[1:]])


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "t_": lambda y: y.t_(),
    "unsqueeze_": lambda y: y.unsqueeze_(0),
    "squeeze_": lambda y: y.squeeze_(),
    "requires_grad_": lambda y: y.requires_grad_(),
    "as_strided_": lambda y: y.as_strided_((1,), (1,)),
    "resize_": lambda y: y.resize_(2, 1),
    "data": lambda y: setattr(y, "data", torch.zeros(7)),
    "values": lambda y: y.fill_(7),
    "history": lambda y: y.mul_(torch.ones(3, 1, requires_grad=True)),
    "hook": lambda y: y.requires_grad_().register_hook(lambda grad: grad * 0),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_result_that_the_caller_changed_in_place_does_not_come_back_so(
    sim: SimLab, change: Callable[[Tensor], object]
) -> None:
    function = cgraph.graphed(twice)
    for _ in range(4):
        x = fresh(sim, 3, 1)
        y = function(x)
        assert y.shape == (3, 1)
        assert y.stride() == (1, 1)
        assert not y.requires_grad
        assert y.grad_fn is None
        assert y.is_leaf
        assert_close(y, x * 2)
        change(y)
        del y


def test_a_gradient_of_the_callers_does_not_come_back(lab: Lab) -> None:
    function = cgraph.graphed(twice)
    for _ in range(3):
        y = function(fresh(lab, 4))
        assert y.grad is None
        y.requires_grad_()
        (y * y).sum().backward()
        assert y.grad is not None
        del y


def test_a_result_works_in_the_callers_autograd(lab: Lab) -> None:
    function = cgraph.graphed(twice)
    weight = fresh(lab, 4).requires_grad_()
    for _ in range(3):
        x = fresh(lab, 4)
        weight.grad = None
        (function(x) * weight).sum().backward()
        assert_close(weight.grad, x * 2)


def test_arguments_and_results_die_when_the_caller_lets_them_go(lab: Lab) -> None:
    function = cgraph.graphed(lambda x, y: (x + y, x))
    for _ in range(3):
        x, y = fresh(lab, 4), fresh(lab, 4)
        found = function(x, y)
        dying = [weakref.ref(one) for one in (x, y)]
        del x, y, found
        assert [one() for one in dying] == [None, None]


def test_a_result_outlives_its_function(lab: Lab) -> None:
    function = cgraph.graphed(pair)
    x = fresh(lab, 4)
    kept = function(x)
    del function
    gc.collect()
    for _ in range(3):
        cgraph.graphed(pair)(fresh(lab, 4))
    assert_close(kept, pair(x))


def test_a_result_outlives_a_reset(lab: Lab) -> None:
    function = cgraph.graphed(pair)
    x = fresh(lab, 4)
    kept = function(x)
    function.reset()
    for size in (4, 5):
        function(fresh(lab, size))
    assert_close(kept, pair(x))


def test_many_calls_leave_as_much_alive_as_few(sim: SimLab) -> None:
    function = cgraph.graphed(pair)

    def alive(calls: int) -> tuple[dict[str, int], int]:
        for _ in range(calls):
            function(fresh(sim, 4))
        gc.collect()
        sim.simulator.synchronize()
        tensors = [one for one in gc.get_objects() if type(one) is Tensor]
        return sim.simulator.live(), len(tensors)

    assert alive(5) == alive(50)


def test_clone_in_inference_mode_leaves_a_result_what_it_is(lab: Lab) -> None:
    function = cgraph.graphed(twice)
    with torch.no_grad():
        x = fresh(lab, 3)
        kept = function(x)
        with torch.inference_mode():
            function(fresh(lab, 4))
            function(fresh(lab, 3))
        function(fresh(lab, 3))
    weight = fresh(lab, 3).requires_grad_()
    assert not kept.is_inference()
    (kept * weight).sum().backward()
    assert_close(weight.grad, x * 2)


class Marked(Tensor):
    """A class that a caller may give a result."""


def test_attributes_and_a_class_of_the_callers_are_not_on_the_next_result(lab: Lab) -> None:
    graphed = cgraph.graphed(twice)
    for change in (
        lambda one: setattr(one, "mark", 1),
        lambda one: setattr(one, "__class__", Marked),
    ):
        for _ in range(3):
            result = graphed(fresh(lab, 3))
            assert type(result) is Tensor and not vars(result)
            change(result)
            del result


def test_a_result_that_refers_to_its_function_keeps_nothing_alive(lab: Lab) -> None:
    class Token:
        pass

    def make() -> weakref.ref[Token]:
        token = Token()

        def function(x: Tensor) -> Tensor:
            assert token is not None
            return x * 2

        graphed = cgraph.graphed(function)
        for _ in range(2):
            result = graphed(fresh(lab, 3))
        result.owner = graphed  # type: ignore[attr-defined]
        return weakref.ref(token)

    reference = make()
    gc.collect()
    assert reference() is None


TOUCHED: dict[str, Callable[[Tensor], Any]] = {
    "a gradient": lambda y: (y.requires_grad_() * 2).sum().backward(),
    "a hook": lambda y: y.requires_grad_().register_hook(lambda grad: grad * 10),
    "a gradient that was set": lambda y: setattr(y, "grad", torch.ones_like(y)),
}
if hasattr(Tensor, "rename_"):  # up to torch 2.14
    TOUCHED["a name"] = lambda y: y.rename_("rows")


@pytest.mark.filterwarnings("ignore:Named tensors")
@pytest.mark.parametrize("touch", TOUCHED.values(), ids=TOUCHED)
@pytest.mark.parametrize("lets_go", [False, True])
def test_what_a_caller_has_done_to_a_result_is_not_that_of_a_later_one(
    lab: Lab, touch: Callable[[Tensor], Any], lets_go: bool
) -> None:
    graphed = cgraph.graphed(twice)
    for _ in range(6):
        x = fresh(lab, 3)
        y = graphed(x)
        assert y.grad is None and not y.requires_grad
        assert getattr(y, "names", (None,)) == (None,)
        (y.requires_grad_() * 2).sum().backward()
        assert torch.equal(y.grad, torch.full_like(x, 2))
        y.grad = None
        touch(y)
        y.requires_grad_(False)
        if lets_go:
            del y


@pytest.mark.parametrize("lets_go", [False, True])
def test_a_result_that_a_weak_dictionary_knows_is_not_returned_again(
    lab: Lab, lets_go: bool
) -> None:
    graphed, known = cgraph.graphed(twice), weak.WeakTensorKeyDictionary()
    for _ in range(8):
        x = fresh(lab, 3)
        y = graphed(x)
        if y not in known:
            known[y] = y.sum().item()
        assert known[y] == (x * 2).sum().item()
        if lets_go:
            del y
