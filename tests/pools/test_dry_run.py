"""`dry_run`: its numbers are those of a real capture, and it leaves nothing behind."""

from __future__ import annotations

import copy
import functools
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn

import cgraph
from bits import same
from cgraph.errors import ArgumentError, CaptureError, CgraphError
from lab import Lab, SimLab, captured, fresh
from networks import network, random_state
from pools import MIB, capture, handles


class Trainer:
    """A network in training, with gradients and an optimizer that has made its first step."""

    def __init__(self, lab: Lab, optimiser: Callable[..., torch.optim.Optimizer]) -> None:
        self.model = network(lab, nn.Dropout(0.5))
        self.x, self.target = fresh(lab, 5, 6), fresh(lab, 5, 3)
        self.optimiser = optimiser(self.model.parameters())
        self.step()

    def step(self) -> Tensor:
        self.optimiser.zero_grad()
        loss = nn.functional.mse_loss(self.model(self.x), self.target)
        loss.backward()
        self.optimiser.step()
        return loss

    def tensors(self) -> list[Tensor]:
        """Return all tensors that a step changes."""
        state = [value for one in self.optimiser.state.values() for value in one.values()]
        return [*self.model.parameters(), *(one for one in state if isinstance(one, Tensor))]

    def grads(self) -> list[Tensor]:
        return [one.grad for one in self.model.parameters() if one.grad is not None]


OPTIMISERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": functools.partial(torch.optim.Adam, lr=0.1, capturable=True),
}


def still_captures(lab: Lab) -> None:
    """Require a capture after the dry run to be right."""
    x = fresh(lab, 64)
    graph, y = captured(lab, x)
    x.normal_()
    graph.replay()
    assert torch.equal(y, x * 2 + 1)


def work(x: Tensor) -> Tensor:
    return torch.cat([torch.relu(x * 2), x + 1])


def test_the_numbers_are_those_of_a_real_capture(lab: Lab) -> None:
    x = fresh(lab, MIB)
    found = cgraph.dry_run(work, x).memory
    with cgraph.record_memory():
        graph, _ = capture(lambda: work(x))
    real = graph.memory()
    for name in ("reserved", "held", "nodes", "peak", "workspace"):
        assert getattr(found, name) == getattr(real, name), name
    assert found.held == 8 * MIB and found.nodes == 4


def test_the_seconds_are_of_warm_up_capture_and_instantiation(lab: Lab) -> None:
    x = fresh(lab, 64)
    found = cgraph.dry_run(work, x)
    assert found.warmup_seconds > 0 and found.memory.seconds > 0 and found.instantiate_seconds > 0
    assert found.device == found.memory.reserved + found.memory.exec


def test_what_the_function_writes_is_as_before_and_no_memory_is_left(lab: Lab) -> None:
    x, y, before = fresh(lab, 64), fresh(lab, 3, 3), handles()
    copies = x.clone(), y.clone()

    def change() -> Tensor:
        x.add_(1)
        y[1:].normal_()
        return x.mul_(y.sum())

    for warmup in (0, 1, 3):
        cgraph.dry_run(change, warmup=warmup)
        assert same(x, copies[0]) and same(y, copies[1])
    assert handles() == before and not cgraph.is_current_stream_capturing()
    still_captures(lab)


@pytest.mark.parametrize("name", OPTIMISERS)
@pytest.mark.parametrize("kind", ["method", "closure"])
def test_a_training_step_leaves_parameters_gradients_and_random_state_as_before(
    lab: Lab, kind: str, name: str
) -> None:
    trainer = Trainer(lab, OPTIMISERS[name])
    model, optimiser, x = trainer.model, trainer.optimiser, trainer.x

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimiser.step()
        return loss

    steps: dict[str, Callable[[], Tensor]] = {
        "method": trainer.step,
        "closure": closure,
    }
    before, grads = [one.detach().clone() for one in trainer.tensors()], trainer.grads()
    contents, state = [grad.clone() for grad in grads], random_state(lab)
    found = cgraph.dry_run(steps[kind], warmup=2)
    assert found.memory.nodes > 10
    assert all(map(same, trainer.tensors(), before))
    assert all(map(same, grads, contents)) and len(grads) == 4
    assert all(now is then for now, then in zip(trainer.grads(), grads, strict=True))
    assert torch.equal(random_state(lab), state)


# A copied optimizer has forgotten torch's warning, or need not warn.
@pytest.mark.filterwarnings("ignore:This instance was constructed with capturable=True")
def test_a_step_after_a_dry_run_is_the_step_without_it(sim: SimLab) -> None:
    trainer = Trainer(sim, OPTIMISERS["adam"])
    twin = copy.deepcopy(trainer)
    cgraph.dry_run(trainer.step)
    state = torch.get_rng_state()
    trainer.step()
    torch.set_rng_state(state)
    twin.step()
    assert all(map(same, trainer.tensors(), twin.tensors()))


