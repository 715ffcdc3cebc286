"""Failing and refused calls: the error that comes out, its text, and the next call, which works."""

from __future__ import annotations

import argparse
import warnings
from collections import OrderedDict, deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import cgraph
from cgraph.errors import ArgumentError, StateError
from graphed_calls import numbers
from lab import Lab, fresh


@pytest.mark.parametrize("fn", [3, "f", [fresh]])
def test_what_cannot_be_called_cannot_be_graphed(fn: Any) -> None:
    with pytest.raises(ArgumentError, match="expected a function"):
        cgraph.graphed(fn)
    with pytest.raises(ArgumentError, match="expected a function"):
        cgraph.graphed()(fn)


def test_a_graphed_function_is_not_graphed_again(lab: Lab) -> None:
    function = cgraph.graphed(torch.sin)
    with pytest.raises(ArgumentError, match="graphed already"):
        cgraph.graphed(function)


def test_an_option_that_does_not_exist_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="size"):
        cgraph.graphed(torch.sin, size=[1])


def test_a_call_inside_a_capture_becomes_part_of_it(lab: Lab) -> None:
    function = cgraph.graphed(lambda x: x * 3)
    x = fresh(lab, 4)
    for is_known in (False, True):
        graph = cgraph.CUDAGraph()
        with cgraph.graph(graph):
            y = function(x) + 1
        x.normal_()
        graph.replay()
        assert_close(y, x * 3 + 1)
        if not is_known:
            function(x)
    replays = function.report().replays
    graph.replay()
    assert function.report().replays == replays


def test_a_graphed_function_that_is_known_stays_quiet_in_anothers_warm_up(lab: Lab) -> None:
    inner = cgraph.graphed(lambda x: x.sin())
    inner(fresh(lab, 4))
    outer = cgraph.graphed(lambda x: inner(x) + inner(x * 2), on_fail="raise")
    for _ in range(2):
        x = fresh(lab, 4)
        assert_close(outer(x), x.sin() + (x * 2).sin())


def test_graphs_before_a_failed_capture_of_a_ladder_serve_calls(lab: Lab) -> None:
    def picky(x: Tensor) -> Tensor:
        if x.shape[0] == 2:
            raise ValueError("two are not enough")
        return x * 2

    graphed = cgraph.graphed(picky, sizes=[1, 2, 4, 8])
    with pytest.raises(ValueError, match="two are not enough"):
        graphed.capture(fresh(lab, 8, 2))
    graphed.freeze()
    for rows in (8, 4):
        x = fresh(lab, rows, 2)
        assert torch.equal(graphed(x), x * 2)


@pytest.mark.parametrize("is_explicit", [True, False])
@pytest.mark.parametrize("options", [{}, {"on_fail": "raise"}, {}, {"sizes": [4]}])
def test_what_a_function_raises_comes_out_with_what_it_came_from(
    lab: Lab, options: dict[str, Any], is_explicit: bool
) -> None:
    def load(x: Tensor) -> Tensor:
        try:
            raise KeyError("missing weight")
        except KeyError as error:
            if is_explicit:
                raise ValueError("cannot load") from error
            raise ValueError("cannot load")  # noqa: B904

    function = cgraph.graphed(load, **options)
    with pytest.raises(ValueError, match="cannot load") as caught:
        function(fresh(lab, 3))
    assert isinstance(caught.value.__context__, KeyError)
    assert isinstance(caught.value.__cause__, KeyError if is_explicit else type(None))
    assert caught.value.__suppress_context__ == is_explicit


def texts(graphed: cgraph.functions.GraphedFunction) -> list[str]:
    return [key.key for key in graphed.report().keys]


def test_a_container_of_another_kind_is_named_and_its_items_as_in_others(lab: Lab) -> None:
    class Pair:
        def __init__(self, *parts: Any) -> None:
            self.parts = parts

    torch.utils._pytree.register_pytree_node(
        Pair, lambda pair: ([*pair.parts], None), lambda parts, _: Pair(*parts)
    )
    graphed = cgraph.graphed(lambda d: torch.utils._pytree.tree_leaves(d)[0] * 2)
    x, size = fresh(lab, 3), torch.Size([2])
    with torch.no_grad():
        for one in ({"a": x}, OrderedDict(a=x), OrderedDict(a=[x, size]), Pair(x), deque([x])):
            assert torch.equal(graphed(one), x * 2)
    assert texts(graphed) == [
        "d['a']: float32[3]",
        "d: OrderedDict, d['a']: float32[3]",
        "d: OrderedDict, d['a'][0]: float32[3], d['a'][1]=torch.Size([2])",
        f"d: {Pair.__qualname__}, d.0: float32[3]",
        "d: deque, d[0]: float32[3]",
    ]


def test_a_long_constant_is_shown_as_far_as_it_goes(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda x, name: x + len(name))
    with torch.no_grad():
        graphed(fresh(lab, 2), "a" * 60)
    assert texts(graphed) == ["x: float32[2], name='" + "a" * 39 + "…"]


