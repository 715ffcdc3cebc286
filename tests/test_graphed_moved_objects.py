"""Functions, or breaks in them, that give tensors of objects other memory."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import cgraph
from graphed_calls import quiet, states
from lab import Lab, fresh


class OfUsers(Tensor):
    """Another class of tensors."""


def of_space(
    way: str, own: Tensor, linear: nn.Linear
) -> tuple[types.SimpleNamespace, Callable[[Tensor], Tensor]]:
    """What a function has, and the function, which gives it other memory in each call."""
    space = types.SimpleNamespace(own=own.clone(), linear=copy.deepcopy(linear))
    space.of_users = own.clone().as_subclass(OfUsers)
    space.complexes = torch.complex(own, own + 1)

    def call(x: Tensor) -> Tensor:
        if way == "returned":
            space.own.data = space.own.data + x.sum(0)
            return space.own  # type: ignore[no-any-return]
        if way == "of a module":
            space.linear.weight.data = space.linear.weight.data + 1
            return space.linear(x)  # type: ignore[no-any-return]
        if way == "a conjugate":
            space.complexes.data = space.complexes.data.conj()
            return x + space.complexes.imag
        space.of_users.data = space.of_users.data + 1
        return (x + space.of_users).as_subclass(Tensor)

    return space, call


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("way", ["returned", "of a module", "a conjugate", "of a class"])
def test_what_an_object_has_gets_the_memory_that_eager_calls_give_it(
    lab: Lab, way: str, warmup: int
) -> None:
    begin = fresh(lab, 4), nn.Linear(4, 4).to(lab.device)
    (space, call), (expected, eager) = of_space(way, *begin), of_space(way, *begin)
    function = cgraph.graphed(call, warmup=warmup)
    with torch.no_grad(), quiet():
        for _ in range(4):
            x = fresh(lab, 2, 4)
            assert torch.equal(function(x), eager(x))
            assert torch.equal(space.own, expected.own)
            assert torch.equal(space.linear.weight, expected.linear.weight)
            assert torch.equal(space.complexes, expected.complexes)
            assert torch.equal(space.of_users, expected.of_users)
    assert states(function) == ["eager"]


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("way", ["cat", "resize_", "set_"])
def test_a_break_may_give_tensors_other_memory_that_the_graph_does_not_read(
    lab: Lab, way: str, warmup: int
) -> None:
    logs = [fresh(lab, 1, 4)]
    logs.append(logs[0].clone())

    def note(x: Tensor, log: Tensor) -> Tensor:
        if way == "cat":
            log.data = torch.cat([log.data, x[:1]])
        elif way == "resize_":
            log.resize_(log.shape[0] + 1, 4)
            log[-1].copy_(x[0])
        else:
            log.set_(log + x[:1])
        return x * 2

    own, expected = logs
    noted = cgraph.eager_break(lambda x: note(x, own))
    function = cgraph.graphed(lambda x: noted(x + 1) + 1, warmup=warmup)
    with torch.no_grad():
        for _ in range(4):
            x = fresh(lab, 2, 4)
            assert torch.equal(function(x), note(x + 1, expected) + 1)
            assert torch.equal(own, expected)
    assert states(function) == ["captured"]


def test_a_sparse_tensor_that_nobody_uses_forbids_no_capture(lab: Lab) -> None:
    eye = torch.eye(3, device=lab.device).to_sparse()
    space = types.SimpleNamespace(sparse=eye, dense=fresh(lab, 4))
    function = cgraph.graphed(lambda x: x + space.dense * space.sparse.dim())
    with torch.no_grad():
        x = fresh(lab, 2, 4)
        assert torch.equal(function(x), x + space.dense * 2)
    assert states(function) == ["captured"]
