"""What goes wrong in a graphed function: whose error comes out, and that the next call works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import cgraph
from cgraph.errors import ArgumentError
from graphed_calls import agree, misses, quiet, states
from lab import Lab, captured, fresh


class Mistake(Exception):
    """The function's own."""


def check_that_all_works(lab: Lab, before: Any) -> None:
    assert lab.current() == before
    assert not cgraph.is_current_stream_capturing()
    x = fresh(lab, 16)
    graph, y = captured(lab, x)
    x.normal_()
    graph.replay()
    assert_close(y, x * 2 + 1)


@pytest.mark.parametrize("on_fail", ["eager", "raise"])
def test_what_the_function_raises_comes_out_and_the_next_call_works(lab: Lab, on_fail: Any) -> None:
    is_wrong = True

    def checked(x: Tensor) -> Tensor:
        y = x * 2
        if is_wrong:
            raise Mistake("the function's own")
        return y

    function, before = cgraph.graphed(checked, on_fail=on_fail), lab.current()
    for _ in range(2):
        with pytest.raises(Mistake, match="the function's own") as caught:
            function(fresh(lab, 4))
        check_that_all_works(lab, before)
    assert ("checked" in str(getattr(caught.value, "__notes__", ""))) == (on_fail == "raise")
    caught.value.__traceback__ = None
    is_wrong = False
    for _ in range(2):
        agree(function, checked, fresh(lab, 4))
    assert states(function) == ["captured"]


@pytest.mark.parametrize("fail", [range(1, 10), [3]])
def test_a_failed_warm_up_leaves_no_trace_but_that_of_the_eager_call(lab: Lab, fail: Any) -> None:
    counter = torch.zeros((), device=lab.device)
    calls: list[None] = []

    def count(x: Tensor) -> Tensor:
        counter.add_(1)
        torch.rand(3, device=lab.device)
        calls.append(None)
        if len(calls) in fail:
            raise Mistake
        return x + counter

    function = cgraph.graphed(count, on_fail="raise")
    x = fresh(lab, 4)
    given = x.clone()
    with pytest.raises(Mistake):
        function(x)
    assert counter.item() == 0
    assert_close(x, given)


def failing(number: int) -> tuple[Callable[[Tensor], Tensor], list[int]]:
    """A function whose n-th call fails, and the calls so far."""
    calls: list[int] = []

    def counted(x: Tensor) -> Tensor:
        calls.append(1)
        y = x * 3
        if len(calls) == number:
            raise Mistake(f"call {number}")
        return y

    return counted, calls


@pytest.mark.parametrize("number", [1, 2, 3])
def test_what_a_function_raises_in_warm_up_comes_out_and_the_next_call_captures(
    lab: Lab, number: int
) -> None:
    counted, _ = failing(number)
    function, before = cgraph.graphed(counted), lab.current()
    x = fresh(lab, 4)
    with pytest.raises(Mistake, match=f"call {number}") as caught:
        function(x)
    caught.value.__traceback__ = None
    check_that_all_works(lab, before)
    for _ in range(2):
        x = fresh(lab, 4)
        assert_close(function(x), x * 3)
    assert states(function) == ["captured"]


@pytest.mark.parametrize("number", [4])
def test_a_function_that_fails_once_in_a_capture_is_answered_eagerly(lab: Lab, number: int) -> None:
    counted, calls = failing(number)
    function, before = cgraph.graphed(counted), lab.current()
    x = fresh(lab, 4)
    with pytest.warns(UserWarning, match=f"Mistake: call {number}") as caught:
        assert_close(function(x), x * 3)
    assert len(caught) == 1
    assert "test_graphed_failures.py:" in str(caught[0].message)
    check_that_all_works(lab, before)
    for _ in range(2):
        x = fresh(lab, 4)
        assert_close(function(x), x * 3)
    made = len(calls)
    assert_close(function(x[:2]), x[:2] * 3)
    assert len(calls) > made


@pytest.mark.parametrize("number", [1, 4])
def test_with_raise_the_error_names_the_key_and_the_next_call_captures(
    lab: Lab, number: int
) -> None:
    counted, _ = failing(number)
    function = cgraph.graphed(counted, on_fail="raise")
    x = fresh(lab, 4)
    with pytest.raises(Mistake) as caught:
        function(x)
    assert any("x: float32[4]" in note for note in caught.value.__notes__)
    caught.value.__traceback__ = None
    for _ in range(2):
        assert_close(function(x), x * 3)
    assert states(function) == ["captured"]


def syncs(x: Tensor) -> Tensor:
    return x * x.sum().item()


def needs_a_shape(x: Tensor) -> Tensor:
    return x.nonzero()


