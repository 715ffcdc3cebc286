"""Tensors that a graphed function finds in objects behind other objects, and in classes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from graphed_calls import Case, alike_after, exchanges, method, sets, states, twins_agree
from lab import Lab, fresh
from networks import network

Find = Callable[[Any], tuple[Any, Callable[[Any], object]]]


@dataclass
class State:
    """The state of a request."""

    k: Tensor


@dataclass(slots=True)
class SlottedState:
    """The same, in slots."""

    k: Tensor
    count: int = 0


class Slotted:
    """An engine with its state in a slot."""

    __slots__ = ("__dict__", "state")

    def __init__(self, state: Any) -> None:
        self.state = state


class Cached(nn.Module):
    """A module with a state."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def forward(self, x: Tensor) -> Tensor:
        return self.state.k.add_(x) * 2  # type: ignore[no-any-return]


def engine(state: Any) -> Any:
    """Return an engine that has a state by several ways."""
    names, pool = SimpleNamespace(state=state), [state, State(state.k.clone())]
    return SimpleNamespace(state=state, states={"now": [state]}, names=names, pool=pool)


def by_name(state: Any) -> Any:
    """Return an engine that has a state by its names."""
    return SimpleNamespace(**{**vars(engine(state)), "state": None})


def closure(state: Any) -> Any:
    return lambda x: state.k.add_(x) * 2


def add(one: Any, x: Tensor) -> Any:
    return one.state.k.add_(x) * 2


def put(one: Any, other: Any) -> None:
    one.state = other


def found(
    make: Callable[[Any], Any],
    call: Callable[[Any, Tensor], Any] | None = None,
    put: Callable[[Any, Any], object] = put,
) -> Find:
    """Return a way to find a state: the call of what has it or a method, and its exchange."""

    def find(state: Any) -> tuple[Any, Callable[[Any], object]]:
        one = make(state)
        return MethodType(call, one) if call else one, partial(put, one)

    return find


PLACES: dict[str, Find] = {
    "an attribute": found(engine, add),
    "containers": found(
        engine,
        lambda one, x: one.states["now"][0].k.add_(x) * 2,
        lambda one, other: one.states.update(now=[other]),
    ),
    "a namespace": found(
        by_name,
        lambda one, x: one.names.state.k.add_(x) * 2,
        lambda one, other: put(one.names, other),
    ),
    "a slot": found(Slotted, add),
    "a module": found(Cached),
    "a closure": found(
        closure, put=lambda one, other: setattr(one.__closure__[0], "cell_contents", other)
    ),
}


@pytest.mark.parametrize("kind", [State, SlottedState])
@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_an_object_with_a_cache_is_noticed_that_is_replaced_in(
    lab: Lab, place: str, is_kept: bool, kind: Any
) -> None:
    def serving(lab: Lab) -> Case:
        served = [kind(fresh(lab, 3))]
        run, put = PLACES[place](served[0])

        def replace() -> None:
            served.append(kind(fresh(lab, 3)))
            put(served[-1])
            if not is_kept:
                served.pop(0)

        return Case(run, [replace] * 2, lambda: served[-1].k, shape=(3,))

    (key,) = twins_agree(lab, serving).report().keys
    assert key.state == "captured"
    assert sum(one.count for one in key.rerecorded) == 2


@pytest.mark.parametrize("place", PLACES)
def test_a_cache_that_an_object_gets_anew_is_noticed_in(lab: Lab, place: str) -> None:
    def serving(lab: Lab) -> Case:
        state = State(fresh(lab, 3))
        run, _ = PLACES[place](state)
        return Case(run, exchanges(state, "k", 1), lambda: state.k, shape=(3,))

    twins_agree(lab, serving)


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
    for call, kind in (
        (Shared().scaled, Shared),
        (Derived().scaled, Shared),
        (graphed := cgraph.graphed(part), Part),
    ):
        assert states(alike_after(lab, call, *exchanges(kind, "weight"))) == ["captured"]
    # The object has one of its own from here on.
    alike_after(lab, graphed, *sets(part, "weight", fresh(lab, 3)))


class Node:
    """One of many objects that refer to each other."""

    def __init__(self, lab: Lab) -> None:
        self.k = fresh(lab, 3)
        self.others: list[Any] = [self]


def nodes(lab: Lab) -> Node:
    first, *others = (Node(lab) for _ in range(51))
    for node in others:
        node.others += [first, *others]
    first.others += others
    return first


class Closed:
    """A state whose attributes cannot be read any more."""

    @property
    def k(self) -> Tensor:
        raise RuntimeError("the request is closed")


def beside_odd(lab: Lab) -> Any:
    class Odd:
        @property
        def cache(self) -> Tensor:
            raise RuntimeError("not ready")

    odd = Odd()
    vars(odd)["cache"] = fresh(lab, 3)
    Odd.__module__ = None  # type: ignore[assignment]
    return SimpleNamespace(state=State(fresh(lab, 3)), odd=odd)


def with_defaults(lab: Lab) -> Any:
    kept: Any = defaultdict(lambda: State(torch.zeros(3, device=lab.device)))
    kept["a"] = State(fresh(lab, 3))
    return kept


def many_attributes() -> dict[str, Any]:
    large = SimpleNamespace(**{f"a{place}": place for place in range(10_000)})
    larger = SimpleNamespace(**{f"a{place}": [place] for place in range(10_000)})
    return {"large": large, "larger": larger}


