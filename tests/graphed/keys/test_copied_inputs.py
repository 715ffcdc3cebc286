"""Reads and writes of a graphed function: copied and mutated inputs, and no traces."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout
from torch.testing import assert_close

import cgraph
from graphed_calls import agree, poison, states
from lab import Lab, fresh


def random_state(lab: Lab) -> Tensor:
    return torch.cuda.get_rng_state() if lab.device == "cuda" else torch.get_rng_state()


def test_an_input_changed_in_place_is_read_again(lab: Lab) -> None:
    function, x = cgraph.graphed(torch.sin), fresh(lab, 4)
    for _ in range(4):
        x.normal_()
        assert_close(function(x), x.sin())


def test_the_first_calls_argument_is_not_read_by_later_calls(lab: Lab) -> None:
    function, x, y = cgraph.graphed(torch.sin), fresh(lab, 4), fresh(lab, 4)
    function(x)
    expected = y.sin()
    x.normal_()
    assert_close(function(y), expected)


def test_inputs_that_overlap_are_read_rightly(lab: Lab) -> None:
    def mixed(x: Tensor, y: Tensor) -> Tensor:
        return x.cumsum(0) - y

    function = cgraph.graphed(mixed)
    for _ in range(3):
        whole = fresh(lab, 8)
        for x, y in ((whole[:6], whole[2:]), (whole[2:], whole[:6]), (whole[1:7], whole[1:7])):
            assert_close(function(x, y), mixed(x, y))
    assert states(function) == ["captured"]


def test_a_result_is_the_next_input(lab: Lab) -> None:
    def step(x: Tensor) -> Tensor:
        return x * 0.5 + 1

    function = cgraph.graphed(step)
    x = fresh(lab, 6)
    expected = x.clone()
    for _ in range(5):
        x, expected = function(x), step(expected)
        assert_close(x, expected)


def test_a_part_of_a_result_is_the_next_input(lab: Lab) -> None:
    def step(x: Tensor) -> Tensor:
        return torch.cat([x[1:] * 0.5, x, x[:1]])

    function = cgraph.graphed(step)
    x = fresh(lab, 6)
    expected = x.clone()
    for _ in range(5):
        x, expected = function(x)[3:9], step(expected)[3:9]
        assert_close(x, expected)


def test_a_mutated_input_is_written_for_the_caller(lab: Lab) -> None:
    def add(x: Tensor, y: Tensor) -> Tensor:
        x += y
        return x * 2

    function = cgraph.graphed(add)
    for _ in range(4):
        agree(function, add, fresh(lab, 5), fresh(lab, 5))
    assert states(function) == ["captured"]


def test_an_input_that_is_written_through_a_view_is_written_for_the_caller(lab: Lab) -> None:
    def fill(cache: list[Tensor], y: Tensor) -> None:
        cache[0][1:3].copy_(y)
        cache[1].t()[0] += y[0]

    function = cgraph.graphed(fill)
    for _ in range(3):
        agree(function, fill, [fresh(lab, 4, 3), fresh(lab, 3, 2)], fresh(lab, 2, 3)[:, :3])


def test_a_view_that_is_written_changes_what_it_is_a_view_of(lab: Lab) -> None:
    def negate(x: Tensor) -> None:
        x.neg_()

    function = cgraph.graphed(negate)
    for part in (slice(0, 4), slice(2, 6), slice(0, 8, 2), slice(1, 8, 2)):
        whole = fresh(lab, 8)
        expected = whole.clone()
        expected[part].neg_()
        function(whole[part])
        assert_close(whole, expected)


def test_a_written_input_with_gaps_or_transposed_is_written_in_its_place(lab: Lab) -> None:
    def scale(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(y)
        return x.sum(0)

    function = cgraph.graphed(scale)
    for _ in range(2):
        for make in (lambda w: w[:3, :3], lambda w: w[::2, 1:4][:3], lambda w: w.t()[:3, :3]):
            whole, y = fresh(lab, 6, 6), fresh(lab, 3, 3)
            expected = whole.clone()
            wanted = scale(make(expected), y)
            assert_close(function(make(whole), y), wanted)
            assert_close(whole, expected)


def test_a_mutated_input_that_is_returned_is_the_callers_tensor(lab: Lab) -> None:
    function = cgraph.graphed(lambda x: x.add_(1))
    for _ in range(3):
        x = fresh(lab, 4)
        expected = x + 1
        assert function(x) is x
        assert_close(x, expected)


def test_a_view_of_a_mutated_input_has_the_new_values(lab: Lab) -> None:
    def grow(x: Tensor) -> Tensor:
        x.add_(1)
        return x[1:]

    function = cgraph.graphed(grow)
    for _ in range(3):
        agree(function, grow, fresh(lab, 4))


def test_the_same_tensor_for_two_arguments_one_of_them_written(lab: Lab) -> None:
    def add(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return x + y

    function = cgraph.graphed(add)
    for _ in range(3):
        agree(function, add, fresh(lab, 4), fresh(lab, 4))
    for _ in range(3):
        x = fresh(lab, 4)
        other = x.clone()
        assert_close(function(x, x), add(other, other))
        assert_close(x, other)


def test_written_inputs_that_overlap_others_are_as_eager_has_them(lab: Lab) -> None:
    def swap(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x.mul_(2)
        y.add_(3)
        return x + y, x[1:], y

    function = cgraph.graphed(swap)
    for _ in range(2):
        for one, two in ((0, 2), (2, 0), (1, 1), (0, 4), (4, 0)):
            whole = fresh(lab, 8)
            other = whole.clone()
            found = function(whole[one : one + 4], whole[two : two + 4])
            expected = swap(other[one : one + 4], other[two : two + 4])
            assert_close(found, expected)
            assert_close(whole, other)
            del found
    assert states(function) == ["captured"]


def test_a_written_input_that_is_also_a_tensor_of_the_surroundings(lab: Lab) -> None:
    table = fresh(lab, 4)

    def add(x: Tensor) -> Tensor:
        x.add_(1)
        return x * table

    function = cgraph.graphed(add)
    for x in (fresh(lab, 4), table, fresh(lab, 4), table):
        wanted = x + 1
        expected = wanted * (wanted if x is table else table)
        assert_close(function(x), expected)
        assert_close(x, wanted)


def test_a_written_tensor_of_the_surroundings_is_written_once_for_each_call(lab: Lab) -> None:
    counter = torch.zeros((), dtype=torch.long, device=lab.device)

    def count(x: Tensor) -> Tensor:
        counter.add_(1)
        return x + counter

    function = cgraph.graphed(count)
    for number in range(1, 5):
        x = fresh(lab, 4)
        assert_close(function(x), x + number)
        assert counter.item() == number


def test_random_numbers_go_on_as_eager_ones_from_the_first_call_on(lab: Lab) -> None:
    def noisy(x: Tensor) -> Tensor:
        return dropout(x, 0.5) + torch.rand_like(x)

    function = cgraph.graphed(noisy)
    inputs = [fresh(lab, n) for n in (64, 64, 32, 64, 32, 16)]
    seed = int(torch.randint(1 << 30, ()))
    torch.manual_seed(seed)
    expected = [noisy(x) for x in inputs]
    after = random_state(lab)
    torch.manual_seed(seed)
    found = [function(x).clone() for x in inputs]
    assert_close(found, expected, rtol=0, atol=0)
    assert torch.equal(random_state(lab), after)


def test_warm_up_leaves_no_trace_in_a_batch_norm(lab: Lab) -> None:
    eager = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).to(lab.device)
    eager.requires_grad_(False)
    module = copy.deepcopy(eager)
    function = cgraph.graphed(lambda x: module(x))
    for training in (False, True, True, False, True):
        eager.train(training)
        module.train(training)
        for rows in (2, 3):
            x = fresh(lab, rows, 3, 6, 6)
            assert_close(function(x), eager(x))
            assert_close(dict(module.named_buffers()), dict(eager.named_buffers()))


def gradients(weight: Tensor) -> Callable[[Tensor], Tensor]:
    def add(x: Tensor) -> Tensor:
        loss = (x * weight).square().sum()
        loss.backward()
        return loss.detach()

    return add


def test_a_gradient_that_exists_is_added_to_once_for_each_call(lab: Lab) -> None:
    weight = fresh(lab, 4).requires_grad_()
    eager = weight.detach().clone().requires_grad_()
    weight.grad = fresh(lab, 4)
    eager.grad = weight.grad.clone()
    function = cgraph.graphed(gradients(weight))
    for _ in range(3):
        x = fresh(lab, 4)
        assert_close(function(x), gradients(eager)(x))
        assert_close(weight.grad, eager.grad)


def test_tensors_without_elements_are_arguments_and_results(lab: Lab) -> None:
    def mixed(x: Tensor, empty: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat([x, empty]) * 2, empty + 1

    function = cgraph.graphed(mixed)
    for _ in range(3):
        agree(function, mixed, fresh(lab, 3, 2), fresh(lab, 0, 2))
    assert states(function) == ["captured"]


def test_a_scalar_tensor_is_copied_and_no_constant(lab: Lab) -> None:
    def scaled(x: Tensor, factor: Tensor) -> Tensor:
        return x * factor

    function = cgraph.graphed(scaled)
    for _ in range(4):
        agree(function, scaled, fresh(lab, 4), fresh(lab, 1)[0])
        agree(function, scaled, fresh(lab, 1)[0], fresh(lab, 1)[0])
    assert states(function) == ["captured"] * 2


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.int16,
        torch.bfloat16,
        torch.complex64,
        torch.complex128,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ],
)
def test_inputs_of_each_dtype_are_copied(lab: Lab, dtype: torch.dtype) -> None:
    def converted(x: Tensor) -> tuple[Tensor, Tensor]:
        wide = x if x.is_complex() else x.float()
        return wide * 2, x.clone()

    function = cgraph.graphed(converted)
    for _ in range(3):
        for shape in ((3,), (2, 5)):
            x = (fresh(lab, *shape) * 8).abs().to(dtype)
            (a, b), (c, d) = function(x), converted(x)
            assert_close(a, c)
            assert b.dtype == dtype
            assert torch.equal(b.view(torch.uint8), d.view(torch.uint8))
            poison(a)
            del a, b
    assert states(function) == ["captured"] * 2


def test_an_input_that_wants_a_gradient_is_read_under_no_grad(lab: Lab) -> None:
    function = cgraph.graphed(lambda x: (x * 2, x))
    with torch.no_grad():
        for _ in range(3):
            x = fresh(lab, 4).requires_grad_()
            found = function(x)
            assert_close(found[0], x * 2)
            assert found[1] is x
            assert not found[0].requires_grad
            del found


def test_more_inputs_than_one_node_copies_are_all_seen(lab: Lab) -> None:
    def total(tensors: list[Tensor]) -> Tensor:
        return torch.stack(tensors).cumsum(0)

    function = cgraph.graphed(total)
    for _ in range(3):
        agree(function, total, [fresh(lab, 3) for _ in range(400)])


def test_a_captured_step_takes_no_gradient_as_an_argument(lab: Lab) -> None:
    weights = [nn.Parameter(torch.rand(3, device=lab.device)) for _ in range(2)]
    weights[1].data.copy_(weights[0].data)
    for weight in weights:
        weight.grad = torch.rand(3, device=lab.device)
    weights[1].grad.copy_(weights[0].grad)  # type: ignore[union-attr,arg-type]

    def over(weight: nn.Parameter) -> Callable[[Tensor], Tensor]:
        def step(x: Tensor) -> Tensor:
            (weight * weight).sum().backward()
            return x * 2

        return step

    graphed, eager = cgraph.graphed(over(weights[0])), over(weights[1])
    for shares in (False, True, False):
        x = fresh(lab, 3)
        mine, right = (one.grad if shares else x for one in weights)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert torch.equal(graphed(mine), eager(right))
        assert torch.equal(weights[0].grad, weights[1].grad)  # type: ignore[arg-type]
