"""The findings of `cgraph.explain`, and the line in the error of a failing capture."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import cgraph
from cgraph.errors import ArgumentError, CaptureError
from lab import Lab, SimLab, fresh

Body = Callable[[Lab, torch.Tensor], object]


def item(lab: Lab, x: torch.Tensor) -> float:
    return x.sum().item()


def as_float(lab: Lab, x: torch.Tensor) -> float:
    return float(x.sum())


def branch(lab: Lab, x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        return x
    return -x


def equal(lab: Lab, x: torch.Tensor) -> bool:
    return torch.equal(x, x + 1)


def to_host(lab: Lab, x: torch.Tensor) -> torch.Tensor:
    return x.cpu()


def to_list(lab: Lab, x: torch.Tensor) -> list[float]:
    return x.tolist()


def text(lab: Lab, x: torch.Tensor) -> str:
    return repr(x)


def wait_for_all(lab: Lab, x: torch.Tensor) -> None:
    lab.sync()


def wait_for_stream(lab: Lab, x: torch.Tensor) -> None:
    lab.current().synchronize()


def nonzero(lab: Lab, x: torch.Tensor) -> torch.Tensor:
    return torch.nonzero(x)


def read_mask(lab: Lab, x: torch.Tensor) -> torch.Tensor:
    return x[x > 0]


def write_mask(lab: Lab, x: torch.Tensor) -> None:
    x[x > 0] = x.abs().max()


def unique(lab: Lab, x: torch.Tensor) -> torch.Tensor:
    return x.unique()


@functools.cache
def generator_of(device: str) -> torch.Generator:
    """Return a generator from before a capture: a CUDA generator cannot be made inside."""
    return torch.Generator(device=device)


def own_generator(lab: Lab, x: torch.Tensor) -> torch.Tensor:
    generator = generator_of(lab.device)
    return torch.rand(4, device=lab.device, generator=generator)


def steps_on_the_host(lab: Lab, x: torch.Tensor) -> None:
    weight = torch.nn.Parameter(x.clone())
    weight.grad = x
    torch.optim.Adam([weight]).step()


def fork(lab: Lab, x: torch.Tensor) -> None:
    side = lab.stream()
    lab.fork(side)
    with lab.use(side):
        x.mul(2)


def wait_for_outside(lab: Lab, x: torch.Tensor) -> None:
    lab.join(lab.stream())


def elsewhere(lab: Lab, x: torch.Tensor) -> None:
    with lab.use(lab.stream()):
        x.mul(2)


def seed(lab: Lab, x: torch.Tensor) -> None:
    torch.manual_seed(3)


REFUSED: list[tuple[Body, str]] = [
    (seed, "seed"),
    (item, "host read"),
    (as_float, "host read"),
    (branch, "branch"),
    (equal, "host read"),
    (to_host, "host read"),
    (to_list, "host read"),
    (text, "host read"),
    (wait_for_all, "wait"),
    (wait_for_stream, "wait"),
    (nonzero, "shape"),
    (read_mask, "shape"),
    (write_mask, "shape"),
    (unique, "shape"),
    (own_generator, "generator"),
    (steps_on_the_host, "optimizer"),
    (fork, "unjoined stream"),
    (wait_for_outside, "outside wait"),
]


def fine_step(lab: Lab, x: torch.Tensor) -> torch.Tensor:
    y = torch.relu(x * 2)[1:].clone()
    y[y > 1] = 0.5
    index = torch.randint(0, 3, (4,), device=lab.device)
    return torch.where(y > 0, y, -y).sum() + x[index].sum()


def forks_and_joins(lab: Lab, x: torch.Tensor) -> torch.Tensor:
    first, second = lab.stream(), lab.stream()
    lab.fork(first)
    with lab.use(first):
        y = x.mul(2)
        lab.fork(second)
        with lab.use(second):
            z = y.add(1)
        lab.join(second)
    lab.join(first)
    return y + z


def trains(lab: Lab, x: torch.Tensor) -> None:
    weight = torch.nn.Parameter(x.clone())
    optimizer = torch.optim.AdamW([weight], capturable=True)
    (weight * x).square().sum().backward()
    optimizer.step()


FINE: list[Body] = [fine_step, forks_and_joins, trains]


@pytest.mark.parametrize(("body", "kind"), REFUSED, ids=lambda one: getattr(one, "__name__", ""))
def test_what_a_capture_refuses_is_found(lab: Lab, body: Body, kind: str) -> None:
    explanation = cgraph.explain(body, lab, fresh(lab, 64))
    assert not explanation.ok
    (finding,) = [one for one in explanation.findings if one.kind == kind]
    assert finding.severity == "refused"
    assert finding.count == 1
    assert finding.fix


@pytest.mark.parametrize("body", FINE, ids=lambda one: one.__name__)
def test_what_a_capture_takes_is_not_found(lab: Lab, body: Body) -> None:
    x = fresh(lab, 64)
    body(lab, x)
    explanation = cgraph.explain(body, lab, x)
    assert explanation.findings == (), str(explanation)
    with cgraph.graph(cgraph.CUDAGraph()):
        body(lab, x)


# On the simulator a copy from a CPU tensor to itself is nothing.
SAME_ON_THE_SIMULATOR = (to_host, to_list, text, write_mask)


@pytest.mark.parametrize("body", [body for body, _ in REFUSED if body not in SAME_ON_THE_SIMULATOR])
def test_what_is_refused_makes_a_capture_fail(lab: Lab, body: Body) -> None:
    x = fresh(lab, 64)
    with pytest.raises(RuntimeError), cgraph.graph(cgraph.CUDAGraph()):
        x + 1
        body(lab, x)


@pytest.mark.parametrize(
    ("body", "kind", "operator"),
    [
        (lambda x: f"{x}", "host read", "Tensor.__format__"),
        (lambda x: f"{x.sum():.2f}", "host read", "aten.item"),
        (lambda x: x.numpy(), "host read", "Tensor.numpy"),
        (lambda x: np.asarray(x), "host read", "Tensor.__array__"),
        (lambda x: x * torch.tensor([2.0] * 64), "host copy", "aten.lift_fresh"),
        (lambda x: x * torch.tensor(2.0), None, None),
        (lambda x: f"{x.shape} {x.dtype}", None, None),
    ],
)
def test_the_simulator_finds_what_would_be_copies_between_host_and_device(
    sim: SimLab, body: Callable[[torch.Tensor], object], kind: str | None, operator: str | None
) -> None:
    explanation = cgraph.explain(body, fresh(sim, 64))
    found = [(one.kind, one.operator, one.count) for one in explanation.findings]
    assert found == ([] if kind is None else [(kind, operator, 1)])


def test_work_on_a_stream_that_was_not_forked_is_frozen(lab: Lab) -> None:
    explanation = cgraph.explain(elsewhere, lab, fresh(lab, 64))
    assert explanation.ok
    (finding,) = explanation.findings
    assert (finding.kind, finding.severity) == ("outside stream", "frozen")
    assert finding.operator == "aten.mul"
    assert finding.source == "x.mul(2)"


def test_the_default_stream_cannot_wait_for_a_capture(sim: SimLab) -> None:
    default = sim.simulator.default_stream

    def body() -> None:
        default.wait_stream(sim.current())

    (finding,) = cgraph.explain(body).findings
    assert finding.kind == "default stream"
    with pytest.raises(RuntimeError), cgraph.graph(cgraph.CUDAGraph()):
        body()


def test_a_finding_names_operator_line_and_how_often(lab: Lab) -> None:
    def body(x: torch.Tensor) -> float:
        total = 0.0
        for row in range(5):
            total += x[row].item()
        return total

    (finding,) = cgraph.explain(body, fresh(lab, 8)).findings
    assert finding.operator == "aten.item"
    assert finding.file == __file__
    assert finding.line == body.__code__.co_firstlineno + 3
    assert finding.source == "total += x[row].item()"
    assert finding.count == 5


def test_a_backward_pass_is_watched(lab: Lab) -> None:
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * grad.sum().item()

    def body(x: torch.Tensor) -> None:
        Reads.apply(x).sum().backward()

    (finding,) = cgraph.explain(body, fresh(lab, 8).requires_grad_()).findings
    assert finding.source == "return grad * grad.sum().item()"


def test_the_run_is_real_and_its_result_is_kept(lab: Lab) -> None:
    x = fresh(lab, 64)
    expected = x + 3

    def body(x: torch.Tensor, *, more: float) -> torch.Tensor:
        return x.add_(more)

    explanation = cgraph.explain(body, x, more=3.0)
    assert explanation.ok
    assert explanation.result is x
    assert torch.equal(x, expected)


def test_an_exception_of_the_function_comes_out_with_what_was_found(lab: Lab) -> None:
    mine = ValueError("the function's own")

    def body(x: torch.Tensor) -> None:
        x.sum().item()
        raise mine

    before = lab.current()
    with pytest.raises(ValueError) as caught:
        cgraph.explain(body, fresh(lab, 8))
    assert caught.value is mine
    (note,) = mine.__notes__
    assert "x.sum().item()" in note
    assert lab.current() == before


def test_an_exception_before_any_finding_has_no_note(lab: Lab) -> None:
    def body() -> None:
        raise ValueError

    with pytest.raises(ValueError) as caught:
        cgraph.explain(body)
    assert not hasattr(caught.value, "__notes__")


def test_nothing_is_watched_afterwards(lab: Lab) -> None:
    def synchronizes() -> None:
        lab.sync()
        lab.current().synchronize()

    def found() -> list[tuple[str, int, int]]:
        explanation = cgraph.explain(synchronizes)
        return [(one.kind, one.line, one.count) for one in explanation.findings]

    first = found()
    synchronizes()
    fresh(lab, 8).sum().item()
    assert len(first) >= 2 and found() == first


def test_an_explanation_reads_as_a_table_and_as_plain_values(lab: Lab) -> None:
    explanation = cgraph.explain(item, lab, fresh(lab, 8))
    shown = io.StringIO()
    explanation.show(shown)
    for part in ("aten.item", "test_explain.py:", "return x.sum().item()", "after the replay"):
        assert part in shown.getvalue()
    plain = explanation.to_dict()
    assert plain["ok"] is False
    assert plain["findings"][0]["operator"] == "aten.item"
    assert "nothing" in str(cgraph.explain(fine_step, lab, fresh(lab, 8)))


def test_bad_arguments_are_refused(lab: Lab) -> None:
    with pytest.raises(ArgumentError, match="expected something that can be called"):
        cgraph.explain(3)  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match="inside a capture"), cgraph.graph(cgraph.CUDAGraph()):
        cgraph.explain(fine_step, lab, fresh(lab, 8))


# Errors of a failing capture.

LINES: list[tuple[Body, str, str]] = [
    (item, "`return x.sum().item()`", "reads a value on the host"),
    (branch, "`if x.sum() > 0:`", "decide in Python"),
    (equal, "`return torch.equal(x, x + 1)`", "reads a value on the host"),
    (nonzero, "`return torch.nonzero(x)`", "makes a shape"),
    (read_mask, "`return x[x > 0]`", "makes a shape"),
    (unique, "`return x.unique()`", "makes a shape"),
    (wait_for_stream, "`lab.current().synchronize()`", "waits for the device"),
    (wait_for_all, "synchronize()`", "waits for the device"),
    (own_generator, "generator=generator)`", "register_generator_state"),
    (wait_for_outside, "wait_stream(stream)`", "not part of it"),
]


@pytest.mark.parametrize(
    ("body", "line", "what"), LINES, ids=lambda one: getattr(one, "__name__", "")
)
def test_a_failing_captures_note_names_the_line_and_the_fix(
    lab: Lab, body: Body, line: str, what: str
) -> None:
    x = fresh(lab, 64)
    generator_of(lab.device)
    with pytest.raises(RuntimeError) as caught, cgraph.graph(cgraph.CUDAGraph()):
        x + 1
        body(lab, x)
    (note,) = caught.value.__notes__
    first = note.splitlines()[0]
    assert ".py:" in first
    assert line in first
    assert what in first


def test_an_exception_of_the_users_own_has_no_note_even_if_it_speaks_of_captures(lab: Lab) -> None:
    x = fresh(lab, 64)
    for mine in (ValueError("no capture"), RuntimeError("a capture of my own, by item()")):
        with pytest.raises(type(mine)) as caught, cgraph.graph(cgraph.CUDAGraph()):
            x + 1
            raise mine
        assert not hasattr(caught.value, "__notes__")


def test_a_users_exception_after_a_broken_capture_has_only_the_drivers_reason(lab: Lab) -> None:
    x = fresh(lab, 64)
    with pytest.raises(ValueError) as caught, cgraph.graph(cgraph.CUDAGraph()):
        try:
            x.sum().item()
        except RuntimeError:
            raise ValueError("the body's own") from None
    (note,) = caught.value.__notes__
    assert "the driver says" in note
    assert len(note.splitlines()) == 1


def test_a_text_that_fails_to_decode_still_gets_the_line(sim: SimLab) -> None:
    x = torch.randn(8)
    wrongly_decoded = b"\xff".decode

    with pytest.raises(UnicodeDecodeError) as caught, cgraph.graph(cgraph.CUDAGraph()):
        try:
            nonzero(sim, x)
        except RuntimeError:
            wrongly_decoded()
    (note,) = caught.value.__notes__
    assert "`wrongly_decoded()`" in note.splitlines()[0]


def test_an_exception_whose_text_cannot_be_had_still_comes_out(lab: Lab) -> None:
    class Mute(RuntimeError):
        def __str__(self) -> str:
            raise UnicodeError("no text")

    x, mine = fresh(lab, 8), Mute()
    with pytest.raises(Mute) as caught, cgraph.graph(cgraph.CUDAGraph()):
        x + 1
        raise mine
    assert caught.value is mine


@pytest.mark.gpu
def test_tensors_of_the_host_are_found_on_cuda() -> None:
    x, host = torch.randn(8, device="cuda"), torch.randn(8)
    pinned = torch.randn(8).pin_memory()
    number, index = torch.randn(()), torch.randint(0, 8, (3,))

    def body() -> torch.Tensor:
        y = x + host.to("cuda")
        y.copy_(host)
        y.copy_(pinned)
        y = y + pinned.to("cuda", non_blocking=True)
        y = y * torch.tensor(2.0, device="cuda")
        y = y[index].sum() * number
        return y * number.item()

    explanation = cgraph.explain(body)
    first = body.__code__.co_firstlineno
    assert list(dict.fromkeys((one.kind, one.line - first) for one in explanation.findings)) == [
        ("host copy", 1),
        ("host copy", 2),
        ("host copy", 3),
        ("host copy", 5),
        ("host copy", 6),
        ("host operand", 6),
        ("host number", 7),
    ]


@pytest.mark.gpu
def test_an_operator_that_waits_inside_is_found_on_cuda() -> None:
    x, before = torch.randn(64, device="cuda"), torch.cuda.get_sync_debug_mode()
    for _ in range(2):
        # Without limits it reads the smallest and the largest value; its schema does not say so.
        (finding,) = cgraph.explain(torch.histc, x, 4).findings
        assert (finding.severity, finding.operator) == ("refused", "aten.histc")
        assert torch.cuda.get_sync_debug_mode() == before


def test_a_graphed_function_inside_another_one_is_looked_into(lab: Lab) -> None:
    inner = cgraph.graphed(lambda x: x * 2)
    reads = cgraph.graphed(lambda x: x * x.sum().item())
    x = fresh(lab, 4)
    assert cgraph.explain(lambda: inner(x) + 1).ok
    (finding,) = cgraph.explain(lambda: reads(x) + 1).findings
    assert finding.kind == "host read"
    assert inner.report().keys == () and reads.report().keys == ()


def test_numbers_that_vmap_makes_of_tensors_are_explained(lab: Lab) -> None:
    x = fresh(lab, 4)
    found = cgraph.explain(lambda: torch.vmap(lambda one: one * 2 + 1)(x))
    assert found.ok and torch.equal(found.result, x * 2 + 1)


def test_operators_whose_shape_or_branch_needs_a_value_are_found(lab: Lab) -> None:
    x = fresh(lab, 4)

    def chosen() -> object:
        with torch.no_grad():
            return torch.cond(x.sum() > 0, lambda one: one * 2, lambda one: one + 1, (x,))

    chosen()  # it loads a compiler
    assert [one.kind for one in cgraph.explain(lambda: x.to_sparse()).findings] == ["shape"]
    assert "branch" in [one.kind for one in cgraph.explain(chosen).findings]


def test_changes_of_python_and_printing_are_listed(lab: Lab) -> None:
    state = {"cache": [], "calls": 0}

    def step(x: torch.Tensor) -> torch.Tensor:
        state["cache"].append(x)  # type: ignore[attr-defined]
        state["calls"] += 1  # type: ignore[operator]
        print("one more call")
        return x * 2

    found = {(one.kind, one.operator) for one in cgraph.explain(step, fresh(lab, 3)).findings}
    assert {("python state", "state['calls']"), ("print", "print")} <= found
    assert any(name.startswith("state['cache']") for kind, name in found if kind == "python state")
