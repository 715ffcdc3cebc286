"""Results that the end of a replay copies to new memory, the caller's own."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import cgraph
from cgraph import _core, _driver, _torch
from cgraph._breaks.sessions import Session
from cgraph._captures.capture_options import CaptureOptions
from cgraph._captures.fresh_results import Results, can_be_fresh
from cgraph.errors import ArgumentError, StateError
from cgraph.segments import SegmentedGraph
from fresh_results import capture, entry, results_of
from lab import Lab, fresh


def one(x: Tensor) -> tuple[Tensor, ...]:
    return (x * 2 + 1,)


def layouts(x: Tensor) -> tuple[Tensor, ...]:
    wide = torch.cat([x, x + 1], 1)
    return (
        x * 2,
        (x * 3).t(),
        (x * 4)[::2],
        wide[:, 3:7],
        x.sum(0).expand(5, -1),
        x.sum(),
        (x > 0)[1:, 1:],
        x.double().view(2, -1, 4).permute(2, 0, 1),
        x[:0] + 1,
        (x + 7).as_strided((3, 2), (4, 2), 5),
    )


def test_results_are_equal_and_new_in_each_replay(lab: Lab) -> None:
    graph, _ = capture(one, fresh(lab, 6, 8))
    given = [fresh(lab, 6, 8) for _ in range(4)]
    found = [graph._replay_fresh((x,))[0] for x in given]
    for x, result in zip(given, found, strict=True):
        assert_close(result, x * 2 + 1)
    assert len({result.data_ptr() for result in found}) == 4
    assert all(type(result) is Tensor for result in found)


def test_a_result_that_is_written_to_changes_no_other(lab: Lab) -> None:
    graph, (own,) = capture(one, fresh(lab, 6, 8))
    first, second = fresh(lab, 6, 8), fresh(lab, 6, 8)
    (result,) = graph._replay_fresh((first,))
    result.fill_(7)
    assert_close(own, first * 2 + 1)
    (other,) = graph._replay_fresh((second,))
    assert_close(other, second * 2 + 1)
    assert_close(result, torch.full_like(result, 7))


def test_a_plain_replay_copies_nothing(lab: Lab) -> None:
    static = fresh(lab, 6, 8)
    graph, (own,) = capture(one, static)
    first = fresh(lab, 6, 8)
    (result,) = graph._replay_fresh((first,))
    static.fill_(3)
    graph.replay()
    assert_close(own, torch.full_like(own, 7))
    assert_close(result, first * 2 + 1)
    (again,) = graph._replay_fresh((first,))
    assert_close(again, result)


def test_results_have_the_layouts_that_the_function_gives_them(lab: Lab) -> None:
    graph, own = capture(layouts, fresh(lab, 6, 8))
    x = fresh(lab, 6, 8)
    for result, right, prototype in zip(graph._replay_fresh((x,)), layouts(x), own, strict=True):
        assert_close(result, right)
        assert result.dtype == right.dtype
        assert result.stride() == right.stride() == prototype.stride()
        assert not result.requires_grad
        assert result.numel() == 0 or result.data_ptr() != prototype.data_ptr()


def test_only_the_bytes_of_results_are_copied(lab: Lab) -> None:
    x = fresh(lab, 100, 4)
    graph, _ = capture(lambda x: [(x + 1)[-1], (x + 2)[50:60]], x)
    assert [size for _, size in results_of(graph).storages] == [16, 160]
    last, middle = graph._replay_fresh((x,))
    assert_close(last, x[-1] + 1)
    assert_close(middle, x[50:60] + 2)
    assert last.untyped_storage().nbytes() == 16


def views(x: Tensor) -> list[Tensor]:
    y = x * 2
    pairs = torch.view_as_complex(y.view(6, 4, 2))
    return [y[1:3], y[2:], y.view(torch.int32)[1], pairs, x + 1]


def test_results_of_one_storage_share_one_as_the_function_s_do(lab: Lab) -> None:
    graph, _ = capture(views, fresh(lab, 6, 8))
    x = fresh(lab, 6, 8)
    found, right = graph._replay_fresh((x,)), views(x)
    for result, expected in zip(found, right, strict=True):
        assert_close(result, expected)
        assert result.stride() == expected.stride()
    assert len({result.untyped_storage().data_ptr() for result in found}) == 2
    found[1][0] = 5
    right[1][0] = 5
    for result, expected in zip(found, right, strict=True):
        assert_close(result, expected)
    # As views of one tensor they share a count of writes.
    assert found[0]._version == found[1]._version


def test_a_view_behind_the_begin_of_shared_memory_is_found_there(lab: Lab) -> None:
    def fn(x: Tensor) -> list[Tensor]:
        numbers = torch.arange(40, device=x.device, dtype=torch.uint8) + x[0].to(torch.uint8)
        return [numbers[5:7], numbers[8:16].view(torch.int32), numbers[3:4]]

    graph, _ = capture(fn, torch.zeros(1, device=lab.device))
    x = torch.full((1,), 3.0, device=lab.device)
    for result, right in zip(graph._replay_fresh((x,)), fn(x), strict=True):
        assert_close(result, right)


def test_results_without_elements_are_new_too(lab: Lab) -> None:
    graph, _ = capture(lambda x: [x[:0] + 1, (x + 1)[:, 4:4], x + 2], fresh(lab, 6, 8))
    x = fresh(lab, 6, 8)
    empty, narrow, full = graph._replay_fresh((x,))
    assert (empty.shape, narrow.shape) == ((0, 8), (6, 0))
    assert_close(full, x + 2)


def test_a_graph_without_static_inputs_has_fresh_results(lab: Lab) -> None:
    x = fresh(lab, 6, 8)
    graph = cgraph.CUDAGraph()
    with cgraph.graph(graph):
        assert graph._capture is not None
        graph._capture.results = [x * 2]
    (first,) = graph._replay_fresh()
    x.add_(1)
    (second,) = graph._replay_fresh()
    assert_close(second, x * 2)
    assert_close(first, x * 2 - 2)


def test_a_template_that_is_kept_gives_each_exec_its_results(lab: Lab) -> None:
    graph, _ = capture(one, fresh(lab, 6, 8), keep_graph=True)
    for _ in range(2):
        graph.instantiate()
        x = fresh(lab, 6, 8)
        assert_close(graph._replay_fresh((x,))[0], x * 2 + 1)


def test_a_graph_keeps_no_result_of_its_capture(lab: Lab) -> None:
    graph, results = capture(one, fresh(lab, 6, 8))
    storage = _torch.WeakStorage(results[0])
    results.clear()
    gc.collect()
    assert storage.get() is None
    x = fresh(lab, 6, 8)
    assert_close(graph._replay_fresh((x,))[0], x * 2 + 1)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_results_are_as_those_of_torch_s_empty_in_the_mode_of_the_call(lab: Lab, mode: Any) -> None:
    graph, _ = capture(lambda x: [x * 2, *(x + 1).split(3)], fresh(lab, 6, 8))
    with mode():
        results = graph._replay_fresh((fresh(lab, 6, 8),))
        like = torch.empty(0)
        assert all(one.is_inference() == like.is_inference() for one in results)
    assert not any(one.requires_grad for one in results)
    if mode is not torch.inference_mode:
        weight = torch.ones(8, device=lab.device, requires_grad=True)
        (results[0] * weight).sum().backward()
        assert weight.grad is not None
        assert_close(weight.grad, results[0].sum(0))


def test_results_of_the_first_rows_are_cut(lab: Lab) -> None:
    def fn(x: Tensor) -> list[Tensor]:
        return [x * 2, (x + 1).t().contiguous().t(), x.sum(1)]

    x = fresh(lab, 6, 8)
    graph, own = capture(fn, x)
    cut = results_of(graph).cut([result[:2] for result in own])
    made, to = cut.make()
    assert [size for _, size in to] == [64, 4 * (7 * 6 + 2), 8]
    graph._replay_into((x,), to)
    for result, right in zip(made, fn(x), strict=True):
        assert result.shape[0] == 2
        assert_close(result, right[:2])


def test_results_can_be_left_out(lab: Lab) -> None:
    x = fresh(lab, 6, 8)
    graph, own = capture(lambda x: [x * 2, x + 1], x)
    made, to = results_of(graph).cut(own[1:]).make()
    assert [size for _, size in to] == [0, 192]
    graph._replay_into((x,), to)
    assert_close(made[0], x + 1)


def test_memory_outside_of_the_results_is_refused(lab: Lab) -> None:
    graph, own = capture(one, fresh(lab, 6, 8))
    results = results_of(graph)
    with pytest.raises(ArgumentError, match="lies in no result"):
        results.cut([fresh(lab, 6, 8)])
    reader, address = _torch.tensor_reader(), own[0].data_ptr()
    with pytest.raises(ArgumentError, match="inside of 64"):
        _core.Fresh([(address, 64)], [(0, own[0])], reader, torch.empty_strided, {})
    with pytest.raises(ArgumentError, match="place of a result is 1"):
        _core.Fresh([(address, 192)], [(1, own[0])], reader, torch.empty_strided, {})


def test_a_graph_without_results_says_so(lab: Lab) -> None:
    graph = cgraph.CUDAGraph()
    graph._options = CaptureOptions(statics=(fresh(lab, 6, 8),))
    with pytest.raises(StateError, match="new results"):
        graph._replay_fresh()
    with cgraph.graph(graph):
        graph._statics[0] * 2
    with pytest.raises(StateError, match="new results"):
        graph._replay_fresh((fresh(lab, 6, 8),))
    with pytest.raises(StateError, match="captured without results"):
        graph._replay_into(None, [(0, 0)])


@pytest.mark.parametrize("functions", [_torch.fresh_functions(), {}], ids=["native", "python"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_new_tensors_are_the_same_however_they_are_made(
    lab: Lab, functions: dict[str, int], mode: Any
) -> None:
    like = list(layouts(fresh(lab, 6, 8)))
    storages, reader = Results(like).storages, _torch.tensor_reader()
    maker = _core.Fresh(storages, list(enumerate(like)), reader, torch.empty_strided, functions)
    assert maker.is_native == bool(functions)
    with mode():
        made, to = maker.make()
        other = torch.empty(1)
    for tensor, right, (_, size), (address, nbytes) in zip(made, like, storages, to, strict=True):
        assert type(tensor) is Tensor
        assert tensor.is_inference() == other.is_inference()
        assert (tensor.shape, tensor.stride()) == (right.shape, right.stride())
        assert (tensor.dtype, tensor.device) == (right.dtype, right.device)
        assert tensor.untyped_storage().nbytes() == size == nbytes
        assert tensor._use_count() == 1
        if nbytes:
            assert tensor.data_ptr() == address


@pytest.mark.parametrize("functions", [_torch.fresh_functions(), {}], ids=["native", "python"])
def test_too_large_a_tensor_is_refused_by_torch_itself(functions: dict[str, int]) -> None:
    cpu, nbytes, word = torch.device("cpu"), 1 << 55, torch.zeros(1)
    storage = torch._C._construct_storage_from_data_pointer(word.data_ptr(), cpu, nbytes)
    like = torch.empty(0).set_(storage, 0, (nbytes // 4,), (1,))
    given = [(word.data_ptr(), nbytes)], [(0, like)], _torch.tensor_reader()
    maker = _core.Fresh(*given, torch.empty_strided, functions)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="memory"):
            maker.make()


def test_torch_has_all_functions_that_make_tensors() -> None:
    names = {"empty_strided", "from_blob", "data_ptr", "delete", "wrap"}
    assert set(_torch.fresh_functions()) == names


def test_what_cannot_be_made_by_its_layout_is_not_fresh() -> None:
    x = torch.randn(4, dtype=torch.complex64)
    assert can_be_fresh(x)
    assert can_be_fresh(x[1:].real)
    others = [x.conj(), x.conj().imag, x.to_sparse(), torch.nn.Parameter(x), x.to("meta")]
    assert not any(can_be_fresh(other) for other in others)


def test_an_entry_returns_fresh_leaves_beside_others(lab: Lab) -> None:
    static = fresh(lab, 6, 8)
    graph, own = capture(lambda x: [x * 2, x + 1], static)
    maker = results_of(graph).fresh
    leaves = [
        ("fresh", 1, maker),
        ("constant", "c"),
        ("fresh", 0, maker),
        ("argument", 0),
        ("fresh", 1, maker),
        ("copied", own[0]),
    ]
    served = entry(graph, [static], leaves)
    for _ in range(3):
        x = fresh(lab, 6, 8)
        b, constant, a, argument, again, copy = served.call((x,), {}, [x])
        assert constant == "c"
        assert argument is x
        assert again is b
        assert_close((a, b, copy), (x * 2, x + 1, x * 2))
        assert a.data_ptr() != own[0].data_ptr()
        a.zero_()
        b.zero_()
    assert served.replays == 3


def test_an_entry_returns_one_fresh_result_as_it_is(lab: Lab) -> None:
    static = fresh(lab, 6, 8)
    graph, _ = capture(one, static)
    served = entry(graph, [static], [("fresh", 0, results_of(graph).fresh)], "single")
    given = [fresh(lab, 6, 8) for _ in range(3)]
    found = [served.call((x,), {}, [x]) for x in given]
    for x, result in zip(given, found, strict=True):
        assert_close(result, x * 2 + 1)


def test_fresh_leaves_are_of_one_maker(lab: Lab) -> None:
    static = fresh(lab, 6, 8)
    graph, own = capture(lambda x: [x * 2, x + 1], static)
    maker, other = results_of(graph).fresh, results_of(graph).cut(own)
    for leaves in ([("fresh", 2, maker)], [("fresh", 0, maker), ("fresh", 1, other)]):
        with pytest.raises(ArgumentError, match="fresh result"):
            entry(graph, [static], leaves)


def test_the_last_segment_copies_the_results_of_all(lab: Lab) -> None:
    static = fresh(lab, 6, 8)
    driver = _driver.current()

    def body() -> list[Tensor]:
        first = static * 2
        cgraph.eager_break(lambda: None)()
        return [first, first + 1]

    session = Session(driver.new_stream(), driver.pool_handle(), "thread_local", ())
    segments, own = SegmentedGraph._made(session, body, (static,), lambda results: results)
    assert len(segments.segments) == 2
    leaves = [("fresh", place, segments.segments[1]._captured.results.fresh) for place in (0, 1)]  # type: ignore[union-attr]
    served = entry(segments, [static], leaves)
    found = []
    for replay in (segments._replay_fresh, lambda given: served.call(given, {}, list(given))) * 2:
        x = fresh(lab, 6, 8)
        found.append((x, replay((x,))))
    for x, (first, second) in found:
        assert_close(first, x * 2)
        assert_close(second, x * 2 + 1)
    assert_close(own[1], found[-1][1][1])
    segments.replay()


def test_a_result_may_go_before_the_replay_has_passed(lab: Lab) -> None:
    graph, _ = capture(one, fresh(lab, 6, 8))
    found = []
    for number in range(6):
        x = fresh(lab, 6, 8)
        results = graph._replay_fresh((x,))
        if number % 2:
            found.append((x, results[0]))
        del results
    gc.collect()
    lab.sync()
    for x, result in found:
        assert_close(result, x * 2 + 1)
