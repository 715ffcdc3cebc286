"""Results that lie in an argument, and static results that a caller holds."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import cgraph
from cgraph import _core, _driver, _torch
from cgraph._captures.capture_options import CaptureOptions
from cgraph._captures.last_stream import last_stream
from cgraph._graphed.results import View
from cgraph.errors import ArgumentError, ResultWarning
from graphed_calls import quiet
from lab import Lab, fresh


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def capture(function: Callable[..., Tensor], *statics: Tensor) -> tuple[cgraph.CUDAGraph, Tensor]:
    """Return a graph of a function, and its result there."""
    graph = cgraph.CUDAGraph()
    graph._options = CaptureOptions(statics=statics)
    with cgraph.graph(graph):
        result = function(*statics)
    return graph, result


def entry(
    graph: cgraph.CUDAGraph,
    statics: Sequence[Tensor],
    leaves: list[tuple[Any, ...]],
    build: str = "tuple",
    warn: Callable[[], object] | None = None,
) -> _core.Entry:
    """Return an entry that returns these leaves."""
    signatures = [_torch.signature(one) for one in statics]
    return _core.Entry(
        [("tensor", signature, False, None, Tensor) for signature in signatures],
        [],
        is_in_order=False,
        modes=(True, False, None),
        work=graph,
        outputs=(leaves, build, warn),
        last_stream=last_stream(_driver.current()),
        lock=None,
    )


def same_view(found: Tensor, expected: Tensor) -> None:
    """Require a tensor to have the memory and layout of another one."""
    assert_close(found, expected, rtol=0, atol=0)
    assert found.data_ptr() == expected.data_ptr() and found.dtype is expected.dtype
    assert (found.shape, found.stride()) == (expected.shape, expected.stride())
    assert not found.requires_grad


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x[1:],
    "a column": lambda x: x[:, 1],
    "one row": lambda x: x[2],
    "transposed": lambda x: x.t(),
    "flat": lambda x: x.view(-1),
    "whole": lambda x: x.view_as(x),
    "detached": lambda x: x[1:].detach(),
    "steps": lambda x: x[::2, ::2],
    "expanded": lambda x: x[0].expand(5, -1),
    "windows": lambda x: x.unfold(0, 2, 1),
    "diagonal": lambda x: x.diagonal(),
    "as whole numbers": lambda x: x.view(torch.int32),
    "as bytes": lambda x: x[1:].view(torch.uint8),
}


@pytest.mark.parametrize("outputs", ["fresh", "static"])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_view_of_an_argument_lies_in_the_callers_tensor(
    lab: Lab, view: Callable[[Tensor], Tensor], outputs: str
) -> None:
    graphed = cgraph.graphed(lambda x: (view(x), x * 2), outputs=outputs)
    base = fresh(lab, 7, 4)
    for x in (fresh(lab, 3, 4), fresh(lab, 3, 4), base[2:5], base[:3], base[4:]):
        found, _ = graphed(x)
        same_view(found, view(x))
        found.zero_()
        assert torch.equal(view(x), torch.zeros_like(found))
    assert graphed.report().captured == 1


def test_parts_of_complex_arguments_are_views(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda x: (torch.view_as_real(x), x.imag, x * 2))
    for _ in range(4):
        x = torch.randn(3, dtype=torch.complex64, device=lab.device)
        both, imaginary, _ = graphed(x)
        same_view(both, torch.view_as_real(x))
        same_view(imaginary, x.imag)


def test_a_conjugated_argument_is_returned_as_a_copy(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda x: (x.conj(), x * 2))
    for _ in range(4):
        x = torch.randn(3, dtype=torch.complex64, device=lab.device)
        assert_close(graphed(x)[0], x.conj(), rtol=0, atol=0)


@pytest.mark.parametrize("outputs", ["fresh", "static"])
def test_a_view_of_a_written_argument_has_what_was_written(lab: Lab, outputs: str) -> None:
    graphed = cgraph.graphed(lambda x, y: (x.add_(y)[1:], x * 2), outputs=outputs)
    for _ in range(5):
        x, y = fresh(lab, 4), fresh(lab, 4)
        expected = x + y
        found, twice = graphed(x, y)
        assert torch.equal(x, expected)
        same_view(found, x[1:])
        assert torch.equal(twice, x * 2)


def test_views_of_several_arguments_lie_each_in_its_own(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda x, y: {"y": y[:1], "x": (x[1:], x), "sum": x + y})
    for _ in range(4):
        x, y = fresh(lab, 3), fresh(lab, 3)
        found = graphed(x, y=y)
        same_view(found["y"], y[:1])
        same_view(found["x"][0], x[1:])
        assert found["x"][1] is x
        assert torch.equal(found["sum"], x + y)


def test_an_argument_with_other_strides_than_its_copy_gives_copies(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda x: (x[1:], x * 2))
    for _ in range(4):
        x = fresh(lab, 3, 8)[:, ::2]
        found, _ = graphed(x)
        assert torch.equal(found, x[1:])


def test_empty_views_are_returned(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda x: (x[3:], x[:0].t(), x * 2))
    for _ in range(4):
        x = fresh(lab, 3, 2)
        rest, none, _ = graphed(x)
        assert (rest.shape, none.shape) == ((0, 2), (2, 0))


def test_a_view_of_a_detached_leaf_has_no_history(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda x: (x.detach()[1:], x.detach() * 2))
    for mode in (torch.enable_grad(), torch.no_grad()):
        with mode:
            for _ in range(4):
                x = fresh(lab, 3).requires_grad_()
                found, _ = graphed(x)
                assert found.data_ptr() == x[1:].data_ptr() and not found.requires_grad


@pytest.mark.parametrize("check", [True, False])
def test_a_view_of_a_padded_argument_is_cut_and_lies_in_the_callers(lab: Lab, check: bool) -> None:
    graphed = cgraph.graphed(
        lambda x: (x[:, 1:], x.view_as(x), x * 2), sizes=[4], check_padding=check
    )
    for rows in (4, 4, 3, 2, 3, 1, 2, 4):
        x = fresh(lab, rows, 3)
        part, whole, twice = graphed(x)
        assert torch.equal(part, x[:, 1:]) and torch.equal(whole, x)
        assert torch.equal(twice, x * 2)
        same_view(part, x[:, 1:])
        same_view(whole, x.view_as(x))


def test_a_view_of_padding_rows_is_a_copy(lab: Lab) -> None:
    function = lambda x: (x[3:], x * 2)  # noqa: E731
    graphed = cgraph.graphed(function, sizes=[4], pad="zero", check_padding=False)
    for rows in (4, 4, 3, 3, 2, 2):
        x = fresh(lab, rows, 3)
        last, twice = graphed(x)
        assert torch.equal(twice, x * 2)
        expected = x[3:] if rows == 4 else torch.zeros(1, 3, device=lab.device)
        assert torch.equal(last, expected)


def test_what_lies_beyond_a_copy_is_no_view_of_an_argument(lab: Lab) -> None:
    whole = fresh(lab, 8)
    static = whole[:4]
    for beyond in (whole[2:6], whole[6:], whole[1:].as_strided((2,), (4,))):
        assert View.of(beyond, static, 0) is None
    inner = whole[2:6]
    assert View.of(whole[1:3], inner, 0) is None
    found = View.of(whole[3:5], inner, 0)
    assert found is not None
    x = fresh(lab, 4)
    same_view(found(x), x[1:3])
    assert torch.equal(found(fresh(lab, 3)), whole[3:5])


def test_an_entry_gives_views_what_the_caller_gave(lab: Lab) -> None:
    x, y = fresh(lab, 3), fresh(lab, 3)
    graph, twice = capture(lambda x, y: x * y, x, y)
    given: list[Tensor] = []

    def make(tensor: Tensor) -> str:
        given.append(tensor)
        return "made"

    native = entry(graph, [x, y], [("view", 1, make), ("copied", twice), ("view", 0, make)])
    left, right = fresh(lab, 3), fresh(lab, 3)
    first, product, last = native.call((), {}, [left, right])
    assert (first, last) == ("made", "made")
    assert torch.equal(product, left * right)
    assert given[0] is right and given[1] is left
    with pytest.raises(ArgumentError, match="view"):
        entry(graph, [x, y], [("something", 0)])


def static_entry(lab: Lab, warn: Callable[[], object] | None) -> tuple[Callable[[], Any], Tensor]:
    """Return a call of an entry with one static result, and that result."""
    x = fresh(lab, 3)
    graph, twice = capture(lambda x: x * 2, x)
    leaf = ("static", twice.detach(), _torch.signature(twice))
    native = entry(graph, [x], [leaf], "single", warn)
    return lambda: native.call((), {}, [x]), twice


def test_a_static_result_is_used_again_once_it_was_let_go(lab: Lab) -> None:
    told: list[int] = []
    call, twice = static_entry(lab, lambda: told.append(1))
    numbers = {id(call()) for _ in range(5)}
    assert len(numbers) == 1
    # A variable has the result of the previous call during each call.
    now, numbers = None, set()
    for _ in range(6):
        now = call()
        assert now.data_ptr() == twice.data_ptr()
        numbers.add(id(now))
    assert len(numbers) == 2 and not told


def test_who_holds_the_result_of_the_call_before_last_is_told_once(lab: Lab) -> None:
    told: list[int] = []
    call, _ = static_entry(lab, lambda: told.append(len(held)))
    held: list[Tensor] = []
    for _ in range(6):
        held.append(call())
    assert told == [2]
    assert len({id(one) for one in held}) == 6


def test_a_result_that_is_held_between_others_is_told_of(lab: Lab) -> None:
    told: list[int] = []
    call, _ = static_entry(lab, lambda: told.append(1))
    call()
    kept = call()
    call()
    assert not told
    call()
    assert told == [1]
    del kept


def test_what_a_warning_raises_comes_before_the_replay(lab: Lab) -> None:
    def warn() -> None:
        raise RuntimeError("held")

    call, twice = static_entry(lab, warn)
    held = [call(), call()]
    twice.zero_()
    lab.sync()
    with pytest.raises(RuntimeError, match="held"):
        call()
    lab.sync()
    assert not twice.any()
    held.append(call())
    lab.sync()
    assert twice.any()


def test_without_anybody_to_tell_held_results_are_just_overwritten(lab: Lab) -> None:
    call, _ = static_entry(lab, None)
    held = [call() for _ in range(4)]
    assert len({one.data_ptr() for one in held}) == 1


def test_a_static_result_that_a_caller_has_changed_is_not_returned_again(lab: Lab) -> None:
    call, twice = static_entry(lab, None)
    changes: list[Callable[[Tensor], object]] = [
        lambda y: setattr(y, "note", 1),
        lambda y: setattr(y, "data", fresh(lab, 3)),
        lambda y: y.requires_grad_(),
        lambda y: y.t_() if y.dim() == 2 else y.unsqueeze_(0),
    ]
    for change in changes:
        for _ in range(3):
            change(call())
        for _ in range(3):
            y = call()
            assert not vars(y) and not y.requires_grad
            assert (y.data_ptr(), y.shape) == (twice.data_ptr(), twice.shape)
        del y
    reference = weakref.ref(call())
    assert call() is not reference()


def test_what_a_caller_gives_a_static_result_lives_for_two_calls_more(lab: Lab) -> None:
    call, _ = static_entry(lab, None)
    y = call()
    y.note = noted = fresh(lab, 3)
    alive = weakref.ref(noted)
    del y, noted
    call()
    call()
    gc.collect()
    assert alive() is None


def test_the_warning_of_a_function_is_given_once_for_all_its_keys(lab: Lab) -> None:
    def triple(x: Tensor) -> Tensor:
        return x * 3

    graphed = cgraph.graphed(triple, outputs="static")
    held = []
    with quiet() as caught:
        for size in (3, 4):
            held += [graphed(fresh(lab, size)) for _ in range(6)]
    assert [one.category for one in caught] == [ResultWarning]
    (one,) = caught
    assert one.filename == __file__
    text = str(one.message)
    assert "test_views_and_held_results.py:" in text.split(": ")[0] + ":"
    assert "triple" in text and "clone" in text and 'outputs="fresh"' in text
    graphed.reset()
    with quiet() as caught:
        held += [graphed(fresh(lab, 3)) for _ in range(6)]
    assert [one.category for one in caught] == [ResultWarning]


def test_fresh_results_are_held_without_a_word(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda x: (x * 2, x[1:]))
    with quiet() as caught:
        held = [graphed(fresh(lab, 3)) for _ in range(8)]
    assert not caught and len(held) == 8