def test_a_gradient_that_was_none_is_none_again(lab: Lab) -> None:
    model, x = network(lab), fresh(lab, 5, 6)
    cgraph.dry_run(lambda: model(x).sum().backward())
    assert all(parameter.grad is None for parameter in model.parameters())


_layer: Any = None
_input: Any = None


def step_of_globals() -> None:
    _layer.zero_grad()
    _layer(_input).exp().sum().backward()


def test_gradients_of_a_global_module_are_the_same_objects_again(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = nn.Linear(6, 3).to(lab.device), fresh(lab, 5, 6)
    monkeypatch.setitem(globals(), "_layer", layer)
    monkeypatch.setitem(globals(), "_input", x)
    layer(x).sum().backward()
    grad = layer.weight.grad
    assert grad is not None
    before = grad.clone()
    cgraph.dry_run(step_of_globals)
    assert layer.weight.grad is grad and same(grad, before)


def test_a_function_in_a_list_that_it_closes_over_is_run(lab: Lab) -> None:
    x, steps = fresh(lab, 64), list[Callable[[], Tensor]]()
    steps.append(lambda: x * len(steps))
    assert cgraph.dry_run(steps[0]).memory.nodes == 1


class Broken(Exception):
    pass


@pytest.mark.parametrize("calls", [1, 2], ids=["in the warm-up", "in the capture"])
def test_an_exception_of_the_function_comes_out_and_all_is_undone(lab: Lab, calls: int) -> None:
    x, before, seen = fresh(lab, 64), handles(), list[int]()
    copy, state, stream = x.clone(), random_state(lab), lab.current()

    def broken() -> None:
        seen.append(1)
        x.add_(torch.rand_like(x))
        if len(seen) == calls:
            raise Broken("mine")

    with pytest.raises(Broken, match="mine"):
        cgraph.dry_run(broken)
    assert len(seen) == calls and same(x, copy) and torch.equal(random_state(lab), state)
    assert handles() == before and lab.current() == stream
    assert not cgraph.is_current_stream_capturing()
    still_captures(lab)


def test_a_function_that_cannot_be_captured_raises_and_all_is_undone(lab: Lab) -> None:
    x, before = fresh(lab, 64), handles()
    copy = x.clone()

    def syncs() -> float:
        return x.add_(1).sum().item()

    with pytest.raises(RuntimeError, match="captur"):
        cgraph.dry_run(syncs)
    assert same(x, copy) and handles() == before
    still_captures(lab)


def test_each_driver_call_failing_once_undoes_everything(sim: SimLab) -> None:
    simulator, x = sim.simulator, torch.randn(64)
    cgraph.dry_run(x.add_, 1)
    start = len(simulator.calls())
    cgraph.dry_run(x.add_, 1)
    calls, before, failures = len(simulator.calls()) - start, x.clone(), 0
    live = simulator.live()
    for n in range(calls):
        simulator.fail_call(n, 719)
        try:
            cgraph.dry_run(x.add_, 1)
        except CgraphError as error:
            failures += 1
            error.__traceback__ = None
        simulator.clear_faults()
        assert same(x, before) and not cgraph.is_current_stream_capturing()
        assert handles() == set()
    cgraph.dry_run(x.add_, 1)
    handles()
    assert failures > 3 and simulator.live() == live


@pytest.mark.parametrize("warmup", [0, 1, 3])
def test_the_function_is_called_warmup_times_and_once_in_the_capture(lab: Lab, warmup: int) -> None:
    x, seen = fresh(lab, 64), list[bool]()

    def look() -> Tensor:
        seen.append(cgraph.is_current_stream_capturing())
        return x * 2

    cgraph.dry_run(look, warmup=warmup)
    assert seen == [False] * warmup + [True]


@pytest.mark.parametrize("warmup", [-1, True, 1.5, None, "x"])
def test_a_warmup_that_is_no_count_is_refused_before_any_call(lab: Lab, warmup: Any) -> None:
    seen: list[int] = []
    with pytest.raises(ArgumentError, match=r"warmup is .*, expected"):
        cgraph.dry_run(lambda: seen.append(1), warmup=warmup)
    assert not seen


def test_a_dry_run_inside_a_capture_is_refused_and_the_capture_goes_on(lab: Lab) -> None:
    x, graph = fresh(lab, 64), cgraph.CUDAGraph()
    with cgraph.graph(graph):
        y = x * 2
        with pytest.raises(CaptureError, match="inside a capture"):
            cgraph.dry_run(work, x)
        y = y + 1
    x.normal_()
    graph.replay()
    assert torch.equal(y, x * 2 + 1)


def test_modules_methods_partials_and_keywords_are_called_as_they_are(lab: Lab) -> None:
    model, x, y = network(lab), fresh(lab, 5, 6), fresh(lab, 5, 6)
    ways = [
        cgraph.dry_run(model, x),
        cgraph.dry_run(x.add_, y, alpha=2),
        cgraph.dry_run(torch.add, input=x, other=y),
        cgraph.dry_run(functools.partial(torch.add, x, alpha=3), y),
    ]
    assert ways[0].memory.nodes >= 3
    assert [one.memory.nodes for one in ways[1:]] == [1, 1, 1]
    assert [one.memory.held for one in ways[1:]] == [0, 512, 512]


def test_the_graph_is_not_in_the_ledger_and_its_name_is_not_used_again(lab: Lab) -> None:
    x = fresh(lab, 64)
    found = cgraph.dry_run(work, x).memory
    graph, _ = captured(lab, x)
    in_ledger = [one.name for one in cgraph.memory().graphs]
    assert found.name not in in_ledger and graph.memory().name in in_ledger


def test_the_report_is_printed_drawn_and_fit_for_json(lab: Lab, tmp_path: Path) -> None:
    x, text = fresh(lab, 1024), io.StringIO()
    found = cgraph.dry_run(work, x)
    found.show(text)
    assert "held 8.0 KiB" in text.getvalue() and "4 nodes" in text.getvalue()
    assert len(text.getvalue().splitlines()) == 2
    assert json.loads(json.dumps(found.as_dict()))["device"] == found.device
    found.plot(tmp_path / "pool.svg")
    drawn = " ".join(ElementTree.parse(tmp_path / "pool.svg").getroot().itertext())
    assert "peak 16.0 KiB" in drawn and "held 8.0 KiB" in drawn


def test_an_optimiser_without_a_state_has_none_afterwards(lab: Lab) -> None:
    model = torch.nn.Linear(4, 4, device=lab.device)
    optimiser = torch.optim.Adam(model.parameters(), capturable=True)
    x = fresh(lab, 3, 4)

    def step() -> None:
        optimiser.zero_grad()
        model(x).square().sum().backward()
        optimiser.step()

    before = [parameter.detach().clone() for parameter in model.parameters()]
    cgraph.dry_run(step)
    assert not optimiser.state
    assert all(map(torch.equal, model.parameters(), before))
    step()
    assert len(optimiser.state) == 2


def test_work_that_is_still_to_be_done_is_not_lost(lab: Lab) -> None:
    total, x = fresh(lab, 4), fresh(lab, 4)
    expected = total + 1
    if lab.device == "cuda":
        torch.cuda._sleep(100_000_000)
    total.add_(1)
    cgraph.dry_run(lambda: total.add_(x))
    assert torch.equal(total, expected)


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_a_graphed_function_is_not_replayed(lab: Lab, calls: int) -> None:
    total = fresh(lab, 4)

    def add(x: Tensor) -> Tensor:
        total.add_(x)
        return x * 2

    function = cgraph.graphed(add)
    for _ in range(calls):
        function(fresh(lab, 4))
    before, nodes = total.clone(), cgraph.dry_run(add, fresh(lab, 4)).memory.nodes
    assert cgraph.dry_run(function, fresh(lab, 4)).memory.nodes == nodes
    assert torch.equal(total, before)


def test_graphs_that_share_a_pool_take_what_a_ladder_of_them_takes(lab: Lab) -> None:
    weight = fresh(lab, 512, 512)
    x = fresh(lab, 2048, 512)
    before = x.clone()

    def steps(x: Tensor) -> list[Callable[[], object]]:
        def step(rows: int) -> Tensor:
            x[:rows].add_(1)
            return (torch.tanh(x[:rows] @ weight) @ weight).relu()

        return [functools.partial(step, rows) for rows in (2048, 1024, 768)]

    found = cgraph.dry_run_shared(steps(x))
    assert same(x, before)
    assert found[0].memory.reserved > 0
    assert [one.memory.reserved for one in found[1:]] == [0, 0]
    ladder = cgraph.GraphLadder()
    for number, step in enumerate(steps(x)):
        ladder.capture(number, step, before=step)
    real = [ladder.graph(number).memory().reserved for number in range(3)]
    assert [one.memory.reserved for one in found] == real
    assert [one.memory.nodes for one in found] == [
        ladder.graph(number).memory().nodes for number in range(3)
    ]


def test_all_functions_of_a_shared_pool_are_named_where_one_cannot_be_called(lab: Lab) -> None:
    with pytest.raises(ArgumentError, match=r"functions\[1\] is 3.*something that can be called"):
        cgraph.dry_run_shared([lambda: fresh(lab, 4), 3])  # type: ignore[list-item]
    assert cgraph.dry_run_shared([]) == ()