def many_objects() -> dict[str, Any]:
    words = [SimpleNamespace(piece=SimpleNamespace(parts=[[place]])) for place in range(4000)]
    return {"words": words}


def beside(neighbours: Callable[[], dict[str, Any]]) -> Callable[[Lab], Case]:
    return method(
        lambda lab: SimpleNamespace(**neighbours(), state=State(fresh(lab, 3))),
        lambda one, x: x * one.state.k,
        lambda one: sets(one, "state", State(torch.randn_like(one.state.k))),
    )


def by_two_ways(lab: Lab) -> Any:
    emb = SimpleNamespace(w=fresh(lab, 3))
    return SimpleNamespace(emb=emb, block=SimpleNamespace(head=SimpleNamespace(w=emb.w)))


def of_module(lab: Lab) -> Any:
    net = nn.Linear(3, 3).to(lab.device).requires_grad_(False)
    net.scale = fresh(lab, 3)
    return SimpleNamespace(model=net)


def in_two_lists(lab: Lab) -> Any:
    first = [fresh(lab, 3)]
    return SimpleNamespace(first=first, other=first)


class Bare:
    """An engine that has the state itself, and nothing else."""

    __slots__ = ("k",)

    def __init__(self, lab: Lab) -> None:
        self.k = fresh(lab, 2, 3)


TENSORS: dict[str, Callable[[Lab], Case]] = {
    "one of objects that refer to each other": method(
        nodes, lambda one, x: x * one.others[3].k, lambda one: exchanges(one.others[3], "k", 1)
    ),
    "one beside properties that raise": method(
        beside_odd,
        lambda one, x: x * 2 if isinstance(one.state, Closed) else x * one.state.k,
        lambda one: sets(one, "state", Closed()),
    ),
    "one in a dictionary with defaults that loses it": method(
        with_defaults,
        lambda kept, x: x * kept["a"].k if "a" in kept else x * 2,
        lambda kept: [lambda: kept.pop("a")],
        list,
    ),
    "one beside tens of thousands of attributes": beside(many_attributes),
    "one beside thousands of objects": beside(many_objects),
    "one that is read by two ways": method(
        by_two_ways,
        lambda one, x: x * one.emb.w + one.block.head.w,
        lambda one: [
            *exchanges(one.block.head, "w", 1),
            *sets(one, "emb", SimpleNamespace(w=torch.randn_like(one.emb.w))),
        ],
    ),
    "one of a module behind an object": method(
        of_module,
        lambda one, x: one.model(x) * one.model.scale,
        lambda one: exchanges(one.model, "scale", 1),
    ),
    "one in a list that was another one": method(
        in_two_lists,
        lambda one, x: x + one.other[0],
        lambda one: sets(one, "other", *([torch.randn_like(one.other[0])] for _ in range(2))),
    ),
    "the only one of an object with nothing but slots": method(
        Bare,
        lambda one, x: one.k.add_(x) * 2,
        lambda one: exchanges(one, "k", 1),
        lambda one: one.k,
    ),
}


@pytest.mark.parametrize("which", TENSORS)
def test_a_tensor_is_followed_that_is(lab: Lab, which: str) -> None:
    twins_agree(lab, TENSORS[which], on_fail="raise")


def test_one_of_several_objects_with_parts_of_a_table_may_be_chosen(lab: Lab) -> None:
    def serving(lab: Lab) -> Case:
        pool = [State(fresh(lab, 4)), State(fresh(lab, 4))]
        server = SimpleNamespace(caches=[one.k for one in pool], pool=pool, state=pool[0])
        run = MethodType(lambda server, x: x * server.state.k, server)
        return Case(run, sets(server, "state", pool[1]), shape=(4,))

    (key,) = twins_agree(lab, serving).report().keys
    assert key.state == "captured" and sum(one.count for one in key.rerecorded) == 1


class Trainer:
    """A model and its optimizer, as frameworks hold them."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def state(self) -> list[Any]:
        return [(one.detach(), one.grad) for one in self.model.parameters()]


def passes(trainer: Trainer, x: Tensor) -> Tensor:
    trainer.model.zero_grad()
    loss: Tensor = trainer.model(x).square().mean()
    loss.backward()
    return loss.detach()


def by_method(trainer: Trainer) -> Callable[..., Any]:
    one = SimpleNamespace(context=SimpleNamespace(trainer=trainer))
    return MethodType(lambda one, x: passes(one.context.trainer, x), one)


def by_namespace(trainer: Trainer) -> Callable[..., Any]:
    space = SimpleNamespace(of=trainer)
    return lambda x: passes(space.of, x)


TRAINERS: dict[str, Callable[[Trainer], Callable[..., Any]]] = {
    "a namespace": by_namespace,
    "a default": lambda trainer: lambda x, of=trainer: passes(of, x),
    "a method": by_method,
    "a closure": lambda trainer: lambda x: passes(trainer, x),
}


@pytest.mark.parametrize("place", TRAINERS)
def test_a_model_gets_its_gradients_that_lies_behind(lab: Lab, place: str) -> None:
    def training(lab: Lab) -> Case:
        trainer = Trainer(network(lab))
        return Case(TRAINERS[place](trainer), [trainer.step] * 4, trainer.state, shape=(4, 6))

    graphed = twins_agree(lab, training, calls=1, rtol=1e-4)
    assert "captured" in states(graphed)
    assert graphed.report().replays >= 3
