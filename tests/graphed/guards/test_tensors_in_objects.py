"""Tensors that a graphed function finds in objects behind other objects, and in classes."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from graphed_calls import near, states
from lab import Lab, fresh
from networks import network

Find = Callable[[Any], tuple[Any, Callable[[Any], None]]]


@dataclass
class State:
    """The state of a request."""

    k: Tensor


class Engine:
    """An engine with the state of the served request."""

    def __init__(self, state: State) -> None:
        self.state = state
        # The same by other ways.
        self.states = {"now": [state]}
        self.names = SimpleNamespace(state=state)
        self.pool = [state, State(state.k.clone())]

    def run(self, x: Tensor) -> Tensor:
        self.state.k.add_(x)
        return self.state.k * 2

    def run_listed(self, x: Tensor) -> Tensor:
        self.states["now"][0].k.add_(x)
        return self.states["now"][0].k * 2

    def run_named(self, x: Tensor) -> Tensor:
        self.names.state.k.add_(x)
        return self.names.state.k * 2


def of_attribute(state: State) -> tuple[Any, Callable[[State], None]]:
    engine = Engine(state)
    return cgraph.graphed(engine.run), lambda other: setattr(engine, "state", other)


def of_containers(state: State) -> tuple[Any, Callable[[State], None]]:
    engine = Engine(state)
    return cgraph.graphed(engine.run_listed), lambda other: engine.states.update(now=[other])


def of_namespace(state: State) -> tuple[Any, Callable[[State], None]]:
    engine = Engine(state)
    engine.state = None  # type: ignore[assignment]
    return cgraph.graphed(engine.run_named), lambda other: setattr(engine.names, "state", other)


def of_closure(state: State) -> tuple[Any, Callable[[State], None]]:
    def run(x: Tensor) -> Tensor:
        state.k.add_(x)
        return state.k * 2

    def replace(other: State) -> None:
        nonlocal state
        state = other

    return cgraph.graphed(run), replace


def of_module(state: State) -> tuple[Any, Callable[[State], None]]:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cache = state

        def forward(self, x: Tensor) -> Tensor:
            self.cache.k.add_(x)
            return self.cache.k * 2

    module = Cached()
    return cgraph.graphed(module), lambda other: setattr(module, "cache", other)


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("find", [of_attribute, of_containers, of_namespace, of_closure, of_module])
def test_an_object_with_a_cache_that_is_replaced_is_noticed(
    lab: Lab, find: Find, is_kept: bool
) -> None:
    state = State(fresh(lab, 4))
    graphed, replace = find(state)
    kept = []
    for _ in range(3):
        for _ in range(3):
            x = fresh(lab, 4)
            wanted = state.k + x
            assert torch.equal(graphed(x), wanted * 2)
            assert torch.equal(state.k, wanted)
        if is_kept:
            kept.append(state)
        state = State(fresh(lab, 4))
        replace(state)
    (key,) = graphed.report().keys
    assert key.state == "captured"
    assert sum(one.count for one in key.rerecorded) == 2


@pytest.mark.parametrize("find", [of_attribute, of_containers, of_namespace, of_closure, of_module])
def test_a_cache_that_an_object_gets_anew_is_noticed(lab: Lab, find: Find) -> None:
    state = State(fresh(lab, 4))
    graphed, _ = find(state)
    for turn in range(6):
        if turn == 3:
            state.k = fresh(lab, 4)
        x = fresh(lab, 4)
        wanted = state.k + x
        assert torch.equal(graphed(x), wanted * 2)
        assert torch.equal(state.k, wanted)


class Shared:
    weight: Tensor

    @cgraph.graphed
    def scaled(self, x: Tensor) -> Tensor:
        return x * self.weight


class Derived(Shared):
    pass


class Part(nn.Module):
    weight: Any

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight  # type: ignore[no-any-return]


def test_a_tensor_of_a_class_that_is_replaced_is_noticed(lab: Lab) -> None:
    Shared.weight = Part.weight = fresh(lab, 3)
    part = Part()
    calls = [Shared().scaled, Derived().scaled, cgraph.graphed(part)]
    for turn in range(6):
        if turn == 3:
            Shared.weight = Part.weight = fresh(lab, 3)
        for call in calls:
            x = fresh(lab, 3)
            assert torch.equal(call(x), x * Shared.weight)
    for call in calls:
        assert states(call) == ["captured"]
    # The object has one of its own from here on.
    part.weight = fresh(lab, 3)
    x = fresh(lab, 3)
    assert torch.equal(calls[-1](x), x * part.weight)


def test_an_object_that_leads_to_what_is_found_nearby_may_be_replaced(lab: Lab) -> None:
    class Runner:
        def __init__(self) -> None:
            self.k = fresh(lab, 4)
            self.request = SimpleNamespace(cache=self.k)

        @cgraph.graphed
        def run(self, x: Tensor) -> Tensor:
            return x * self.k

    runner = Runner()
    for _ in range(8):
        x = fresh(lab, 4)
        assert torch.equal(runner.run(x), x * runner.k)
        runner.request = SimpleNamespace(cache=runner.k)
    (key,) = runner.run.report().keys
    assert key.state == "captured" and not key.rerecorded


def test_one_of_several_objects_with_parts_of_a_table_may_be_chosen(lab: Lab) -> None:
    class Server:
        def __init__(self) -> None:
            self.caches = [fresh(lab, 4), fresh(lab, 4)]
            self.pool = [State(one) for one in self.caches]
            self.state = self.pool[0]

        def run(self, x: Tensor) -> Tensor:
            return x * self.state.k

    server = Server()
    graphed = cgraph.graphed(server.run)
    for turn in range(6):
        server.state = server.pool[turn // 3]
        x = fresh(lab, 4)
        assert torch.equal(graphed(x), x * server.state.k)
    (key,) = graphed.report().keys
    assert key.state == "captured" and sum(one.count for one in key.rerecorded) == 1


def test_objects_may_refer_to_each_other(lab: Lab) -> None:
    class Node:
        def __init__(self, k: Tensor) -> None:
            self.k = k
            self.others: list[Any] = [self]

    first = Node(fresh(lab, 4))
    nodes = [Node(fresh(lab, 4)) for _ in range(50)]
    for node in nodes:
        node.others += [first, *nodes]
    first.others += nodes
    graphed = cgraph.graphed(lambda x: x * first.others[3].k)
    for turn in range(4):
        if turn == 2:
            nodes[2].k = fresh(lab, 4)
        x = fresh(lab, 4)
        assert torch.equal(graphed(x), x * first.others[3].k)


class Closed:
    """A state whose attributes cannot be read any more."""

    @property
    def k(self) -> Tensor:
        raise RuntimeError("the request is closed")


def test_code_of_the_users_is_not_run_to_look_at_objects(lab: Lab) -> None:
    class Odd:
        @property
        def cache(self) -> Tensor:
            raise RuntimeError("not ready")

    odd = Odd()
    vars(odd)["cache"] = fresh(lab, 4)
    Odd.__module__ = None  # type: ignore[assignment]
    engine = SimpleNamespace(state=State(fresh(lab, 4)), odd=odd)

    def run(x: Tensor) -> Tensor:
        return x * 2 if isinstance(engine.state, Closed) else x * engine.state.k

    graphed = cgraph.graphed(run, on_fail="raise")
    for turn in range(4):
        if turn == 2:
            engine.state = Closed()
        x = fresh(lab, 4)
        assert torch.equal(graphed(x), run(x))


def test_a_dictionary_with_defaults_is_not_changed_by_looking(lab: Lab) -> None:
    states_of: Any = defaultdict(lambda: State(torch.zeros(4, device=lab.device)))
    states_of["a"] = State(fresh(lab, 4))

    def run(x: Tensor) -> Tensor:
        return x * states_of["a"].k if "a" in states_of else x * 2

    graphed = cgraph.graphed(run)
    for turn in range(4):
        if turn == 2:
            del states_of["a"]
        x = fresh(lab, 4)
        assert torch.equal(graphed(x), x * 2 if turn >= 2 else run(x))
        assert ("a" in states_of) == (turn < 2)


def many_attributes() -> dict[str, Any]:
    large = SimpleNamespace(**{f"a{place}": place for place in range(10_000)})
    larger = SimpleNamespace(**{f"a{place}": [place] for place in range(10_000)})
    return {"large": large, "larger": larger}


def many_objects() -> dict[str, Any]:
    words = [SimpleNamespace(piece=SimpleNamespace(parts=[[place]])) for place in range(4000)]
    return {"words": words}


@pytest.mark.parametrize("neighbours", [many_attributes, many_objects])
def test_large_neighbours_hide_no_state(lab: Lab, neighbours: Callable[[], dict[str, Any]]) -> None:
    engine = SimpleNamespace(**neighbours(), state=State(fresh(lab, 4)))
    graphed = cgraph.graphed(lambda x: x * engine.state.k)
    for turn in range(4):
        if turn == 2:
            engine.state = State(fresh(lab, 4))
        x = fresh(lab, 4)
        assert torch.equal(graphed(x), x * engine.state.k)


def test_requests_that_come_and_go_with_a_shared_cache_need_no_new_capture(lab: Lab) -> None:
    class Engine:
        def __init__(self) -> None:
            self.pool = SimpleNamespace(pages=fresh(lab, 4))
            self.live: dict[int, Any] = {}

        def run(self, x: Tensor) -> Tensor:
            return x * self.pool.pages

    engine = Engine()
    graphed = cgraph.graphed(engine.run)
    for turn in range(12):
        engine.live = {turn: SimpleNamespace(pages=engine.pool.pages)}
        setattr(engine, f"current{turn}", engine.live[turn])
        x = fresh(lab, 4)
        assert torch.equal(graphed(x), x * engine.pool.pages)
    (key,) = graphed.report().keys
    assert key.state == "captured" and not key.rerecorded


def test_a_tensor_that_is_read_by_two_ways_is_followed_by_both(lab: Lab) -> None:
    shared = fresh(lab, 4)
    engine = SimpleNamespace(
        emb=SimpleNamespace(w=shared), block=SimpleNamespace(head=SimpleNamespace(w=shared))
    )

    def run(x: Tensor) -> Tensor:
        return x * engine.emb.w + engine.block.head.w

    graphed = cgraph.graphed(run)
    for turn in range(6):
        if turn == 2:
            engine.block.head.w = fresh(lab, 4)
        if turn == 4:
            engine.emb = SimpleNamespace(w=fresh(lab, 4))
        x = fresh(lab, 4)
        assert torch.equal(graphed(x), run(x))


def test_a_plain_attribute_of_a_module_behind_an_object_is_followed(lab: Lab) -> None:
    net = nn.Linear(4, 4).to(lab.device)
    net.scale = fresh(lab, 4)
    engine = SimpleNamespace(model=net)
    graphed = cgraph.graphed(lambda x: engine.model(x) * engine.model.scale)
    with torch.no_grad():
        for turn in range(4):
            if turn == 2:
                net.scale = fresh(lab, 4)
            x = fresh(lab, 3, 4)
            assert torch.allclose(graphed(x), net(x) * net.scale)


class Trainer:
    """A model and its optimizer, as frameworks hold them."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


