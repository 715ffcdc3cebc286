"""Other graphed callables than plain functions: methods, modules, partials and others."""

from __future__ import annotations

import copy
import functools
import gc
import threading
import warnings
import weakref

import pytest
import torch
from torch import Tensor, nn

import cgraph
from graphed_calls import near
from graphed_objects import Net, Scale, eager_net, keys
from lab import Lab, fresh
from networks import network


def test_the_method_of_an_object_is_always_the_same_one(lab: Lab) -> None:
    two = Scale(2)
    assert two.run is two.run
    assert two.run is not Scale(2).run


def test_a_bound_method_keeps_its_object_alive(lab: Lab) -> None:
    run = Scale(2).run
    gc.collect()
    for _ in range(2):
        x = fresh(lab, 4)
        assert torch.equal(run(x), x * 2)


def test_a_method_called_on_the_class_gets_the_object(lab: Lab) -> None:
    x = fresh(lab, 4)
    assert torch.equal(Scale.run(Scale(2), x), x * 2)
    assert torch.equal(Scale.run(Scale(3), x), x * 3)
    assert keys(Scale.run) == (0, 0)


def test_an_object_without_a_dictionary_is_refused_with_advice(lab: Lab) -> None:
    class Slots:
        __slots__ = ("by",)

        @cgraph.graphed
        def run(self, x: Tensor) -> Tensor:
            return x

    with pytest.raises(cgraph.errors.ArgumentError, match=r"Slots has no __dict__.*graph a func"):
        Slots().run(fresh(lab, 3))


def test_a_subclass_overrides_a_method_and_calls_that_of_its_base(lab: Lab) -> None:
    class Base:
        @cgraph.graphed
        def run(self, x: Tensor) -> Tensor:
            return x * 2

    class Plain(Base):
        def run(self, x: Tensor) -> Tensor:
            return super().run(x) + 1

    class Graphed(Base):
        @cgraph.graphed
        def run(self, x: Tensor) -> Tensor:
            return super().run(x) + 1

    for kind in (Plain, Graphed):
        one = kind()
        for _ in range(4):
            x = fresh(lab, 4)
            assert torch.equal(one.run(x), x * 2 + 1)


def test_one_function_under_two_names_is_found_under_both(lab: Lab) -> None:
    class Named:
        @cgraph.graphed
        def run(self, x: Tensor) -> Tensor:
            return x * 2

        alias = run

    one = Named()
    for _ in range(2):
        x = fresh(lab, 4)
        assert torch.equal(one.run(x), x * 2)
        assert torch.equal(one.alias(x), x * 2)
    assert one.run is one.run
    assert one.alias is one.alias


def test_hooks_of_a_module_run_at_each_call(lab: Lab) -> None:
    net = Net().to(lab.device)
    seen: list[str] = []
    net.register_forward_pre_hook(lambda *_: seen.append("before"))
    net.register_forward_hook(lambda *_: seen.append("after"))
    with torch.no_grad():
        for _ in range(3):
            x = fresh(lab, 4, 6)
            assert near(net(x), eager_net(net, x))
    assert seen == ["before", "after"] * 3


def test_the_state_of_a_module_has_no_trace_of_graphs(lab: Lab) -> None:
    net = Net().to(lab.device)
    before = list(net.state_dict())
    with torch.no_grad():
        net(fresh(lab, 4, 6))
    assert list(net.state_dict()) == before == ["layer.weight", "layer.bias"]
    assert [name for name, _ in net.named_modules()] == ["", "layer"]
    other = Net().to(lab.device)
    other.load_state_dict(net.state_dict())
    with torch.no_grad():
        x = fresh(lab, 4, 6)
        assert near(other(x), eager_net(net, x))


def test_loaded_state_is_read_by_the_next_call(lab: Lab) -> None:
    net, other = Net().to(lab.device), Net().to(lab.device)
    with torch.no_grad():
        net(fresh(lab, 4, 6))
        for assign in (False, True):
            state = {k: torch.randn_like(v) for k, v in other.state_dict().items()}
            net.load_state_dict(state, assign=assign)
            x = fresh(lab, 4, 6)
            assert near(net(x), eager_net(net, x))


def test_a_module_that_was_moved_to_another_type_is_captured_anew(lab: Lab) -> None:
    net = Net().to(lab.device)
    with torch.no_grad():
        net(fresh(lab, 4, 6))
        net.double()
        x = fresh(lab, 4, 6).double()
        assert near(net(x), eager_net(net, x))


def test_a_module_dies_with_its_graphs(lab: Lab) -> None:
    net = Net().to(lab.device)
    net(fresh(lab, 4, 6)).sum().backward()
    with torch.no_grad():
        net(fresh(lab, 4, 6))
    died = weakref.ref(net)
    del net
    gc.collect()
    assert died() is None


