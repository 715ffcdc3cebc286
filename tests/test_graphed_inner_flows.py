"""Breaks that a backward pass inside of a graphed function comes back through."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cgraph
from broken import raising_in, scaled
from cgraph import eager_break
from cgraph.errors import CaptureError
from flow_calls import Around, check, twins
from graphed_calls import near, numbers, quiet, same_gradients, states
from inner_flow_calls import Step, both, loss_of, passes, same_parameters, training
from lab import Lab, fresh
from networks import leaf


class Attended(nn.Module):
    """Has a break without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(6, 18), nn.Linear(6, 3)

    @eager_break
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.T / q.abs().max().item(), -1) @ v

    def forward(self, x: Tensor) -> Tensor:
        return self.outward(self.attend(*self.inward(x).chunk(3, -1)) + x)


class Routed(nn.Module):
    """Has a break that uses some of the parameters in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(6, 6), nn.Linear(6, 3)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    @eager_break(materialize_grads=True)
    def routed(self, x: Tensor, choice: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number in choice.unique().tolist():
            rows = (choice == number).nonzero()[:, 0]
            out.index_add_(0, rows, self.experts[number](x[rows]).tanh())
        return out

    def forward(self, x: Tensor, choice: Tensor) -> Tensor:
        hidden = self.inward(x).relu()
        return self.outward(self.routed(hidden, choice) + hidden)


@pytest.mark.parametrize("warmup", [0, 1, 3])
@pytest.mark.parametrize("clears", [False, True])
def test_a_training_step_with_a_break_goes_as_in_eager(lab: Lab, warmup: int, clears: bool) -> None:
    def make(net: nn.Module) -> Step:
        return training(net, clears)

    graphed, eagerly, mine, eager = both(lab, Attended(), make, warmup=warmup)
    for _ in range(6):
        x = fresh(lab, 4, 6)
        assert near(graphed(x), eagerly(x))
        if not clears:
            mine.zero_grad()
            eager.zero_grad()
    assert same_parameters(mine, eager)
    assert graphed.report().captured == 1
    (key,) = [key for key in graphed.report().keys if key.state == "captured"]
    assert [name.split(" (")[0] for name in key.breaks] == [
        "Attended.attend",
        "gradients of Attended.attend",
    ]
    assert key.replays >= 4


def test_parameters_that_a_break_materializes_get_zeros_where_it_uses_them_not(lab: Lab) -> None:
    graphed, eagerly, mine, eager = both(lab, Routed(), training)
    for chosen in ([0, 2, 2, 0], [1, 1, 1, 1], [0, 1, 2, 0], [2, 2, 2, 2]):
        x, choice = fresh(lab, 4, 6), torch.tensor(chosen, device=lab.device)
        assert near(graphed(x, choice), eagerly(x, choice))
        assert same_gradients(mine, eager)
        for number, expert in enumerate(mine.experts):
            # Where no unit of a row is above zero, the weights get zeros all the same.
            assert expert.bias.grad.any() == (number in chosen)
    assert same_parameters(mine, eager)
    (key,) = graphed.report().keys
    # The first call makes the optimizer's state.
    assert (key.state, key.eager_calls, key.replays) == ("captured", 1, 3)


def test_what_a_break_materializes_outside_of_a_step_is_that_of_eager(lab: Lab) -> None:
    graphed, mine, eager = twins(lab, Routed())
    for chosen in ([0, 2, 2, 0], [1, 1, 1, 1]):
        for net in (mine, eager):
            net.zero_grad()
        check(graphed, mine, eager, leaf(lab, 4, 6), torch.tensor(chosen, device=lab.device))
        assert all(one.grad is not None for one in mine.parameters())
    assert numbers(graphed) == (1, 2, 0)


def test_a_break_that_uses_parameters_without_saying_so_runs_eagerly(lab: Lab) -> None:
    class Plain(Attended):
        def __init__(self) -> None:
            super().__init__()
            self.middle = nn.Linear(6, 6)

        @eager_break
        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.middle(q) + k * v

    graphed, eagerly, mine, eager = both(lab, Plain(), training)
    with pytest.warns(UserWarning, match="materialize_grads=True"):
        for _ in range(3):
            x = fresh(lab, 4, 6)
            assert near(graphed(x), eagerly(x))
    assert same_parameters(mine, eager)
    assert states(graphed) == ["eager"]


@pytest.mark.parametrize("way", ["argument", "materialize_grads"])
def test_a_break_that_uses_the_same_parameters_in_each_call_is_captured(lab: Lab, way: str) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.middle, self.last = (nn.Linear(6, 6) for _ in range(3))

        @eager_break
        def given(self, x: Tensor, weight: Tensor) -> Tensor:
            return nn.functional.linear(x, weight) * x.abs().max().item()

        @eager_break(materialize_grads=True)
        def found(self, x: Tensor) -> Tensor:
            return self.middle(x) * x.abs().max().item()

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x).tanh()
            x = self.given(x, self.middle.weight) if way == "argument" else self.found(x)
            # What a segment and a break use has both gradients.
            return self.last(self.middle(x))

    graphed, eagerly, mine, eager = both(lab, Mixed(), training)
    for _ in range(5):
        x = fresh(lab, 4, 6)
        assert near(graphed(x), eagerly(x))
        assert same_gradients(mine, eager)
    assert same_parameters(mine, eager)
    assert graphed.report().captured == 1 and states(graphed).count("eager") == 0


def test_a_gradient_of_an_argument_comes_back_through_a_break(lab: Lab) -> None:
    net = Attended().to(lab.device)

    def slope(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(loss_of(net(x)), x)[0]

    graphed = cgraph.graphed(slope)
    for _ in range(4):
        x = fresh(lab, 4, 6)
        assert near(graphed(x), slope(x))
    assert numbers(graphed) == (1, 4, 0)


def test_second_derivatives_through_a_break_run_eagerly(lab: Lab) -> None:
    way = eager_break(lambda x: torch.sin(x) * x)

    def curve(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(way(x * 2).sum(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), x)[0]

    graphed = cgraph.graphed(curve)
    with pytest.warns(UserWarning, match="no second derivatives"):
        for _ in range(3):
            x = fresh(lab, 4, 6)
            assert near(graphed(x), curve(x))
    assert states(graphed) == ["eager"]


def test_two_backward_passes_come_back_through_one_call_of_a_break(lab: Lab) -> None:
    def make(net: nn.Module) -> Step:
        def step(x: Tensor) -> Tensor:
            net.zero_grad()
            result = net(x)
            result.square().mean().backward(retain_graph=True)
            loss = loss_of(result)
            loss.backward()
            return loss.detach()

        return step

    graphed, eagerly, mine, eager = both(lab, Attended(), make)
    for _ in range(4):
        x = fresh(lab, 4, 6)
        assert near(graphed(x), eagerly(x))
        assert same_gradients(mine, eager)
    assert graphed.report().captured == 1 and states(graphed).count("eager") == 0


def test_gradients_of_several_calls_of_a_break_add_up(lab: Lab) -> None:
    def make(net: nn.Module) -> Step:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)

        def step(x: Tensor) -> None:
            optimizer.zero_grad()
            for part in x.chunk(3):
                loss_of(net(part)).backward()
            optimizer.step()

        return step

    graphed, eagerly, mine, eager = both(lab, Attended(), make)
    for _ in range(4):
        x = fresh(lab, 6, 6)
        graphed(x)
        eagerly(x)
        assert same_gradients(mine, eager)
    assert same_parameters(mine, eager)
    (key,) = [key for key in graphed.report().keys if key.state == "captured"]
    assert len(key.breaks) == 6


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_break_that_is_checkpointed_inside_a_step_has_the_gradients_of_eager(
    lab: Lab, reentrant: bool
) -> None:
    class Checkpointed(Attended):
        def attended(self, *parts: Tensor) -> Tensor:
            return self.attend(*parts).tanh()

        def forward(self, x: Tensor) -> Tensor:
            parts = self.inward(x).chunk(3, -1)
            y = checkpoint(
                lambda *given: self.attend(*given).tanh(), *parts, use_reentrant=reentrant
            )
            return self.outward(y + x)

    graphed, eagerly, mine, eager = both(lab, Checkpointed(), training)
    for _ in range(4):
        x = fresh(lab, 4, 6)
        assert near(graphed(x), eagerly(x))
        assert same_gradients(mine, eager)
    assert same_parameters(mine, eager)
    assert graphed.report().captured == 1


def test_random_numbers_of_a_step_with_a_break_are_those_of_eager(lab: Lab) -> None:
    class Dropping(Attended):
        @eager_break
        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return nn.functional.dropout(q * k, 0.3) + v

        def forward(self, x: Tensor) -> Tensor:
            x = nn.functional.dropout(x, 0.4)
            return nn.functional.dropout(super().forward(x), 0.2)

    graphed, eagerly, mine, eager = both(lab, Dropping(), training)
    for seed in range(4):
        x = fresh(lab, 4, 6)
        torch.manual_seed(seed)
        found = graphed(x).clone()
        torch.manual_seed(seed)
        assert near(found, eagerly(x))
        assert same_gradients(mine, eager)


def test_a_step_under_autocast_with_a_break_goes_as_in_eager(lab: Lab) -> None:
    def make(net: nn.Module) -> Step:
        step = training(net)

        def cast(x: Tensor) -> Tensor:
            with torch.autocast(lab.device, torch.bfloat16):
                return step(x)

        return cast

    graphed, eagerly, _, _ = both(lab, Attended(), make)
    for _ in range(4):
        x = fresh(lab, 4, 6)
        assert torch.allclose(graphed(x), eagerly(x), rtol=2e-2, atol=2e-2)
    assert graphed.report().captured == 1 and states(graphed).count("eager") == 0


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_what_a_break_of_a_step_raises_comes_out_and_the_next_call_works(
    lab: Lab, where: str
) -> None:
    raises: list[str] = []
    between = eager_break(raising_in(raises))
    graphed, eagerly, mine, eager = both(lab, Around(between), passes)
    for turn in range(4):
        x = fresh(lab, 4, 6)
        if turn in (1, 2):
            raises.append(where)
            with pytest.raises(KeyError, match="mine"):
                graphed(x)
            raises.clear()
        assert near(graphed(x), eagerly(x))
        assert same_gradients(mine, eager)
    assert graphed.report().captured == 1


def test_a_leaf_that_a_break_uses_only_later_is_refused(lab: Lab) -> None:
    class Hidden:
        __slots__ = ("weight",)

    hidden = Hidden()
    hidden.weight = None
    between = eager_break(lambda x: x * 2 if hidden.weight is None else x * hidden.weight)
    graphed, eagerly, mine, eager = both(lab, Around(between), training)
    for _ in range(2):
        x = fresh(lab, 4, 6)
        assert near(graphed(x), eagerly(x))
    hidden.weight = leaf(lab, 6)
    with pytest.raises(CaptureError, match=r"uses a tensor of shape \[6\]"):
        graphed(fresh(lab, 4, 6))
    hidden.weight = None
    x = fresh(lab, 4, 6)
    assert near(graphed(x), eagerly(x))
    assert same_parameters(mine, eager)


def test_hooks_of_parameters_that_a_break_uses_run_in_each_step(lab: Lab) -> None:
    def make(net: nn.Module) -> Step:
        net.experts[0].weight.register_hook(lambda gradient: gradient * 0.5)
        return training(net)

    graphed, eagerly, mine, eager = both(lab, Routed(), make)
    for _ in range(4):
        x, choice = fresh(lab, 6, 6), torch.tensor([0, 1, 2, 0, 1, 2], device=lab.device)
        assert near(graphed(x, choice), eagerly(x, choice))
        assert same_gradients(mine, eager)
    assert same_parameters(mine, eager)


def test_a_break_that_no_backward_pass_comes_through_keeps_no_history(lab: Lab) -> None:
    seen: list[weakref.ref[Tensor]] = []

    @eager_break
    def noting(loss: Tensor) -> None:
        doubled = loss * 2
        seen.append(weakref.ref(doubled))

    def make(net: nn.Module) -> Step:
        step = training(net)

        def noted(x: Tensor) -> Tensor:
            loss = step(x)
            noting(loss_of(net(x)))
            return loss

        return noted

    graphed, eagerly, mine, eager = both(lab, Attended(), make)
    for _ in range(3):
        x = fresh(lab, 4, 6)
        assert near(graphed(x), eagerly(x))
    gc.collect()
    assert len(seen) >= 6 and all(one() is None for one in seen)
    assert same_parameters(mine, eager)


def test_a_history_that_a_break_keeps_and_a_step_goes_back_through_runs_eagerly(lab: Lab) -> None:
    kept: list[Tensor] = [torch.zeros(())]

    @eager_break
    def keeping(x: Tensor) -> Tensor:
        kept[0] = x.square().mean()
        return x * 2

    def make(net: nn.Module) -> Step:
        def step(x: Tensor) -> Tensor:
            net.zero_grad()
            loss = loss_of(net(x)) + kept[0]
            loss.backward()
            return loss.detach()

        return step

    graphed, eagerly, mine, eager = both(lab, Around(keeping), make)
    with quiet():
        for _ in range(3):
            x = fresh(lab, 4, 6)
            assert near(graphed(x), eagerly(x))
            assert same_gradients(mine, eager)
    assert states(graphed) == ["eager"]


def test_a_step_with_a_break_is_debugged(lab: Lab) -> None:
    graphed, eagerly, mine, eager = both(lab, Attended(), training, debug="sync")
    for _ in range(4):
        x = fresh(lab, 4, 6)
        assert near(graphed(x), eagerly(x))
    assert same_parameters(mine, eager)
    assert graphed.report().captured == 1


def test_a_break_calls_a_module_that_is_captured_itself(lab: Lab) -> None:
    middle = cgraph.graphed(scaled)
    graphed, eagerly, mine, eager = both(
        lab, Around(eager_break(lambda x: middle(x) + x)), training
    )
    for _ in range(4):
        x = fresh(lab, 4, 6)
        assert near(graphed(x), eagerly(x))
    assert same_parameters(mine, eager)


@pytest.mark.parametrize("clears", [False, True])
def test_breaks_beside_the_backward_pass_of_a_step_are_no_hindrance(lab: Lab, clears: bool) -> None:
    logged: list[float] = []

    @eager_break
    def log(loss: Tensor) -> None:
        logged.append(loss.item())

    @eager_break
    def reduce(gradients: list[Tensor]) -> None:
        for one in gradients:
            one.mul_(0.5)

    def make(net: nn.Module) -> Step:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def step(x: Tensor) -> Tensor:
            if clears:
                optimizer.zero_grad()
            loss = loss_of(net(x))
            log(loss)
            loss.backward()
            reduce([one.grad for one in net.parameters() if one.grad is not None])
            optimizer.step()
            return loss.detach()

        return step

    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    graphed, eagerly, mine, eager = both(lab, net, make)
    for _ in range(4):
        x = fresh(lab, 4, 6)
        assert near(graphed(x), eagerly(x))
        assert near(torch.tensor(logged[-2]), torch.tensor(logged[-1]))
        assert same_gradients(mine, eager)
        if not clears:
            mine.zero_grad()
            eager.zero_grad()
    assert same_parameters(mine, eager)
    assert numbers(graphed) == (1, 4, 0)