def test_a_function_that_closes_over_no_tensor_is_returned_as_ever(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda x: (x * 2, len, lambda: 3))
    for _ in range(3):
        x = fresh(lab, 3)
        double, length, three = graphed(x)
        assert_close(double, x * 2)
        assert length is len
        assert three() == 3
    assert numbers(graphed)[0] == 1


def test_a_result_with_gradients_that_the_function_records_itself_has_them(lab: Lab) -> None:
    weight = fresh(lab, 3).requires_grad_()

    def function(x: Tensor) -> Tensor:
        with torch.enable_grad():
            return x * weight

    graphed = cgraph.graphed(function)
    with torch.no_grad(), pytest.warns(UserWarning, match="the result requires a gradient"):
        for _ in range(3):
            x = fresh(lab, 3)
            result = graphed(x)
            assert result.requires_grad
            (given,) = torch.autograd.grad(result, weight, torch.ones_like(result))
            assert_close(given, x)


def test_a_parameter_that_is_returned_without_gradients_is_no_reason_to_run_eagerly(
    lab: Lab,
) -> None:
    module = nn.Linear(3, 3).to(lab.device)
    graphed = cgraph.graphed(lambda x: (module(x), module.weight))
    with torch.no_grad():
        for _ in range(3):
            x = fresh(lab, 2, 3)
            assert_close(graphed(x)[0], module(x))
    assert numbers(graphed)[0] == 1


def test_a_frozen_function_runs_calls_eagerly_that_no_capture_serves(lab: Lab) -> None:
    weight = fresh(lab, 3, 3)
    sized = cgraph.graphed(lambda x, w: x @ w, sizes=[2, 4])
    sized.capture(fresh(lab, 1, 3), weight, progress=False).freeze()
    plain = cgraph.graphed(lambda x: x * 2).freeze()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            assert sized(fresh(lab, 0, 3), weight).shape == (0, 3)
            assert plain(fresh(lab, 0, 3)).shape == (0, 3)
            assert plain(torch.ones(2, device="meta")).device.type == "meta"
    x = fresh(lab, 3, 3)
    assert_close(sized(x, weight), x @ weight)
    with pytest.raises(StateError, match=r"frozen.*x: float32\[2, 3\]"):
        plain(fresh(lab, 2, 3))


def test_numbers_of_a_namespace_are_compared_in_each_call(lab: Lab) -> None:
    options = argparse.Namespace(scale=2, shift=1)
    graphed = cgraph.graphed(lambda x, given: x * given.scale + given.shift)
    for scale in (2, 2, 3, 3, 2):
        options.scale = scale
        x = fresh(lab, 3)
        assert_close(graphed(x, options), x * scale + 1)
    assert numbers(graphed)[0] == 2


def test_progress_is_shown_wherever_it_was_asked_for(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    graphed = cgraph.graphed(lambda x: x * 2, sizes=[2, 4])
    graphed.capture(fresh(lab, 4, 3))
    assert "graph" in capsys.readouterr().err
    other = cgraph.graphed(lambda x: x * 2, sizes=[2, 4])
    other.capture(fresh(lab, 4, 3), progress=False)
    assert capsys.readouterr().err == ""


def test_what_a_size_raises_in_its_warmup_is_told_with_the_size(lab: Lab) -> None:
    def function(x: Tensor) -> Tensor:
        if x.shape[0] == 2:
            raise ValueError("two")
        return x * 2

    graphed = cgraph.graphed(function, sizes=[1, 2, 4])
    with pytest.raises(ValueError, match="two") as caught:
        graphed.capture(fresh(lab, 4, 3), progress=False)
    assert any("float32[2, 3]" in note for note in caught.value.__notes__)


def test_flags_that_are_set_on_a_graphed_module_are_those_of_the_module(lab: Lab) -> None:
    module = nn.BatchNorm1d(3).to(lab.device)
    graphed = cgraph.graphed(module)
    graphed.training = False
    assert not module.training
    with torch.no_grad():
        x = fresh(lab, 5, 3)
        assert_close(graphed(x), x / (1 + module.eps) ** 0.5)
    graphed.note = 3
    assert graphed.note == 3
    assert not hasattr(module, "note")


def test_calls_that_no_replay_could_answer_count_as_eager(lab: Lab) -> None:
    held, calls = fresh(lab, 4), []

    def function(x: Tensor) -> Tensor:
        calls.append(1)
        x.add_(1)
        return held * 2

    graphed = cgraph.graphed(function)
    graphed(fresh(lab, 2))
    before, (key,) = len(calls), graphed.report().keys
    for _ in range(3):
        graphed(held[:2])
    assert len(calls) == before + 3
    (after,) = graphed.report().keys
    counts = key.replays + key.eager_calls, after.replays + after.eager_calls
    assert (after.replays, counts[1]) == (key.replays, counts[0] + 3)
