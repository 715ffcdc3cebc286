"""Why calls of a graphed function run eagerly that others of their key need not follow."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cgraph
from cgraph.errors import CaptureError
from cgraph.functions import GraphedFunction
from graphed_calls import agree, near
from lab import Lab, fresh


def reasons(function: GraphedFunction) -> list[tuple[str, int, str | None]]:
    """State, eager calls and reason of each key."""
    return [(one.state, one.eager_calls, one.reason) for one in function.report().keys]


def test_calls_whose_arguments_share_what_is_written_say_so(lab: Lab) -> None:
    def shifted(x: Tensor, y: Tensor) -> Tensor:
        x[:, 1:].mul_(2)
        return x + y[:2]

    function = cgraph.graphed(shifted)
    with torch.no_grad():
        agree(function, shifted, fresh(lab, 2, 4), fresh(lab, 4, 4))
        assert reasons(function) == [("captured", 0, None)]
        y = fresh(lab, 4, 4)
        expected = y.clone()
        wanted = shifted(expected[1:3], expected)
        assert torch.equal(function(y[1:3], y), wanted)
        assert torch.equal(y, expected)
    [(state, calls, reason)] = reasons(function)
    assert (state, calls) == ("captured", 1)
    assert reason is not None and "shares memory with another one" in reason
    assert "why some calls ran eagerly: an argument" in str(function.report())


def test_a_call_for_which_no_graph_is_free_says_so(lab: Lab) -> None:
    function = cgraph.graphed(lambda x: (x * 2).sin(), max_open=1)
    xs = [fresh(lab, 3).requires_grad_() for _ in range(2)]
    with pytest.warns(UserWarning, match="max_open"):
        results = [function(x) for x in xs]
    for result in results:
        result.sum().backward()
    [(state, calls, reason)] = reasons(function)
    assert (state, calls) == ("captured", 1)
    assert reason is not None and "give max_open= a larger number" in reason


def test_a_call_inside_of_a_checkpoint_says_how_it_is_captured(lab: Lab) -> None:
    function, x = cgraph.graphed(lambda x: (x * 2).sin()), fresh(lab, 3).requires_grad_()
    with pytest.warns(UserWarning, match="hooks see what autograd saves"):
        checkpoint(function, x, use_reentrant=False)
    (key,) = function.report().keys
    assert key.state == "eager"
    assert key.reason is not None and key.reason.startswith("hooks see what autograd saves")
    assert key.advice is not None and ".capture()" in key.advice


def test_a_key_that_is_captured_after_all_has_no_reason_any_more(lab: Lab) -> None:
    function, x = cgraph.graphed(lambda x: (x * 2).sin()), fresh(lab, 3).requires_grad_()
    with pytest.warns(UserWarning, match="hooks see what autograd saves"):
        checkpoint(function, x, use_reentrant=False)
    function(x).sum().backward()
    assert reasons(function) == [("captured", 1, None)]


def test_a_function_that_cannot_be_captured_is_not_tried_with_each_new_number(lab: Lab) -> None:
    net, logged, tries = nn.Linear(4, 2).to(lab.device), dict[str, Tensor](), 0

    def step(x: Tensor, number: int) -> Tensor:
        nonlocal tries
        tries += 1
        loss = net(x).square().mean() * number
        logged["loss"] = loss.detach()
        return loss

    graphed = cgraph.graphed(step)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(12):
            graphed(fresh(lab, 3, 4), number)
        before = tries
        for number in range(12, 40):
            x = fresh(lab, 3, 4)
            loss = graphed(x, number)
            assert near(loss, net(x).square().mean() * number)
            assert logged["loss"] is not loss
            assert near(logged["loss"], loss)
    # Once a call, without warm-ups and captures.
    assert tries == before + 28
    reason = graphed.report().keys[-1].reason
    assert reason is not None
    assert "none could be captured: the function changes tries" in reason


def test_sizes_that_come_once_each_are_to_be_captured_ahead(lab: Lab) -> None:
    function = cgraph.graphed(lambda x: x * 2, sizes=range(1, 17))
    with pytest.warns(UserWarning, match=r"too many keys.*capture all sizes ahead.*\.capture"):
        for rows in range(1, 17):
            function(fresh(lab, rows, 3))
    assert function.report().captured == 8
    function.reset()
    function.capture(fresh(lab, 16, 3), progress=False)
    for rows in range(1, 17):
        agree(function, lambda x: x * 2, fresh(lab, rows, 3))
    assert function.report().captured == 16


@pytest.mark.parametrize("on_fail", ["eager", "raise"])
def test_what_three_calls_do_anew_is_a_failure_in_the_fourth(lab: Lab, on_fail: Any) -> None:
    function = cgraph.graphed(lambda x: x * random.random(), on_fail=on_fail)
    for _ in range(3):
        function(fresh(lab, 3))
        (key,) = function.report().keys
        assert (key.reason or "").startswith("until its next call: the function draws")
        assert "do what the reason says" in (key.advice or "")
    fails = pytest.raises(CaptureError) if on_fail == "raise" else pytest.warns(UserWarning)
    with fails as caught:
        function(fresh(lab, 3))
    said = str(getattr(caught, "value", None) or caught[0].message)
    assert "or pass them as an argument; so it was in 4 calls, anew each time" in said
    (key,) = function.report().keys
    assert (key.reason or "").startswith("raised in the capture: CaptureError: the function draws")
    assert "do what the reason says" in (key.advice or "")


def read(x: Tensor) -> Tensor:
    return x * float(x.sum()) if x.shape[0] == 2 else x * 2


def is_explained(function: GraphedFunction) -> bool:
    """Whether the report of the last key has the line of :func:`read`, and what to do."""
    key, line = function.report().keys[-1], read.__code__.co_firstlineno + 1
    said = key.reason, key.where, key.advice
    assert all(one is not None for one in said), said
    is_there = key.where is not None and key.where.endswith(f"test_graphed_reasons.py:{line}")
    return is_there and "raised in the capture" in str(key.reason) and "eager_break" in str(said)


def test_a_key_whose_capture_ahead_failed_says_why_until_it_is_captured(lab: Lab) -> None:
    does_read = True
    function = cgraph.graphed(lambda x: read(x) if does_read else x * 2)
    with pytest.raises(Exception, match=r".") as caught:
        function.capture(fresh(lab, 2, 3))
    assert "was being captured for the key (x: float32[2, 3]" in str(caught.value.__notes__)
    assert is_explained(function)
    caught.value.__traceback__ = None
    does_read = False
    agree(function, lambda x: x * 2, fresh(lab, 2, 3))
    assert reasons(function) == [("captured", 0, None)]


def test_a_key_whose_call_has_raised_says_why(lab: Lab) -> None:
    function = cgraph.graphed(read, on_fail="raise")
    for _ in range(2):
        with pytest.raises(Exception, match=r".") as caught:
            function(fresh(lab, 2, 3))
        assert is_explained(function)
        caught.value.__traceback__ = None


@pytest.mark.parametrize("alone", [False, True])
def test_captures_of_many_sizes_name_the_key_that_failed(lab: Lab, alone: bool) -> None:
    options = {"warmup": 0, "preserve_state": False} if alone else {}
    function = cgraph.graphed(read, sizes=[1, 2, 4], **options)
    with torch.no_grad(), pytest.raises(Exception, match=r".") as caught:
        function.capture(fresh(lab, 4, 3), progress=False)
    assert "was being captured for the key (x: float32[2, 3]" in str(caught.value.__notes__)
    assert [key.state for key in function.report().keys] == ["captured", "eager"]
    assert is_explained(function)


def test_a_key_that_is_better_not_captured_says_why_where_that_was_asked_for(lab: Lab) -> None:
    function = cgraph.graphed(lambda x, rows: x * 2)
    with pytest.raises(CaptureError, match="an iterator"):
        function.capture(fresh(lab, 3), iter([1]))
    (key,) = function.report().keys
    assert key.reason is not None and key.reason.startswith("an iterator")
    assert key.advice == "pass a list or a tuple"
