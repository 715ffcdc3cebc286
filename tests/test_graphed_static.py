"""What a graphed function reads where it lies: static arguments, parameters and buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.testing import assert_close
from torch.utils.hooks import RemovableHandle

import cgraph
from cgraph import eager_break
from cgraph.errors import ArgumentError, CaptureError, CompareError
from graphed_calls import misses, states
from graphed_objects import Own
from lab import Lab, fresh


@pytest.mark.parametrize(
    "options",
    [{"static_argnums": 1}, {"static_argnums": (1,)}, {"static_argnames": "cache"}],
)
def test_a_static_argument_is_read_and_written_where_it_lies(
    lab: Lab, options: dict[str, Any]
) -> None:
    def append(x: Tensor, cache: Tensor) -> Tensor:
        cache.add_(x)
        return cache * 2

    function = cgraph.graphed(append, **options)
    cache = fresh(lab, 4)
    expected = cache.clone()
    for _ in range(4):
        x = fresh(lab, 4)
        assert_close(function(x, cache), append(x, expected))
        assert_close(cache, expected)
        cache.mul_(2)
        expected.mul_(2)
    with misses() as seen:
        assert_close(function(x, cache), append(x, expected))
    assert not seen
    assert function.report().keys[0].rerecorded == ()


def test_a_static_argument_by_keyword_and_by_place_is_the_same_one(lab: Lab) -> None:
    function = cgraph.graphed(lambda x, cache: x * cache, static_argnames=["cache"])
    cache = fresh(lab, 4)
    for _ in range(2):
        x = fresh(lab, 4)
        cache.normal_()
        assert_close(function(x, cache), x * cache)
        assert_close(function(x, cache=cache), x * cache)
    assert set(states(function)) == {"captured"}


def test_static_arguments_in_a_container_are_read_where_they_lie(lab: Lab) -> None:
    def attend(x: Tensor, caches: list[dict[str, Tensor]]) -> Tensor:
        for one in caches:
            one["k"].add_(x)
        return sum((one["k"] * one["v"] for one in caches), start=x)

    function = cgraph.graphed(attend, static_argnums=1)
    caches = [{"k": fresh(lab, 4), "v": fresh(lab, 4)} for _ in range(3)]
    others = copy.deepcopy(caches)
    for _ in range(4):
        x = fresh(lab, 4)
        assert_close(function(x, caches), attend(x, others))
        assert_close(caches, others)


def test_a_static_argument_that_moves_is_captured_anew(lab: Lab) -> None:
    function = cgraph.graphed(lambda x, cache: x * cache, static_argnums=1, max_recording=2)
    caches = [fresh(lab, 4) for _ in range(3)]
    for cache in caches:
        for _ in range(2):
            x = fresh(lab, 4)
            cache.normal_()
            assert_close(function(x, cache), x * cache)
    (key,) = function.report().keys
    assert key.state == "captured"
    (again,) = key.rerecorded
    assert (again.reason, again.argument, again.count) == ("moved", "cache", 2)
    assert "test_graphed_static" in str(again.where)


def test_a_static_argument_that_moves_too_often_runs_eagerly_with_one_warning(lab: Lab) -> None:
    function = cgraph.graphed(lambda x, cache: x * cache, static_argnums=1, max_recording=1)
    caches = [fresh(lab, 4) for _ in range(5)]
    with pytest.warns(UserWarning, match=r"moved too often: cache.*What to do: ") as caught:
        for cache in caches * 2:
            x = fresh(lab, 4)
            assert_close(function(x, cache), x * cache)
    assert len(caught) == 1
    (key,) = function.report().keys
    assert key.state == "eager"
    assert key.eager_calls == 8


def test_a_static_argument_that_is_returned_is_the_callers_and_no_held_result(lab: Lab) -> None:
    function = cgraph.graphed(lambda x, cache: (cache.add_(x), cache[1:]), static_argnums=1)
    cache = fresh(lab, 4)
    views = []
    for _ in range(4):
        x = fresh(lab, 4)
        expected = cache + x
        found = function(x, cache)
        views.append(found[1])
        assert_close(found, (expected, expected[1:]))
    assert_close(views[0], cache[1:])


def moved_data(module: nn.Linear) -> None:
    module.weight.data = torch.randn_like(module.weight)


def new_parameter(module: nn.Linear) -> None:
    module.weight = nn.Parameter(torch.randn_like(module.weight))


def assigned_state(module: nn.Linear) -> None:
    state = {name: torch.randn_like(one) for name, one in module.state_dict().items()}
    module.load_state_dict(state, assign=True)


def deleted_bias(module: nn.Linear) -> None:
    module.bias = None


def changed_in_place(module: nn.Linear) -> None:
    with torch.no_grad():
        module.weight.normal_()


def loaded_in_place(module: nn.Linear) -> None:
    state = {name: torch.randn_like(one) for name, one in module.state_dict().items()}
    module.load_state_dict(state)


def require_equal(lab: Lab, function: Callable[[Tensor], Tensor], module: nn.Module) -> None:
    """Two calls give twice what the module gives."""
    for _ in range(2):
        x = fresh(lab, 2, 3)
        assert_close(function(x), module(x) * 2)


@pytest.mark.parametrize(
    "change",
    [moved_data, new_parameter, assigned_state, deleted_bias, changed_in_place, loaded_in_place],
)
def test_a_change_of_a_modules_parameters_is_noticed(
    lab: Lab, change: Callable[[nn.Linear], None]
) -> None:
    module = nn.Linear(3, 3, device=lab.device)
    function = cgraph.graphed(lambda x: module(x) * 2)
    with torch.no_grad():
        for _ in range(3):
            require_equal(lab, function, module)
            if module.bias is not None or change is not assigned_state:
                change(module)
    rerecorded = function.report().keys[0].rerecorded
    assert bool(rerecorded) == (change not in (changed_in_place, loaded_in_place))


def test_a_change_of_parameters_of_a_derived_class_is_noticed(lab: Lab) -> None:
    module = nn.Linear(3, 3, device=lab.device)
    module.weight = nn.Parameter(fresh(lab, 3, 3).as_subclass(Own))
    assert type(module.weight) is not nn.Parameter
    function = cgraph.graphed(lambda x: module(x) * 2)
    with torch.no_grad():
        for change in (changed_in_place, moved_data, changed_in_place, moved_data):
            require_equal(lab, function, module)
            change(module)
    assert [one.reason for one in function.report().keys[0].rerecorded] == ["moved"]


def add_one(*arguments: Any) -> Tensor:
    return cast("Tensor", arguments[2] + 1)


HOOKS: dict[str, Callable[[nn.Module], RemovableHandle]] = {
    "forward": lambda module: module.register_forward_hook(add_one),
    "of a part": lambda module: next(module.children()).register_forward_hook(add_one),
    "before": lambda module: module.register_forward_pre_hook(lambda _, args: (args[0] + 1,)),
    "of all": lambda _: register_module_forward_hook(add_one),
}


def replaced_dictionary(module: nn.Module) -> None:
    module._forward_hooks = type(module._forward_hooks)()


def exchanged(module: nn.Module) -> None:
    for number in module._forward_hooks:
        module._forward_hooks[number] = lambda *arguments: arguments[2] - 3


@pytest.mark.parametrize("change", [replaced_dictionary, exchanged])
def test_hooks_that_are_stripped_or_exchanged_are_noticed(
    lab: Lab, change: Callable[[nn.Module], None]
) -> None:
    module = nn.Linear(3, 3, device=lab.device)
    module.register_forward_hook(add_one)
    function = cgraph.graphed(lambda x: module(x) * 2)
    with torch.no_grad():
        for _ in range(2):
            require_equal(lab, function, module)
            change(module)
        x = fresh(lab, 2, 3)
        assert_close(function(x), module(x) * 2)
        module.register_forward_hook(add_one)
        assert_close(function(x), module(x) * 2)
    assert function.report().keys[0].rerecorded[0].argument == "a hook of the module"


def test_a_hook_that_another_thread_is_about_to_add_is_noticed(lab: Lab) -> None:
    module = nn.Linear(3, 3, device=lab.device)
    function = cgraph.graphed(lambda x: module(x) * 2)
    with torch.no_grad():
        function(fresh(lab, 2, 3))
        handle = RemovableHandle(module._forward_hooks)
        for _ in range(5):  # while it is counted and not yet there
            function(fresh(lab, 2, 3))
        module._forward_hooks[handle.id] = add_one
        x = fresh(lab, 2, 3)
        assert_close(function(x), module(x) * 2)


def test_hooks_of_backward_passes_are_noticed(lab: Lab) -> None:
    module = nn.Sequential(nn.Linear(3, 3, device=lab.device), nn.Tanh())
    function = cgraph.graphed(lambda x: module(x) * 2)
    x = fresh(lab, 2, 3).requires_grad_()
    function(x)
    for add in (module[0].register_full_backward_hook, module[0].register_full_backward_pre_hook):
        handle = add(lambda *arguments: (arguments[1][0] * 3,))
        with pytest.warns(UserWarning, match="have hooks"):
            found = torch.autograd.grad(function(x).sum(), x)
        assert_close(found, torch.autograd.grad((module(x) * 2).sum(), x))
        handle.remove()
    assert_close(
        torch.autograd.grad(function(x).sum(), x), torch.autograd.grad((module(x) * 2).sum(), x)
    )


def test_captures_that_follow_modules_leave_other_functions_captured(lab: Lab) -> None:
    # So many numbers are of data, and are not noticed.
    module, by = nn.Linear(3, 3, device=lab.device), np.full(100, 2.0)
    inner = cgraph.graphed(lambda x: module(x) * 2)
    outer = cgraph.graphed(lambda x: eager_break(inner)(x) * float(by[0]), debug="compare")
    with torch.no_grad():
        outer(fresh(lab, 2, 3))
        for change in (3.0, 4.0, 5.0):
            by[0] = change
            with pytest.raises(CompareError):
                outer(fresh(lab, 2, 3))
        x = fresh(lab, 2, 3)
        assert_close(inner(x), module(x) * 2)
    assert states(inner) == ["captured"]
    assert inner.report().keys[0].rerecorded == ()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("ahead", [False, True])
def test_scripted_modules_run_eagerly_as_nobody_can_watch_them(lab: Lab, ahead: bool) -> None:
    module = torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.Dropout()).to(lab.device))
    function, x = cgraph.graphed(lambda x: module(x) * 2), fresh(lab, 4, 3)
    if ahead:
        with pytest.raises(CaptureError, match=r"TorchScript.*the module is of torch.jit"):
            function.capture(x, progress=False)
    with pytest.warns(UserWarning, match=r"TorchScript.*the module is of torch.jit"):
        function(x)
    assert "the module that was scripted" in str(function.report().keys[0].advice)
    module.eval()
    x = fresh(lab, 4, 3)
    assert_close(function(x), module(x) * 2)


@pytest.mark.filterwarnings("ignore:submodules of .* have hooks")
@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("grad", [False, True])
def test_hooks_that_are_added_to_modules_and_taken_away_are_noticed(
    lab: Lab, kind: str, grad: bool
) -> None:
    module = nn.Sequential(nn.Linear(3, 3, device=lab.device), nn.Tanh())
    function = cgraph.graphed(lambda x: module(x) * 2)
    hooks: list[RemovableHandle] = []

    def check() -> None:
        for _ in range(2):
            x = fresh(lab, 2, 3).requires_grad_(grad)
            found = function(x)
            assert_close(found, module(x) * 2)
            if grad:
                weight = fresh(lab, 2, 3)
                expected = torch.autograd.grad(module(x) * 2, x, weight)
                assert_close(torch.autograd.grad(found, x, weight), expected)

    try:
        with torch.set_grad_enabled(grad):
            check()
            for _ in range(2):
                hooks.append(HOOKS[kind](module))
                check()
            hooks.pop().remove()
            check()
    finally:
        for hook in hooks:
            hook.remove()
    key = function.report().keys[0]
    assert key.state == "captured"
    assert [(one.reason, one.count) for one in key.rerecorded] == [("moved", 3)]
    assert key.rerecorded[0].argument is not None
    assert key.rerecorded[0].argument.startswith("a hook of ")


@pytest.mark.filterwarnings("ignore:submodules of .* have hooks")
@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("grad", [False, True])
def test_hooks_that_the_function_adds_at_its_first_call_become_part_of_the_graph(
    lab: Lab, grad: bool, warmup: int
) -> None:
    module, hooks = nn.Sequential(nn.Linear(3, 3, device=lab.device)), []

    def lazily(x: Tensor) -> Tensor:
        y = cast("Tensor", module(x) * 2)
        if not hooks:
            hooks.append(module[0].register_forward_hook(add_one))
        return y

    function = cgraph.graphed(lazily, warmup=warmup, measure=warmup > 0)
    with torch.set_grad_enabled(grad):
        for rows in (2, 3, 2):
            if not hooks:
                function(fresh(lab, rows, 3))
            for _ in range(2):
                x = fresh(lab, rows, 3)
                assert_close(function(x), lazily(x))
    again = [key.rerecorded for key in function.report().keys]
    assert [len(one) for one in again] == [1 if warmup == 0 else 0, 0]


def test_a_hook_that_is_added_to_something_else_asks_for_no_capture(lab: Lab) -> None:
    module = nn.Linear(3, 3, device=lab.device)
    function = cgraph.graphed(lambda x: module(x) * 2)
    with torch.no_grad():
        function(fresh(lab, 2, 3))
        nn.Linear(3, 3).register_forward_hook(add_one)
        with misses() as seen:
            x = fresh(lab, 2, 3)
            assert_close(function(x), module(x) * 2)
    assert not seen


def test_parameters_that_are_put_back_by_equal_names_are_in_place(lab: Lab) -> None:
    module = nn.Linear(3, 3, device=lab.device)
    function = cgraph.graphed(lambda x: module(x) * 2)
    with torch.no_grad():
        function(fresh(lab, 2, 3))
        known = dict(module._parameters)
        module._parameters.clear()
        for name, parameter in known.items():
            module._parameters["".join(list(name))] = parameter
        with misses() as seen:
            x = fresh(lab, 2, 3)
            assert_close(function(x), module(x) * 2)
    assert not seen


def test_a_flag_that_is_set_to_a_number_counts_as_true_or_false(lab: Lab) -> None:
    module = nn.ReLU()
    function = cgraph.graphed(lambda x: module(x) * 2)
    function(fresh(lab, 2, 3))
    module.training = 1  # type: ignore[assignment]
    with misses() as seen:
        function(fresh(lab, 2, 3))
    module.training = 0  # type: ignore[assignment]
    assert not seen
    function(fresh(lab, 2, 3))
    assert states(function) == ["captured"] * 2


def test_a_buffer_that_is_assigned_is_noticed(lab: Lab) -> None:
    norm = nn.BatchNorm1d(3, device=lab.device).eval().requires_grad_(False)
    function = cgraph.graphed(lambda x: norm(x))
    for _ in range(3):
        x = fresh(lab, 4, 3)
        assert_close(function(x), norm(x))
        norm.running_mean = fresh(lab, 3)


def test_a_cache_whose_memory_is_shared_until_it_is_written_is_found_where_it_went(
    lab: Lab,
) -> None:
    def step(x: Tensor, cache: Tensor) -> Tensor:
        cache.add_(x)
        return cache * 2

    function = cgraph.graphed(step, static_argnames="cache")
    cache = fresh(lab, 6)
    for number in range(5):
        x, expected = fresh(lab, 6), cache.clone()
        right = step(x, expected)
        found = function(x, cache=cache)
        assert_close(found, right)
        assert_close(cache, expected)
        del found
        if number == 1:
            kept, before = torch._lazy_clone(cache), cache.clone()
    assert_close(kept, before)


@pytest.mark.parametrize("view", [Tensor.conj, torch._neg_view])  # type: ignore[attr-defined]
@pytest.mark.filterwarnings("ignore:.*runs eagerly")
def test_a_static_view_whose_bytes_are_not_its_values_is_read_as_it_is(lab: Lab, view: Any) -> None:
    graphed = cgraph.graphed(lambda x, by: x * by, static_argnames="by")
    by = fresh(lab, 3).to(torch.complex64) * (1 + 2j)
    for _ in range(2):
        for given in (by, view(by), by):
            x = fresh(lab, 3)
            assert_close(graphed(x, given), x * given)
    assert states(graphed) == ["captured", "eager"]
    assert "resolve_conj() or resolve_neg()" in str(graphed.report().keys[1].reason)


def test_static_views_that_begin_at_one_place_are_each_read_as_they_are_laid_out(lab: Lab) -> None:
    function = cgraph.graphed(lambda x, cache: x + cache, static_argnames="cache")
    cache = fresh(lab, 3, 8)
    views = [cache[:, ::2], cache[:, :4], cache[:, :1].expand(3, 4), cache.view(-1)[:12].view(3, 4)]
    for _ in range(2):
        for view in views:
            x = fresh(lab, 3, 4)
            assert torch.equal(function(x, view), x + view)
    assert states(function) == ["captured"] * 4
    assert len({key.key for key in function.report().keys}) == 4


def test_arguments_of_one_name_are_each_read_where_they_lie(lab: Lab) -> None:
    values = [torch.full((3,), 10.0**place, device=lab.device) for place in range(4)]
    parameters = nn.ParameterList(map(nn.Parameter, values)).requires_grad_(False)
    linear = nn.Linear(3, 3), nn.Linear(3, 3)

    def keyword(x: Tensor, *others: Tensor, w: Tensor) -> Tensor:
        return x + others[0] + w + 0 * parameters[0]

    def named(x: Tensor, caches: dict[Any, Tensor]) -> Tensor:
        return x + caches[linear[0]] + caches[linear[1]]

    graphed, other = cgraph.graphed(keyword), cgraph.graphed(named, static_argnums=1)
    for one, two in ((0, 1), (2, 1), (3, 1), (3, 2)):
        x = fresh(lab, 3)
        assert torch.equal(graphed(x, values[one], w=values[two]), x + values[one] + values[two])
        given = parameters[one], parameters[two]
        assert torch.equal(graphed(x, given[0], w=given[1]), x + values[one] + values[two])
        # Their texts are the same.
        caches = {linear[0]: values[one], linear[1]: values[two]}
        assert torch.equal(other(x, caches), x + values[one] + values[two])
    assert "others[0]: float32[3], w=float32[3]" in graphed.report().keys[0].key


def test_a_name_of_a_keyword_is_that_of_no_other_argument(lab: Lab) -> None:
    def run(x: Tensor, *others: Tensor, cache: Tensor) -> Tensor:
        return x + others[0] + cache

    cache = fresh(lab, 3)
    graphed = cgraph.graphed(run, static_argnames="cache", static_argnums=0)
    for _ in range(4):
        x, other = fresh(lab, 3), fresh(lab, 3)
        assert torch.equal(graphed(x, other, cache=cache), x + other + cache)
    with pytest.raises(ArgumentError, match=r"static_argnums is \(1,\), expected places of x,"):
        cgraph.graphed(lambda x, *, cache: x + cache, static_argnums=1)