def test_a_graphed_module_has_the_attributes_of_the_module(lab: Lab) -> None:
    net = network(lab)
    graphed = cgraph.graphed(net)
    assert list(graphed.parameters()) == list(net.parameters())
    assert graphed.state_dict().keys() == net.state_dict().keys()
    assert graphed.training
    graphed.eval()
    assert not net.training
    with torch.no_grad():
        for _ in range(2):
            x = fresh(lab, 4, 6)
            assert near(graphed(x), net(x))
    with pytest.raises(AttributeError, match="missing"):
        _ = graphed.missing


def test_a_graphed_module_takes_keyword_arguments_by_its_forward(lab: Lab) -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, *, scale: Tensor, flip: bool = False) -> Tensor:
            return -x * scale if flip else x * scale

    graphed = cgraph.graphed(Two())
    for flip in (True, False, True):
        x, scale = fresh(lab, 4), fresh(lab, 4)
        expected = -x * scale if flip else x * scale
        assert torch.equal(graphed(x, scale=scale, flip=flip), expected)


def test_a_partial_is_graphed_with_what_it_holds(lab: Lab) -> None:
    weight = fresh(lab, 4)

    def function(weight: Tensor, x: Tensor, *, by: float) -> Tensor:
        return weight * x * by

    graphed = cgraph.graphed(functools.partial(function, weight, by=3.0))
    for _ in range(2):
        x = fresh(lab, 4)
        assert near(graphed(x), weight * x * 3)
    weight.mul_(2)
    assert near(graphed(x), weight * x * 3)


def test_an_object_that_can_be_called_is_graphed(lab: Lab) -> None:
    class Adder:
        def __init__(self) -> None:
            self.weight = fresh(lab, 4)

        def __call__(self, x: Tensor) -> Tensor:
            return x + self.weight

    adder = Adder()
    graphed = cgraph.graphed(adder)
    for _ in range(2):
        x = fresh(lab, 4)
        assert torch.equal(graphed(x), x + adder.weight)
    assert graphed.report().name
    assert "Adder" in repr(graphed)


def test_functions_of_torch_are_graphed(lab: Lab) -> None:
    for function in (torch.neg, torch.nn.functional.relu, Tensor.exp):
        graphed = cgraph.graphed(function)
        for _ in range(2):
            x = fresh(lab, 4)
            assert torch.equal(graphed(x), function(x))


def test_a_bound_method_is_graphed_with_its_object(lab: Lab) -> None:
    class Model:
        def __init__(self) -> None:
            self.net = network(lab)

        def encode(self, x: Tensor) -> Tensor:
            return self.net(x).exp()

    model = Model()
    graphed = cgraph.graphed(model.encode)
    with torch.no_grad():
        for _ in range(2):
            x = fresh(lab, 4, 6)
            assert near(graphed(x), model.encode(x))


def test_what_is_graphed_already_is_refused(lab: Lab) -> None:
    graphed = cgraph.graphed(torch.neg)
    with pytest.raises(cgraph.errors.ArgumentError, match="graphed already"):
        cgraph.graphed(graphed)


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(cgraph.errors.ArgumentError, match="fn is 3, expected a function"):
        cgraph.graphed(3)  # type: ignore[call-overload]


def test_another_function_can_be_assigned_to_one_object(lab: Lab) -> None:
    two, three = Scale(2), Scale(3)
    two.run(fresh(lab, 4))
    two.run = torch.neg
    for _ in range(2):
        x = fresh(lab, 4)
        assert torch.equal(two.run(x), -x)
        assert torch.equal(three.run(x), x * 3)
    del two.run
    assert torch.equal(two.run(x), x * 2)


def test_a_method_that_two_threads_find_first_is_graphed_once(lab: Lab) -> None:
    two, found = Scale(2), []
    ready = threading.Barrier(4)

    def look() -> None:
        ready.wait()
        found.append(two.run)

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(one) for one in found}) == 1


def test_methods_of_many_objects_leave_nothing_behind(lab: Lab) -> None:
    died = []
    for by in range(5):
        one = Scale(by)
        one.run(fresh(lab, 4))
        died.append(weakref.ref(one))
        del one
    gc.collect()
    assert [ref() for ref in died] == [None] * 5


def test_attributes_that_change_their_names_are_no_constants(lab: Lab) -> None:
    class Turning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = fresh(lab, 4)

        def forward(self, x: Tensor) -> Tensor:
            values = vars(self)
            if "first" in values:
                values["second"] = values.pop("first")
                return x + self.second
            values["first"] = values.pop("second")
            return x - self.first

    eager = Turning()
    graphed = cgraph.graphed(copy.deepcopy(eager))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(4):
            x = fresh(lab, 4)
            assert torch.equal(graphed(x), eager(x))
