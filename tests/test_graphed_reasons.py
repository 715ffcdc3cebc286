"""Why calls of a graphed function run eagerly that others of their key need not follow."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cgraph
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
