"""Resets, freezes and captures at odd moments, and what goes wrong while a graph goes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from cgraph._recording.recorded import Recorded
from cgraph.errors import CaptureError, StateError
from graphed_calls import resetting, states
from lab import Lab, SimLab, fresh


def tripled(x: Tensor) -> Tensor:
    return x * 3


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_calls_go_on_after_an_error_while_a_graph_goes(
    lab: Lab, error: type[BaseException]
) -> None:
    raised: list[object] = []

    def destroyed(*_: object) -> None:
        raised.append(error)
        raise error

    graphed = cgraph.graphed(tripled, max_graphs=1)

    def hooked(graph: cgraph.CUDAGraph) -> None:
        graph.register_destroy_callback(destroyed)

    hook = cgraph.register_graph_instantiate_hook(hooked)
    try:
        graphed(fresh(lab, 2))
    finally:
        hook.remove()
    # The graph goes for another one. What a callback raises comes out, unless Python drops it.
    with suppress(error):
        graphed(fresh(lab, 5))
    assert raised
    for _ in range(3):
        for size in (2, 5):
            x = fresh(lab, size)
            assert torch.equal(graphed(x), x * 3)
    graphed.reset()
    x = fresh(lab, 2)
    assert torch.equal(graphed(x), x * 3)


def test_a_reset_is_whole_although_a_callback_raises(lab: Lab) -> None:
    def destroyed(*_: object) -> None:
        raise KeyboardInterrupt

    graphed = cgraph.graphed(tripled)
    for size in (2, 3, 4):
        graphed(fresh(lab, size))
    graphed.freeze()
    key = next(iter(graphed._capturing.keys.values()))
    assert isinstance(key.recorded, Recorded)
    key.recorded.whole.register_destroy_callback(destroyed)
    del key
    with suppress(KeyboardInterrupt):
        graphed.reset()
    assert states(graphed) == [] and not graphed.entries_by_use and not graphed.is_frozen
    x = fresh(lab, 3)
    assert torch.equal(graphed(x), x * 3)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("when", [1, 3, 4])
def test_a_function_that_resets_itself_inside_its_capture_is_captured_by_the_next_call(
    lab: Lab, when: int, grad: bool
) -> None:
    graphed, calls = resetting(when)
    x = fresh(lab, 3).requires_grad_(grad)
    assert torch.equal(graphed(x), x * 3)
    assert states(graphed) == [] and not graphed.entries_by_use
    for _ in range(2):
        assert torch.equal(graphed(x), x * 3)
    assert states(graphed) == ["captured"] and len(graphed.entries_by_use) == 1
    graphed.reset()
    before = len(calls)
    assert torch.equal(graphed(x), x * 3) and len(calls) > before


def test_nothing_is_captured_ahead_inside_a_warm_up_call(lab: Lab) -> None:
    inner = cgraph.graphed(tripled)

    def outer(x: Tensor) -> Tensor:
        inner.capture(x, progress=False)
        return inner(x)

    x = fresh(lab, 3)
    with pytest.warns(UserWarning, match="or a call that prepares one"):
        assert torch.equal(cgraph.graphed(outer)(x), x * 3)
    with pytest.raises(CaptureError, match="or a call that prepares one"):
        cgraph.graphed(outer).capture(x, progress=False)


def call_by_place(function: Any, x: Tensor) -> Tensor:
    return function(x, "b")  # type: ignore[no-any-return]


def call_by_name(function: Any, x: Tensor) -> Tensor:
    return function(x=x, tag="b")  # type: ignore[no-any-return]


@pytest.mark.parametrize("call", [call_by_place, call_by_name])
def test_a_frozen_function_says_that_it_knows_the_arguments_given_otherwise(
    lab: Lab, call: Callable[[Any, Tensor], Tensor]
) -> None:
    def tagged(x: Tensor, tag: str = "a") -> Tensor:
        return x * len(tag)

    graphed = cgraph.graphed(tagged)
    x = fresh(lab, 3)
    graphed.capture(x, tag="b", progress=False).freeze()
    assert torch.equal(graphed(x, tag="b"), x)
    with pytest.raises(StateError, match="the same arguments given in another way"):
        call(graphed, x)
    for other in ((x, "c"), (fresh(lab, 2), "b")):
        with pytest.raises(StateError, match=r"\): capture it before freeze"):
            graphed(*other)


@pytest.mark.parametrize("kind", ["plain", "padded", "module", "gradients", "break"])
def test_a_function_that_is_let_go_gives_its_memory_back_at_once(lab: Lab, kind: str) -> None:
    module = nn.Linear(3, 3).to(lab.device)
    makers: dict[str, Callable[[], Any]] = {
        "plain": lambda: cgraph.graphed(lambda x: x * 2),
        "padded": lambda: cgraph.graphed(lambda x: x * 2, sizes=[2, 4]),
        "module": lambda: cgraph.graphed(module),
        "gradients": lambda: cgraph.graphed(module),
        "break": lambda: cgraph.graphed(lambda x: cgraph.eager_break(torch.sin)(x * 2) + 1),
    }

    def held() -> int:
        if isinstance(lab, SimLab):
            return lab.simulator.live()["execs"]
        return torch.cuda.memory_allocated()

    def use() -> int:
        graphed = makers[kind]()
        for rows in (3, 3, 2):
            result = graphed(fresh(lab, rows, 3))
            if kind == "gradients":
                result.sum().backward()
                module.zero_grad()
            del result
        lab.sync()
        return held()

    with torch.set_grad_enabled(kind == "gradients"):
        use()  # what is loaded once
        gc.collect()
        gc.disable()
        try:
            before = held()
            assert use() > before
            lab.sync()
            assert held() == before
        finally:
            gc.enable()