Make = Callable[[Trainer], Callable[..., Any]]


def passes(trainer: Trainer, x: Tensor) -> Tensor:
    trainer.model.zero_grad()
    loss: Tensor = trainer.model(x).square().mean()
    loss.backward()
    return loss.detach()


def by_namespace(trainer: Trainer) -> Callable[..., Any]:
    space = SimpleNamespace(of=trainer)
    return lambda x: passes(space.of, x)


def by_default(trainer: Trainer) -> Callable[..., Any]:
    return lambda x, of=trainer: passes(of, x)


def by_method(trainer: Trainer) -> Callable[..., Any]:
    class Holds:
        def __init__(self) -> None:
            self.context = SimpleNamespace(trainer=trainer)

        def step(self, x: Tensor) -> Tensor:
            return passes(self.context.trainer, x)

    return Holds().step


def by_closure(trainer: Trainer) -> Callable[..., Any]:
    return lambda x: passes(trainer, x)


def twins(lab: Lab) -> tuple[Trainer, Trainer]:
    trainer = Trainer(network(lab))
    return trainer, Trainer(copy.deepcopy(trainer.model))


def agree(mine: Trainer, eager: Trainer) -> bool:
    pairs = zip(mine.model.parameters(), eager.model.parameters(), strict=True)
    for one, other in pairs:
        if (one.grad is None) != (other.grad is None) or not near(one, other):
            return False
        if one.grad is not None and other.grad is not None and not near(one.grad, other.grad):
            return False
    return True


@pytest.mark.parametrize("options", [{}, {}, {}])
@pytest.mark.parametrize("make", [by_namespace, by_default, by_method, by_closure])
def test_a_model_behind_an_object_gets_its_gradients(
    lab: Lab, make: Make, options: dict[str, Any]
) -> None:
    mine, eager = twins(lab)
    function, expected = make(mine), make(eager)
    graphed = cgraph.graphed(function, **options)
    for _ in range(5):
        x = fresh(lab, 4, 6)
        assert near(graphed(x), expected(x))
        for trainer in (mine, eager):
            nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        assert agree(mine, eager)
        for trainer in (mine, eager):
            trainer.optimizer.step()
    assert "captured" in states(graphed)
    assert graphed.report().replays >= 3