@pytest.mark.parametrize("body", [syncs, needs_a_shape])
def test_a_body_that_cannot_be_captured_runs_eagerly_with_one_warning(
    lab: Lab, body: Callable[[Tensor], Tensor]
) -> None:
    function = cgraph.graphed(body)
    line = body.__code__.co_firstlineno + 1
    x = fresh(lab, 4)
    with pytest.warns(UserWarning, match=r"runs eagerly .*What to do: ") as caught:
        assert_close(function(x), body(x))
    assert len(caught) == 1
    assert f"test_graphed_failures.py:{line}" in str(caught[0].message)
    assert caught[0].filename == __file__
    with misses() as seen:
        for _ in range(3):
            agree(function, body, fresh(lab, 4))
    assert not seen
    (key,) = function.report().keys
    assert (key.state, key.eager_calls, key.replays) == ("eager", 4, 0)
    assert key.advice is not None
    assert str(line) in str(key.where)


@pytest.mark.parametrize("body", [syncs, needs_a_shape])
def test_a_body_that_cannot_be_captured_raises_if_told_to(
    lab: Lab, body: Callable[[Tensor], Tensor]
) -> None:
    function, before = cgraph.graphed(body, on_fail="raise"), lab.current()
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            function(fresh(lab, 4))
        assert any(f"{body.__name__} was being captured" in n for n in caught.value.__notes__)
        assert any("x: float32[4]" in note for note in caught.value.__notes__)
        check_that_all_works(lab, before)


def test_one_key_that_fails_leaves_the_others_alone(lab: Lab) -> None:
    def sometimes(x: Tensor, sync: bool) -> Tensor:
        return x * (x.sum().item() if sync else 2)

    function = cgraph.graphed(sometimes)
    agree(function, sometimes, fresh(lab, 4), False)
    with pytest.warns(UserWarning, match="runs eagerly"):
        agree(function, sometimes, fresh(lab, 4), True)
    for _ in range(2):
        for sync in (True, False):
            agree(function, sometimes, fresh(lab, 4), sync)
    assert states(function) == ["captured", "eager"]


def test_a_tensor_of_a_wrong_device_runs_eagerly_with_its_name(lab: Lab) -> None:
    function = cgraph.graphed(lambda x, other: (x * 2, other.shape[0]))
    strange = torch.empty(3, device="meta")
    with pytest.warns(UserWarning, match=r"CPU tensor: other|other is on meta") as caught:
        found = function(x := fresh(lab, 4), strange)
    assert len(caught) == 1
    assert_close(found, (x * 2, 3))
    assert_close(function(x, strange), (x * 2, 3))


def test_sparse_tensors_run_eagerly_with_one_warning(lab: Lab) -> None:
    def product(x: Tensor, y: Tensor) -> Tensor:
        return x @ y

    function = cgraph.graphed(product)
    sparse = (fresh(lab, 3, 3) > 0).float().to_sparse()
    with pytest.warns(UserWarning, match="no memory of its own: x") as caught:
        for _ in range(3):
            y = fresh(lab, 3, 3)
            assert_close(function(sparse, y), sparse @ y)
    assert len(caught) == 1


def test_new_shapes_at_each_call_end_in_one_warning_and_old_keys_replay(lab: Lab) -> None:
    def twice(x: Tensor) -> Tensor:
        return x * 2

    function = cgraph.graphed(twice)
    with quiet() as caught:
        for size in range(1, 40):
            agree(function, twice, fresh(lab, size))
    (text,) = [str(one.message) for one in caught]
    assert "too many keys" in text
    assert "sizes=" in text
    count = states(function).count("captured")
    assert count < 20
    with misses() as seen:
        for size in range(1, count + 1):
            agree(function, twice, fresh(lab, size))
    assert not seen


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"outputs": "static "}, r"outputs is 'static ', expected 'static' or 'clone'"),
    ({"outputs": None}, r"outputs is None, expected 'static' or 'clone'"),
    ({"on_held": "warning"}, r"on_held is 'warning', expected 'warn' or 'clone' or"),
    ({"check_padding": "no"}, "check_padding is 'no', expected True or False"),
    ({"pool": ("a", "b")}, r"pool is \('a', 'b'\), expected a cgraph.MemPool"),
    ({"dim": {}}, "dim is empty, expected the name of an argument that has rows"),
    ({"on_fail": False}, r"on_fail is False, expected 'eager' or 'raise'"),
    ({"max_graphs": 0}, r"max_graphs is 0, expected a number, at least 1"),
    ({"max_graphs": 2.5}, r"max_graphs is 2.5, expected"),
    ({"max_graphs": True}, r"max_graphs is True, expected"),
    ({"max_graphs": "64"}, r"max_graphs is .64., expected"),
    ({"max_bytes": 0}, r"max_bytes is 0, expected"),
    ({"max_bytes": "1 GB"}, r"max_bytes is '1 GB', expected"),
    ({"max_recording": -1}, r"max_recording is -1, expected a number, at least 0"),
    ({"warmup": -1}, r"warmup is -1, expected a number, at least 0"),
    ({"warmup": "3"}, r"warmup is '3', expected"),
    ({"sizes": []}, r"sizes is \[\], expected numbers of rows"),
    ({"sizes": [0, 4]}, r"sizes is \[0, 4\], expected"),
    ({"sizes": [1.5]}, r"sizes is \[1.5\], expected"),
    ({"sizes": "12"}, r"sizes is '12', expected"),
    ({"pad": "mirror"}, r"pad is 'mirror', expected 'zero' or 'repeat'"),
    ({"pad": 0}, r"pad is 0, expected"),
    ({"dim": -1}, r"dim is -1, expected"),
    ({"dim": "x"}, r"dim is 'x', expected"),
    ({"dim": {"x": None}}, r"dim is \{'x': None\}, expected"),
    ({"static_argnums": "x"}, r"static_argnums is 'x', expected a sequence of int"),
    ({"static_argnums": [True]}, r"static_argnums is \[True\], expected"),
    ({"static_argnums": 1.0}, r"static_argnums is 1.0, expected"),
    ({"static_argnums": [-1]}, r"static_argnums is \[-1\], expected"),
    ({"static_argnames": [1]}, r"static_argnames is \[1\], expected a sequence of str"),
    ({"static_argnames": ["nothing"]}, r"static_argnames is .*'nothing'.* x"),
    ({"static_argnums": [1]}, r"static_argnums is .*1.* x"),
    ({"dim": {"nothing": 0}}, r"dim is .*'nothing'.* x"),
    ({"capture_error_mode": "strict"}, r"capture error mode.*got 'strict'"),
    ({"preserve_state": "no"}, r"preserve_state is 'no', expected"),
    ({"measure": 1}, r"measure is 1, expected"),
    ({"pool": "mine"}, r"pool is 'mine', expected"),
]


