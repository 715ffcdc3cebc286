"""Tensors that a graphed function reads in place: static arguments, parameters and buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.hooks import RemovableHandle

import cgraph
from graphed_calls import states
from lab import Lab, fresh


def test_a_static_argument_by_keyword_and_by_place_is_the_same_one(lab: Lab) -> None:
    function = cgraph.graphed(lambda x, cache: x * cache, static_args=["cache"])
    cache = fresh(lab, 4)
    for _ in range(2):
        x = fresh(lab, 4)
        cache.normal_()
        assert_close(function(x, cache), x * cache)
        assert_close(function(x, cache=cache), x * cache)
    assert set(states(function)) == {"captured"}


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
    """Require two calls to return twice the module's result."""
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


def add_one(*arguments: Any) -> Tensor:
    return cast("Tensor", arguments[2] + 1)


def test_a_hook_that_another_thread_is_about_to_add_is_noticed(lab: Lab) -> None:
    module = nn.Linear(3, 3, device=lab.device)
    function = cgraph.graphed(lambda x: module(x) * 2)
    with torch.no_grad():
        function(fresh(lab, 2, 3))
        handle = RemovableHandle(module._forward_hooks)
        for _ in range(5):  # while its use is counted and not yet there
            function(fresh(lab, 2, 3))
        module._forward_hooks[handle.id] = add_one
        x = fresh(lab, 2, 3)
        assert_close(function(x), module(x) * 2)


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

    function = cgraph.graphed(step, static_args="cache")
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
