"""`cgraph.trees.cudagraphify`."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import cgraph
from cgraph import trees
from cgraph.errors import EagerWarning
from lab import Lab, fresh
from tree_programs import graphs_of, half, in_tree, line, step


def pair(x: Tensor) -> tuple[Tensor, Tensor]:
    return x + 1, (x * 2).sum(0)


def test_calls_after_the_second_are_replays_with_fresh_inputs(lab: Lab) -> None:
    fast = in_tree(lab, pair, fresh(lab, 4, 4))
    for _ in range(6):
        step()
        x = fresh(lab, 4, 4)
        a, b = fast(x)
        assert torch.equal(a, x + 1)
        assert torch.allclose(b, (x * 2).sum(0))
        del a, b
    assert graphs_of(fast) == 1


def test_a_chain_of_functions_works_in_the_memory_of_one_pool(lab: Lab) -> None:
    first, second = in_tree(lab, half, fresh(lab, 8)), in_tree(lab, line, fresh(lab, 8))
    for _ in range(6):
        step()
        x = fresh(lab, 8)
        assert torch.allclose(second(second(first(x))), line(line(half(x))))
    # The second function has a graph behind the first one, and one behind itself.
    assert (graphs_of(first), graphs_of(second)) == (1, 2)


def test_outputs_of_a_step_stay_right_while_later_calls_of_it_are_replayed(lab: Lab) -> None:
    first, second = in_tree(lab, half, fresh(lab, 64)), in_tree(lab, line, fresh(lab, 64))
    for _ in range(6):
        step()
        x = fresh(lab, 64)
        a = first(x)
        b = second(a)
        c = second(b)
        assert torch.allclose(a, half(x))
        assert torch.allclose(b, line(half(x)))
        assert torch.allclose(c, line(line(half(x))))


def test_a_step_that_goes_another_way_has_a_branch_of_its_own(lab: Lab) -> None:
    first = in_tree(lab, half, fresh(lab, 64))
    ways = [in_tree(lab, line, fresh(lab, 64)), in_tree(lab, torch.neg, fresh(lab, 64))]
    for number in range(12):
        step()
        x = fresh(lab, 64)
        y = first(x)
        z = ways[number % 2](y)
        assert torch.allclose(y, half(x))
        assert torch.allclose(z, (line, torch.neg)[number % 2](half(x)))
        del y, z
    assert [graphs_of(one) for one in (first, *ways)] == [1, 1, 1]


def test_a_result_may_be_the_input_of_the_next_step(lab: Lab) -> None:
    fast = in_tree(lab, half, fresh(lab, 16))
    x = want = fresh(lab, 16)
    for _ in range(20):
        step()
        x, want = fast(x), half(want)
        assert torch.allclose(x, want)
    # One of them copies its results to new memory, as they are always held.
    assert graphs_of(fast) == 2


def test_results_of_one_step_may_change_places_as_inputs_of_the_next(lab: Lab) -> None:
    fast = in_tree(lab, lambda x, y: (y * 0.5, x + 1), fresh(lab, 64), fresh(lab, 64))
    x, y = fresh(lab, 64), fresh(lab, 64)
    want = x.clone(), y.clone()
    for _ in range(8):
        step()
        x, y = fast(y, x)
        want = want[0] * 0.5, want[1] + 1
        assert torch.allclose(x, want[0])
        assert torch.allclose(y, want[1])


def test_a_static_input_is_not_copied_and_a_moved_one_is_captured_again(lab: Lab) -> None:
    weights = [fresh(lab, 4, 4) for _ in range(2)]
    fast = in_tree(lab, torch.matmul, fresh(lab, 4, 4), weights[0], static_input_idxs=[1])
    for number in range(8):
        step()
        x, w = fresh(lab, 4, 4), weights[number % 2]
        w.add_(1)
        assert torch.allclose(fast(x, w), x @ w, atol=1e-4)
    assert graphs_of(fast) == 2


def test_a_static_input_that_is_written_changes_in_each_call(lab: Lab) -> None:
    state = torch.zeros(4, device=lab.device)
    fast = in_tree(
        lab,
        lambda x, state: state.add_(x).clone(),
        fresh(lab, 4),
        state,
        static_input_idxs=[1],
        mutated_input_idxs=[1],
    )
    want = torch.zeros(4, device=lab.device)
    for _ in range(6):
        step()
        x = fresh(lab, 4)
        want += x
        assert torch.allclose(fast(x, state), want)
        assert torch.allclose(state, want)
    assert graphs_of(fast) == 1


def test_a_call_that_writes_to_an_input_from_elsewhere_runs_eagerly(lab: Lab) -> None:
    fast = in_tree(lab, lambda x: x.add_(1) * 2, fresh(lab, 4), mutated_input_idxs=[0])

    def call() -> None:
        step()
        x = fresh(lab, 4)
        before = x.clone()
        assert torch.allclose(fast(x), (before + 1) * 2)
        assert torch.allclose(x, before + 1)

    call()
    with pytest.warns(EagerWarning, match=r"mutated inputs that are neither .*: input 0"):
        call()
    for _ in range(3):
        call()
    assert graphs_of(fast) == 0
    assert "neither static nor outputs" in str(trees.report())


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x[:, :1].expand(4, 6),
        lambda x: x.t(),
        lambda x: x[:, ::2],
        lambda x: x.reshape(-1).as_strided((3, 4), (1, 1)),
        lambda x: x[:0],
    ],
    ids=["expanded", "transposed", "with gaps", "overlapping", "empty"],
)
def test_inputs_of_any_layout_keep_it(lab: Lab, make: Any) -> None:
    strides = []

    def add(x: Tensor) -> Tensor:
        strides.append(x.stride())
        return x + 1

    fast = in_tree(lab, add, make(fresh(lab, 4, 6)))
    for _ in range(5):
        step()
        x = make(fresh(lab, 4, 6))
        assert torch.equal(fast(x), x + 1)
    assert set(strides) == {make(fresh(lab, 4, 6)).stride()}


def test_integers_have_graphs_of_their_own_and_other_results_are_as_they_were(lab: Lab) -> None:
    fast = in_tree(lab, lambda n, x: (x * n, None, n), 2, fresh(lab, 4))
    for number in range(9):
        step()
        n, x = number % 2 + 2, fresh(lab, 4)
        y, nothing, given = fast(n, x)
        assert torch.equal(y, x * n)
        assert (nothing, given) == (None, n)


def test_a_number_that_is_no_integer_keeps_a_function_from_being_captured(lab: Lab) -> None:
    with pytest.warns(EagerWarning, match="non-Tensor inputs"):
        fast = in_tree(lab, lambda a, x: x * a, 0.5, fresh(lab, 4))
    for number in range(4):
        step()
        x = fresh(lab, 4)
        assert torch.equal(fast(number / 2, x), x * (number / 2))
    assert "input 0 is a float" in str(trees.report())


def test_aliases_among_outputs_and_of_inputs_share_memory_as_in_eager(lab: Lab) -> None:
    weight = fresh(lab, 4)

    def views(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = x + w
        return y, y[1:], w, w[:2]

    fast = in_tree(lab, views, fresh(lab, 4), weight, static_input_idxs=[1])
    for _ in range(5):
        step()
        x = fresh(lab, 4)
        y, tail, same, head = fast(x, weight)
        assert torch.equal(y, x + weight)
        y.zero_()
        assert not tail.any()
        assert same.data_ptr() == head.data_ptr() == weight.data_ptr()


def test_an_output_may_be_a_view_of_an_output_of_an_earlier_call(lab: Lab) -> None:
    first = in_tree(lab, half, fresh(lab, 8))
    second = in_tree(lab, lambda y: (y[2:], y * 2), fresh(lab, 8))
    for _ in range(5):
        step()
        x = fresh(lab, 8)
        tail, double = second(first(x))
        assert torch.allclose(tail, half(x)[2:])
        assert torch.allclose(double, half(x) * 2)


def test_the_same_tensor_may_be_two_inputs(lab: Lab) -> None:
    first = in_tree(lab, half, fresh(lab, 8))
    second = in_tree(lab, lambda a, b: a * b, fresh(lab, 8), fresh(lab, 8))
    for _ in range(5):
        step()
        x = fresh(lab, 8)
        y = first(x)
        assert torch.allclose(second(y, y), half(x) ** 2)
        assert torch.allclose(second(x, x), x**2)


def test_a_function_need_not_empty_its_list(lab: Lab) -> None:
    fast = trees.cudagraphify(lambda args: [args[0] + args[1]], [fresh(lab, 4)] * 2)
    for _ in range(4):
        step()
        x, y = fresh(lab, 4), fresh(lab, 4)
        given = [x, y]
        assert torch.equal(fast(given)[0], x + y)
        assert not given or len(given) == 2


def test_a_call_inside_of_a_capture_runs_as_it_was_written(lab: Lab) -> None:
    fast = in_tree(lab, half, fresh(lab, 4))
    for _ in range(3):
        step()
        fast(fresh(lab, 4))
    x, graph = fresh(lab, 4), cgraph.CUDAGraph()
    with cgraph.graph(graph):
        y = fast(x)
    x.copy_(fresh(lab, 4))
    graph.replay()
    lab.sync()
    assert torch.allclose(y, half(x))


def test_after_a_reset_outputs_keep_their_values_and_functions_are_captured_again(lab: Lab) -> None:
    fast = in_tree(lab, half, fresh(lab, 4))
    for _ in range(3):
        step()
        y = fast(x := fresh(lab, 4))
    trees.reset()
    assert graphs_of(fast) == 0
    for _ in range(3):
        step()
        other = fresh(lab, 4)
        assert torch.allclose(fast(other), half(other))
    assert torch.allclose(y, half(x))
    assert graphs_of(fast) == 1


def test_a_result_keeps_its_memory_when_all_functions_are_gone(lab: Lab) -> None:
    in_threads(1, lambda: keep_beyond_functions(lab))


def keep_beyond_functions(lab: Lab) -> None:
    fast = in_tree(lab, half, fresh(lab, 64))
    for _ in range(4):
        step()
        y = fast(x := fresh(lab, 64))
    del fast
    another = in_tree(lab, line, fresh(lab, 64))
    for _ in range(4):
        step()
        another(fresh(lab, 64))
    assert torch.allclose(y, half(x))
    del y
    in_tree(lab, line, fresh(lab, 64))


def test_threads_have_trees_of_their_own(lab: Lab) -> None:
    def work() -> None:
        # CUDA's random numbers raise while another thread captures.
        fast = in_tree(lab, half, torch.randn(16).to(lab.device))
        for _ in range(8):
            x = torch.randn(16).to(lab.device)
            assert torch.allclose(fast(x), half(x))

    in_threads(4, work)


def in_threads(count: int, work: Callable[[], None]) -> None:
    """Run a function in so many threads at once; raise what one of them has raised."""
    with ThreadPoolExecutor(count) as pool:
        for done in [pool.submit(work) for _ in range(count)]:
            done.result()


def test_without_marks_all_calls_are_one_step_and_outputs_stay(lab: Lab) -> None:
    fast = in_tree(lab, half, fresh(lab, 4))
    xs = [fresh(lab, 4) for _ in range(6)]
    held = [fast(x) for x in xs]
    for x, y in zip(xs, held, strict=True):
        assert torch.allclose(y, half(x))


def test_a_call_that_writes_to_a_held_gradient_writes_to_the_callers(lab: Lab) -> None:
    gradient = in_tree(lab, line, fresh(lab, 8), is_backward=True, is_inference=False)
    clip = in_tree(lab, lambda g: g.mul_(0.5) + 1, fresh(lab, 8), mutated_input_idxs=[0])
    with pytest.warns(EagerWarning, match="mutated inputs"):
        for _ in range(6):
            step()
            found = gradient(x := fresh(lab, 8))
            step()
            assert torch.allclose(clip(found), line(x) * 0.5 + 1)
            assert torch.allclose(found, line(x) * 0.5)


def test_marks_of_torch_begin_steps_also_where_they_come_late(lab: Lab) -> None:
    trees.reset()
    fast, held = in_tree(lab, half, fresh(lab, 4), options={"held_outputs": "raise"}), []
    for _ in range(8):
        torch.compiler.cudagraph_mark_step_begin()
        held.append(fast(x := fresh(lab, 4)))
        assert torch.allclose(held[-1], half(x))
    assert graphs_of(fast) <= 3
    with pytest.raises(RuntimeError, match="overwritten by a subsequent run"):
        held[5].sum()


def test_a_function_that_writes_to_new_static_inputs_runs_eagerly_after_128_more_captures(
    lab: Lab,
) -> None:
    def added(x: Tensor, total: Tensor) -> Tensor:
        return total.add_(x) * 2

    places = {"static_input_idxs": [1], "mutated_input_idxs": [1]}
    fast = in_tree(lab, added, fresh(lab, 4), fresh(lab, 4), **places)
    kept = []

    def calls(count: int) -> None:
        for _ in range(count):
            step()
            x, y = fresh(lab, 4), fresh(lab, 4)
            kept.append(y)
            expected = y + x
            assert torch.equal(fast(x, y), expected * 2)
            assert torch.equal(y, expected)

    calls(130)
    with pytest.warns(EagerWarning, match="elsewhere in each call: input 1 moved from 0x"):
        calls(11)
    assert graphs_of(fast) == 129
    assert "elsewhere in each call" in str(trees.report())


def test_the_report_names_each_function_with_its_graphs_and_replays(lab: Lab) -> None:
    fast = in_tree(lab, half, fresh(lab, 4))
    for _ in range(5):
        step()
        fast(fresh(lab, 4))
    report = trees.report()
    [one] = [one for one in report.functions if one.name == "half"]
    assert (one.mode, one.graphs, one.replays, one.eager) == ("inference", 1, 3, {"first run": 1})
    assert "half: 1 eager call: first run" in str(report)


def test_what_is_recorded_in_inference_mode_is_right_outside_of_it_too(lab: Lab) -> None:
    fast = in_tree(lab, half, fresh(lab, 4))
    for number in range(6):
        step()
        x = fresh(lab, 4)
        with torch.inference_mode(number == 1):
            assert torch.allclose(fast(x), half(x))
    assert graphs_of(fast) == 1


def test_true_and_one_have_graphs_of_their_own(lab: Lab) -> None:
    x = torch.tensor([True, False], device=lab.device)
    fast = in_tree(lab, torch.mul, x, 1)
    for number in (1, 1, 1, True, True, True, 1):
        step()
        got, want = fast(x.clone(), number), x * number
        assert got.dtype is want.dtype
        assert torch.equal(got, want)
