"""Copies, pickles and representations of graphed functions."""

from __future__ import annotations

import copy
import inspect
import io
import pickle

import pytest
import torch
from torch import Tensor

import cgraph
from graphed_calls import near
from graphed_objects import Net, Scale, eager_net
from lab import Lab, fresh
from networks import network


@pytest.mark.parametrize("was_called", [False, True])
def test_a_shallow_copy_of_an_object_is_independent(lab: Lab, was_called: bool) -> None:
    two = Scale(2)
    if was_called:
        two.run(fresh(lab, 4))
    other = copy.copy(two)
    other.by = 5
    x = fresh(lab, 4)
    assert torch.equal(other.run(x), x * 5)
    assert torch.equal(two.run(x), x * 2)


@pytest.mark.parametrize("was_called", [False, True])
def test_a_deep_copy_of_a_module_has_weights_of_its_own(lab: Lab, was_called: bool) -> None:
    net = Net().to(lab.device)
    with torch.no_grad():
        if was_called:
            net(fresh(lab, 4, 6))
        other = copy.deepcopy(net)
        other.layer.weight.mul_(2)
        for _ in range(2):
            x = fresh(lab, 4, 6)
            assert near(other(x), eager_net(other, x))
            assert near(net(x), eager_net(net, x))
            assert not near(net(x), eager_net(other, x))


def test_a_deep_copy_of_a_graphed_module_has_weights_of_its_own(lab: Lab) -> None:
    graphed = cgraph.graphed(network(lab))
    with torch.no_grad():
        graphed(fresh(lab, 4, 6))
        other = copy.deepcopy(graphed)
        for parameter in other.parameters():
            parameter.mul_(2)
        x = fresh(lab, 4, 6)
        assert near(other(x), other.__wrapped__(x))
        assert near(graphed(x), graphed.__wrapped__(x))
        assert not near(graphed(x), other(x))


def test_a_deep_copy_of_a_graphed_bound_method_has_an_object_of_its_own(lab: Lab) -> None:
    class Holder:
        def __init__(self) -> None:
            self.by = 2.0
            self.fast = cgraph.graphed(self.run)

        def run(self, x: Tensor) -> Tensor:
            return x * self.by

    holder = Holder()
    other = copy.deepcopy(holder)
    other.by = 5.0
    for _ in range(2):
        x = fresh(lab, 4)
        assert torch.equal(holder.fast(x), x * 2)
        assert torch.equal(other.fast(x), x * 5)


@pytest.mark.parametrize("was_called", [False, True])
def test_an_object_with_a_graphed_method_can_be_pickled(lab: Lab, was_called: bool) -> None:
    two = Scale(2)
    if was_called:
        two.run(fresh(lab, 4))
    other = pickle.loads(pickle.dumps(two))
    other.by = 5
    x = fresh(lab, 4)
    assert torch.equal(other.run(x), x * 5)
    assert torch.equal(two.run(x), x * 2)


@pytest.mark.parametrize("was_called", [False, True])
def test_a_module_with_a_graphed_forward_can_be_saved(lab: Lab, was_called: bool) -> None:
    net = Net().to(lab.device)
    if was_called:
        net(fresh(lab, 4, 6)).sum().backward()
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    other = torch.load(file, weights_only=False)
    with torch.no_grad():
        for _ in range(2):
            x = fresh(lab, 4, 6)
            assert near(other(x), eager_net(net, x))


@cgraph.graphed
def documented(x: Tensor, *, by: int = 2) -> Tensor:
    """Multiply."""
    return x * by


def test_a_graphed_function_of_a_module_is_pickled_by_its_name(lab: Lab) -> None:
    assert pickle.loads(pickle.dumps(documented)) is documented
    assert copy.deepcopy(documented) is documented
    assert copy.copy(documented) is documented


def test_a_graphed_function_looks_like_the_function() -> None:
    assert documented.__name__ == "documented"
    assert documented.__qualname__ == "documented"
    assert documented.__doc__ == "Multiply."
    assert documented.__module__ == __name__
    assert inspect.unwrap(documented) is documented.__wrapped__
    assert str(inspect.signature(documented)).startswith("(x: 'Tensor', *, by: 'int' = 2)")
    assert repr(documented).startswith("<graphed documented: ")
    assert callable(documented)


def test_a_graphed_method_looks_like_the_method() -> None:
    two = Scale(2)
    for method in (two.run, Scale.run):
        assert method.__name__ == "run"
        assert method.__doc__ == "Scale x."
    assert list(inspect.signature(two.run).parameters) == ["x", "more"]
    assert list(inspect.signature(Scale.run).parameters) == ["self", "x", "more"]
    assert "Scale.run" in repr(two.run)
    assert Net.forward.__doc__ == "Apply the layer."