@pytest.mark.parametrize(("options", "text"), OPTIONS, ids=[str(one) for one, _ in OPTIONS])
def test_a_bad_option_is_named_with_its_value_and_what_is_expected(
    lab: Lab, options: dict[str, Any], text: str
) -> None:
    def body(x: Tensor) -> Tensor:
        return x

    with pytest.raises(ArgumentError, match=text):
        cgraph.graphed(body, **options)
    with pytest.raises(ArgumentError, match=text):
        cgraph.graphed(**options)(body)


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


def test_a_graphed_function_in_a_graphed_function_becomes_part_of_it(lab: Lab) -> None:
    inner = cgraph.graphed(lambda x: x.sin() * 2)
    outer = cgraph.graphed(lambda x: inner(x) + inner(x * 2))
    for _ in range(3):
        x = fresh(lab, 4)
        assert_close(outer(x), x.sin() * 2 + (x * 2).sin() * 2)
    for _ in range(3):
        x = fresh(lab, 4)
        assert_close(inner(x), x.sin() * 2)
    assert outer.report().replays == 3
    x = fresh(lab, 4)
    assert_close(outer(x), x.sin() * 2 + (x * 2).sin() * 2)


def test_a_graphed_function_that_is_known_stays_quiet_in_anothers_warm_up(lab: Lab) -> None:
    inner = cgraph.graphed(lambda x: x.sin(), on_held="raise")
    inner(fresh(lab, 4))
    outer = cgraph.graphed(lambda x: inner(x) + inner(x * 2), on_fail="raise")
    for _ in range(2):
        x = fresh(lab, 4)
        assert_close(outer(x), x.sin() + (x * 2).sin())


def test_a_function_that_calls_its_graphed_self_is_captured_whole(lab: Lab) -> None:
    @cgraph.graphed
    def power(x: Tensor, exponent: int) -> Tensor:
        return x * 1 if exponent == 0 else x * power(x, exponent - 1)

    for exponent in (3, 2, 3, 0, 1, 2, 3, 1):
        x = fresh(lab, 4)
        assert_close(power(x, exponent), x ** (exponent + 1))
    assert states(power) == ["captured"] * 4


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("number", [1, 2, 4])
def test_an_interrupt_in_the_body_comes_out_and_the_next_call_works(
    lab: Lab, error: type[BaseException], number: int
) -> None:
    calls: list[int] = []
    counter = torch.zeros((), device=lab.device)

    def interrupted(x: Tensor) -> Tensor:
        counter.add_(1)
        calls.append(1)
        y = x * 2
        if len(calls) == number:
            raise error
        return y

    function, before = cgraph.graphed(interrupted), lab.current()
    with pytest.raises(error):
        function(fresh(lab, 4))
    assert counter.item() == 0
    check_that_all_works(lab, before)
    for size in (4, 4, 3):
        x = fresh(lab, size)
        assert_close(function(x), x * 2)
    assert states(function) == ["captured"] * 2
    assert counter.item() == 3


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
@pytest.mark.parametrize("options", [{}, {"on_fail": "raise"}, {"warmup": 0}, {"sizes": [4]}])
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


def test_an_exception_of_a_capture_that_has_no_text_is_answered_eagerly(lab: Lab) -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    def function(x: Tensor) -> Tensor:
        if cgraph.is_current_stream_capturing():
            raise Odd
        return x * 2

    graphed, x = cgraph.graphed(function), fresh(lab, 3)
    with pytest.warns(UserWarning, match="runs eagerly.*Odd"):
        assert_close(graphed(x), x * 2)
