"""``cgraph.loop``: what a run publishes, its end, and its state, as by the same number of calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import cgraph
from cgraph.errors import ArgumentError, CgraphWarning, StateError
from lab import Lab, fresh


class Decoder:
    """A step of a model: it changes its state in place, and ends rows by a token."""

    def __init__(self, lab: Lab, rows: int = 3) -> None:
        self.table, self.weight = fresh(lab, 10, 8), fresh(lab, 8, 10)
        self.device, self.rows = lab.device, rows

    def state(self) -> tuple[Tensor, Tensor, Tensor]:
        token = torch.arange(self.rows, device=self.device)
        place = torch.zeros(1, dtype=torch.long, device=self.device)
        return token, place, torch.zeros(self.rows, dtype=torch.bool, device=self.device)

    def __call__(self, token: Tensor, place: Tensor, done: Tensor) -> None:
        scores = torch.tanh(self.table[token]) @ self.weight + place * 0.3
        token.copy_(scores.argmax(-1))
        place.add_(1)
        done.logical_or_(token == 7)

    def steps(self, count: int, *, until: bool) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """Return what so many calls give, or as many as it takes; and the state after them."""
        state, tokens = self.state(), []
        for _ in range(count):
            self(*state)
            tokens.append(state[0].cpu().clone())
            if until and bool(state[2].all()):
                break
        return tokens, state


def alike(found: Any, expected: Any) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(torch.equal(one.cpu(), other.cpu()) for one, other in pairs)


@pytest.mark.parametrize("unroll", ["auto", 1])
@pytest.mark.parametrize("until", [None, "done"])
def test_a_run_makes_the_same_steps_as_calls(lab: Lab, unroll: Any, until: str | None) -> None:
    decoder = Decoder(lab)
    tokens, after = decoder.steps(12, until=until is not None)
    state = decoder.state()
    options: dict[str, Any] = {"max_steps": 12, "until": until, "emit": "token", "unroll": unroll}
    run = cgraph.loop(decoder.__call__, *state, **options)
    assert alike([*run], tokens)
    assert run.steps == len(tokens)
    assert alike(run.result(), after)
    assert run.is_over


@pytest.mark.parametrize("unroll", [1, 4, 16])
def test_a_loop_ends_at_each_step_that_the_flag_says(lab: Lab, unroll: int) -> None:
    def count(left: Tensor, done: Tensor) -> None:
        left.sub_(1)
        done.copy_(left <= 0)

    looped = cgraph.loop(max_steps=80, until="done", emit="left", unroll=unroll)(count)
    left = torch.zeros(2, dtype=torch.long, device=lab.device)
    done = torch.zeros(2, dtype=torch.bool, device=lab.device)
    for steps in range(1, 82):
        left.copy_(torch.tensor([steps, 1]))
        run = looped(left, done)
        values = [int(one[0]) for one in run]
        assert values == [*range(steps - 1, max(-1, steps - 81), -1)], steps
        assert run.steps == min(steps, 80)


def test_a_step_may_return_the_next_state(lab: Lab) -> None:
    x, y = fresh(lab, 4), fresh(lab, 4)
    one, other = x.clone(), y.clone()
    for _ in range(5):
        one, other = other, one * 0.5 + other
    run = cgraph.loop(lambda x, y: (y, x * 0.5 + y), x, y, max_steps=5)
    assert [*run] == [0, 1, 2, 3, 4]
    assert torch.allclose(run.result()[0], one)
    assert torch.allclose(y, other)


def test_several_tensors_are_published_with_their_types(lab: Lab) -> None:
    def step(x: Tensor, n: Tensor, flag: Tensor) -> None:
        x.mul_(2)
        n.add_(1)
        flag.logical_not_()

    x = torch.ones(3, 2, device=lab.device, dtype=torch.float16)
    n, flag = torch.zeros((), dtype=torch.long, device=lab.device), x[:, 0] > 0
    run = cgraph.loop(step, x, n, flag, max_steps=3, emit=("n", flag, "x"))
    for number, (count, is_set, value) in enumerate(run):
        assert (count.dtype, int(count)) == (torch.long, number + 1)
        assert is_set.tolist() == [bool(number % 2)] * 3
        assert torch.equal(value, torch.full((3, 2), 2.0 ** (number + 1), dtype=torch.float16))


def test_a_loop_is_captured_once_for_each_place_of_its_tensors(lab: Lab) -> None:
    @cgraph.loop(max_steps=3)
    def step(x: Tensor) -> None:
        x.add_(1)

    x, y = torch.zeros(4, device=lab.device), torch.zeros(4, device=lab.device)
    for _ in range(3):
        step(x).result()
    assert step.report().captures == 1
    step(y).result()
    step(x).result()
    assert step.report().captures == 2
    assert (x[0].item(), y[0].item()) == (12, 3)


def test_a_value_that_the_step_reads_counts_in_each_run(lab: Lab) -> None:
    class Scale:
        factor = 2.0

        def __call__(self, x: Tensor) -> None:
            x.mul_(self.factor)

    scale = Scale()
    looped = cgraph.loop(max_steps=2)(scale)
    x = torch.ones(4, device=lab.device)
    for factor, expected in ((2.0, 4), (3.0, 36), (2.0, 144)):
        scale.factor = factor
        looped(x).result()
        assert x[0].item() == expected
    assert looped.report().captures == 2


@pytest.mark.parametrize("by_data", [True, False])
def test_a_tensor_that_is_replaced_between_runs_counts_in_the_later_one(
    lab: Lab, by_data: bool
) -> None:
    model = torch.nn.Linear(3, 3, device=lab.device)
    looped = cgraph.loop(max_steps=2)(model.forward)
    for number in range(3):
        x, new = fresh(lab, 3), fresh(lab, 3, 3)
        if by_data:
            model.weight.data = new
        else:
            model.weight = torch.nn.Parameter(new)
        expected = model(model(x)).detach()
        run = looped(x)
        assert torch.allclose(run.result()[0], expected, atol=1e-5), number
        assert run.report.how == "launch"


def test_what_a_condition_reads_is_kept_as_at_the_capture(lab: Lab) -> None:
    class Step:
        def __init__(self) -> None:
            self.table = torch.full((4,), 2.0, device=lab.device)
            self.adds = torch.ones(1, dtype=torch.bool, device=lab.device)

        def add(self, x: Tensor) -> None:
            x.add_(self.table)

        def __call__(self, x: Tensor, n: Tensor) -> None:
            n.add_(1)
            cgraph.when(n > 1, self.add, x)
            cgraph.when(self.adds, self.add, x)

    step = Step()
    looped = cgraph.loop(max_steps=3)(step)
    x, n = torch.zeros(4, device=lab.device), torch.zeros(1, device=lab.device)
    looped(x, n).result()
    step.table = torch.full((4,), 100.0, device=lab.device)
    step.adds.data = torch.zeros(1, dtype=torch.bool, device=lab.device)
    others = [torch.full((4,), 7.0, device=lab.device) for _ in range(50)]
    x.zero_()
    n.zero_()
    assert looped(x, n).result()[0].tolist() == [10.0] * 4
    assert len(others) == 50


def test_without_a_state_there_is_no_run_yet(lab: Lab) -> None:
    x = torch.zeros(1, device=lab.device)
    looped = cgraph.loop(lambda x: x + 1, max_steps=3, emit="x")
    assert [one.item() for one in looped(x)] == [1, 2, 3]

    def double() -> None:
        x.mul_(2)

    cgraph.loop(double, max_steps=2)().result()
    assert x.item() == 12


def test_a_recurrent_cell_is_the_step_of_a_loop(lab: Lab) -> None:
    cell = torch.nn.GRUCell(3, 4, device=lab.device).requires_grad_(False)
    given, state = fresh(lab, 2, 3), torch.zeros(2, 4, device=lab.device)
    expected = state
    for _ in range(5):
        expected = cell(given, expected)
    run = cgraph.loop(lambda state: cell(given, state), state, max_steps=5)
    assert torch.allclose(run.result()[0], expected, atol=1e-5)
    assert run.report.how == "launch"


def test_state_that_changes_places_is_copied_back_right(lab: Lab) -> None:
    x, y = fresh(lab, 4), fresh(lab, 4)
    one, other = x.clone(), y.clone()
    cgraph.loop(lambda x, y: (y, x), x, y, max_steps=3).result()
    assert torch.equal(x, other)
    assert torch.equal(y, one)


def test_wrong_arguments_are_refused_by_name(lab: Lab) -> None:
    x = torch.zeros(4, device=lab.device)

    def step(x: Tensor) -> None:
        x.add_(1)

    for text, state, options in (
        ("max_steps is 0, expected a number", (x,), {"max_steps": 0}),
        ("unroll is -1, expected a number", (x,), {"max_steps": 3, "unroll": -1}),
        ("unroll is 2, expected a divisor of max_steps=3", (x,), {"unroll": 2}),
        (
            "'y' is no tensor, and none of the step's parameters that have one: x",
            (x,),
            {"emit": "y"},
        ),
        ("state 0 is of int, expected a tensor", (3,), {}),
        ("state 0 requires a gradient", (x.clone().requires_grad_(),), {}),
        ("until is of torch.float32, expected booleans", (x,), {"until": "x"}),
        ("until is \\['x'\\], expected one tensor", (x,), {"until": ["x"]}),
        ("until is on meta, expected a tensor on", (x,), {"until": torch.ones(1, device="meta")}),
        ("published tensor 0 is on meta", (x,), {"emit": torch.ones(1, device="meta")}),
        ("published tensor 0 has the strides .*, expected a contiguous", (x,), {"emit": x[::2]}),
        (
            "is a conjugate or negative view",
            (x,),
            {"emit": torch.ones(1, device=x.device, dtype=torch.cfloat).conj()},
        ),
        ("emit has 9 tensors, expected at most 8", (x,), {"emit": [x] * 9}),
    ):
        given: dict[str, Any] = {"max_steps": 3, **options}
        with pytest.raises(ArgumentError, match=text):
            cgraph.loop(step, *state, **given)  # type: ignore[arg-type]
    for text, wrong in (
        ("returned 2 values, expected None or the next 1 tensor of the state", lambda x: (x, x)),
        ("returned dict, expected None or the next 1 tensor", lambda x: {"x": x}),
        ("returned NoneType for state 0, expected torch.float32", lambda x: (None,)),
        (r"returned torch.float64\[4\] on .* for state 0, expected torch.float32", Tensor.double),
        (r"returned torch.float32\[1\] on .* for state 0", lambda x: x[:1]),
    ):
        with pytest.raises(ArgumentError, match=text):
            cgraph.loop(wrong, x, max_steps=3)


def test_an_error_of_the_step_comes_out_and_leaves_the_state(lab: Lab) -> None:
    x = torch.zeros(4, device=lab.device)

    def fails(x: Tensor) -> None:
        x.add_(1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cgraph.loop(fails, x, max_steps=3)
    assert not x.any()


def reads(x: Tensor) -> None:
    x.add_(float(x.sum()))


def reads_in_condition(x: Tensor) -> None:
    x.add_(1)
    cgraph.when(x > 0, lambda x: x.add_(float(x.sum())), x)


@cgraph.eager_break
def doubled(x: Tensor) -> None:
    x.mul_(2)


def breaks(x: Tensor) -> None:
    x.add_(1)
    doubled(x)


class Assigns:
    last: Tensor | None = None

    def __call__(self, x: Tensor) -> None:
        x.add_(1)
        self.last = x * 2


class Counts:
    count = 0

    def __call__(self, x: Tensor) -> None:
        self.count += 1
        x.add_(self.count)


@pytest.mark.parametrize(
    ("make", "text", "code"),
    [
        (lambda: reads, "reads a value on the host", "CG-HOST-READ"),
        (lambda: breaks, "it breaks at doubled", "CG-LOOP-STEP"),
        (Assigns, "it assigns self.last", "CG-LOOP-STEP"),
        (lambda: reads_in_condition, "reads a value on the host", "CG-HOST-READ"),
        (Counts, r"test_loops.py:\d+ `self.count \+= 1`: .*changes self.count", "CG-LOOP-STEP"),
    ],
)
@pytest.mark.filterwarnings("ignore::cgraph.errors.EagerWarning")
def test_the_host_makes_the_steps_that_a_loop_cannot_hold(
    lab: Lab, make: Any, text: str, code: str
) -> None:
    expected, plain = torch.ones(2, device=lab.device), make()
    values = []
    for _ in range(6):
        plain(expected)
        values.append(expected.cpu().clone())
    x = torch.ones(2, device=lab.device)
    done = torch.zeros(1, dtype=torch.bool, device=lab.device)
    told = f"{text}.*The host makes each step of the loop. Fix: (keep it in a tensor|let the step)"
    with pytest.warns(CgraphWarning, match=told):
        run = cgraph.loop(make(), x, max_steps=6, emit="x", until=done)
    assert alike([*run], values)
    assert torch.equal(run.result()[0], expected)
    assert (run.steps, run.report.how, run.report.code) == (6, "steps", code)
    assert text.rpartition(".*")[2] in str(run.report)


@pytest.mark.parametrize("unroll", [1, 4])
def test_a_stage_of_a_step_runs_where_its_flags_are_set(lab: Lab, unroll: int) -> None:
    def step(x: Tensor, total: Tensor) -> None:
        x.add_(1)
        half = x // 2

        def add(total: Tensor) -> None:
            total.add_(x * 2 + half)

        cgraph.when(x % 3 == 0, add, total)
        total.add_(half)
        cgraph.when(total > 30, lambda total: total.sub_(30), total)

    def numbers() -> tuple[Tensor, Tensor]:
        return tuple(torch.zeros(2, dtype=torch.long, device=lab.device) for _ in range(2))  # type: ignore[return-value]

    expected, values = numbers(), []
    for _ in range(12):
        step(*expected)
        values.append(expected[1].cpu().clone())
    state = numbers()
    run = cgraph.loop(step, *state, max_steps=12, emit="total", unroll=unroll)
    assert alike([*run], values)
    assert run.report.how == "launch"
    assert alike(state, expected)


def test_a_condition_inside_another_one_is_made_by_the_host(lab: Lab) -> None:
    def inner(x: Tensor) -> None:
        cgraph.when(x > 3, lambda x: x.add_(10), x)

    def step(x: Tensor) -> None:
        x.add_(1)
        cgraph.when(x > 2, inner, x)

    x = torch.zeros(1, dtype=torch.long, device=lab.device)
    with pytest.warns(CgraphWarning, match="a condition inside another one"):
        run = cgraph.loop(step, x, max_steps=5)
    assert run.result()[0].item() == 25


def test_a_graphed_function_leaves_conditions_to_the_host(lab: Lab) -> None:
    @cgraph.graphed
    def function(x: Tensor, total: Tensor) -> Tensor:
        cgraph.when(x > 0, lambda total: total.add_(x), total)
        return x + total

    total = torch.zeros(1, device=lab.device)
    for value in (1.0, 2.0, -4.0, 3.0):
        x = torch.full((1,), value, device=lab.device)
        before = total.clone()
        result = function(x, total)
        assert torch.equal(total, before + max(value, 0))
        assert torch.equal(result, x + total)


def test_a_loop_does_not_begin_inside_a_capture(lab: Lab) -> None:
    x = torch.ones(4, device=lab.device)
    with pytest.raises(StateError, match="a loop was to begin inside a capture"):
        with cgraph.graph(cgraph.CUDAGraph()):
            cgraph.loop(lambda x: x + 1, x, max_steps=2)


def test_a_loop_of_a_paused_pool_is_refused(lab: Lab) -> None:
    pool, x = cgraph.MemPool(), torch.zeros(4, device=lab.device)
    looped = cgraph.loop(max_steps=3, pool=pool)(lambda x: x * 2 + 1)
    looped(x).result()
    pool.pause()
    with pytest.raises(StateError):
        looped(x)
    pool.resume()
    looped(x).result()
    assert x[0].item() == 63
