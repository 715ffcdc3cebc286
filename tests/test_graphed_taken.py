"""What calls leave of a capture that fails, what code takes, and how else it comes by settings."""

from __future__ import annotations

import collections
import functools
import queue
import types
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

import cgraph
from graphed_calls import alike_after, quiet, states
from lab import Lab, fresh


def test_parameters_that_a_failed_capture_has_frozen_are_thawed(lab: Lab) -> None:
    first, second = nn.Linear(3, 1).to(lab.device), nn.Linear(3, 3).to(lab.device)

    def update(x: Tensor) -> Tensor:
        first.requires_grad_(False)
        loss = (first(second(x)) * second(x).sum().item()).mean()
        loss.backward()
        first.requires_grad_(True)
        return loss.detach()

    graphed = cgraph.graphed(update)
    with pytest.warns(UserWarning, match="runs eagerly"):
        graphed(fresh(lab, 4, 3))
    assert all(one.requires_grad for one in first.parameters())
    graphed(fresh(lab, 4, 3))
    assert all(one.requires_grad for one in first.parameters())
    assert states(graphed) == ["eager"] and second.weight.grad is not None


class Spread(nn.Module):
    """A module with settings of many kinds in one dictionary."""

    def __init__(self, how: str, lab: Lab) -> None:
        super().__init__()
        self.how, self.order = how, ["scale", "shift"]
        self.given: dict[str, Any] = {"scale": 2.0, "shift": 1.0}
        self.given["mask"] = fresh(lab, 3)

    def forward(self, x: Tensor) -> Tensor:
        """[n, 3] → [n, 3]."""
        if self.how == "spread":
            return _affine(x, **self.given)
        if self.how == "items":
            for value in self.given.values():
                x = x * value
            return x
        for name in self.order:
            x = x * self.given[name]
        return x + self.given["mask"]


def _affine(x: Tensor, scale: float, shift: float, mask: Tensor) -> Tensor:
    return x * scale * mask + shift


@pytest.mark.parametrize("how", ["spread", "items", "variable"])
def test_numbers_beside_tensors_in_a_dictionary_count(lab: Lab, how: str) -> None:
    module = Spread(how, lab)
    changes = (lambda: module.given.update(scale=3.0), lambda: module.given.update(shift=5.0))
    alike_after(lab, module, *changes)


@pytest.mark.parametrize("place", ["attribute", "list", "dictionary"])
def test_what_a_partial_function_was_given_counts(lab: Lab, place: str) -> None:
    kept: Any = types.SimpleNamespace(slope=2.0, shift=fresh(lab, 3))

    def act(x: Tensor, kept: Any, other: Any) -> Tensor:
        return x * kept.slope + other.shift

    partial = functools.partial(act, kept=kept, other=kept)
    owner: Any = types.SimpleNamespace(act=partial)
    some, named = [partial], {"act": partial}
    readers: dict[str, Callable[[Tensor], Tensor]] = {
        "attribute": lambda x: owner.act(x),
        "list": lambda x: some[0](x),
        "dictionary": lambda x: named["act"](x),
    }
    changes = (lambda: setattr(kept, "slope", 3.0), lambda: setattr(kept, "shift", fresh(lab, 3)))
    alike_after(lab, readers[place], *changes)


class Block(nn.Module):
    """Has an activation, settings and a tensor by its class."""

    act: Any = staticmethod(functional.relu)
    options: ClassVar[dict[str, float]] = {"k": 2.0}
    weight: Any = None

    def forward(self, x: Tensor) -> Tensor:
        """[n, 3] → [n, 3]."""
        x = self.act(x) * self.options["k"]
        return x if self.weight is None else x * self.weight


def test_what_an_object_gets_instead_of_its_class_counts(lab: Lab) -> None:
    block = Block()
    changes: list[Callable[[], object]] = [
        lambda: setattr(block, "act", functional.silu),
        lambda: setattr(block, "options", {"k": 3.0}),
        lambda: setattr(block, "weight", fresh(lab, 3)),
        lambda: delattr(block, "act"),
    ]
    alike_after(lab, block, *changes)


class Modes(nn.Module):
    """Finds settings, layers and methods by names that it puts together."""

    def __init__(self) -> None:
        super().__init__()
        self.scale_q, self.scale_k, self.mode = 1.0, 2.0, "double"

    def _go_double(self, x: Tensor) -> Tensor:
        return x * 2 * self.scale_q

    def _go_half(self, x: Tensor) -> Tensor:
        return x / 2

    def forward(self, x: Tensor) -> Tensor:
        """As one of the methods."""
        for name in ("q", "k"):
            x = x * getattr(self, "scale_" + name)
        return getattr(self, f"_go_{self.mode}")(x)  # type: ignore[no-any-return]


def test_attributes_whose_names_are_put_together_count(lab: Lab) -> None:
    module = Modes()
    changes: list[Callable[[], object]] = [
        lambda: setattr(module, "scale_k", 3.0),
        lambda: setattr(module, "scale_q", 5.0),
        lambda: setattr(module, "mode", "half"),
    ]
    alike_after(lab, module, *changes)


def test_a_method_whose_name_is_put_together_is_looked_into(lab: Lab) -> None:
    count = [0]

    class Counting(Modes):
        def _go_double(self, x: Tensor) -> Tensor:
            count[0] += 1
            return x * count[0]

    module = Counting()
    graphed = cgraph.graphed(module)
    for number in range(1, 4):
        x = fresh(lab, 3)
        assert_close(graphed(x), x * 2 * number)
    (key,) = graphed.report().keys
    assert key.reason is not None and "changes item 0 of a list" in key.reason


@dataclass
class Config:
    """Settings that code takes apart."""

    scale: float = 2.0
    bias: float = 1.0


def _matched(config: Config, x: Tensor) -> Tensor:
    match config:
        case Config(scale, bias):
            return x * scale + bias
    raise AssertionError


TAKEN: dict[str, Callable[[Config, Tensor], Tensor]] = {
    "asdict": lambda config, x: _affine(x, **asdict_of(config)),
    "vars": lambda config, x: x * vars(config)["scale"] + sum(vars(config).values()),
    "match": _matched,
}


def asdict_of(config: Config) -> dict[str, Any]:
    given = asdict(config)
    return {"scale": given["scale"], "shift": given["bias"], "mask": 1}


@pytest.mark.parametrize("how", TAKEN)
def test_settings_that_code_takes_apart_count(lab: Lab, how: str) -> None:
    config = Config()
    changes = (lambda: setattr(config, "scale", 3.0), lambda: setattr(config, "bias", 5.0))
    alike_after(lab, lambda x: TAKEN[how](config, x), *changes)


@pytest.mark.parametrize("kind", ["attribute", "item"])
def test_what_code_tries_to_get_may_come_later(lab: Lab, kind: str) -> None:
    class Owner:
        k: float

    owner, items = Owner(), dict[str, float]()

    def run(x: Tensor) -> Tensor:
        try:
            return x * (owner.k if kind == "attribute" else items["k"])
        except (AttributeError, KeyError):
            return x

    alike_after(lab, run, lambda: setattr(owner, "k", 3.0), lambda: items.update(k=4.0))


class Adapter(nn.Module):
    """Multiplies by parameters and buffers that it may get."""

    def __init__(self) -> None:
        super().__init__()
        self.added, self.active = nn.ParameterDict(), ["a", "b"]

    def forward(self, x: Tensor) -> Tensor:
        """[n, 3] → [n, 3]."""
        for name in self.active:
            if name in self.added:
                x = x * self.added[name]
        return x * self.gate if hasattr(self, "gate") else x  # type: ignore[has-type, no-any-return]


def test_parameters_and_buffers_may_be_registered_where_there_are_none(lab: Lab) -> None:
    module = Adapter()

    def add(name: str) -> None:
        module.added[name] = nn.Parameter(fresh(lab, 3))

    changes: list[Callable[[], object]] = [
        lambda: add("a"),
        lambda: add("b"),
        lambda: add("a"),
        lambda: module.added.pop("a"),
        lambda: module.register_buffer("gate", fresh(lab, 3)),
    ]
    alike_after(lab, module, *changes)


def test_whether_weights_require_gradients_counts_where_code_asks(lab: Lab) -> None:
    linear = nn.Linear(3, 3).to(lab.device)

    def run(x: Tensor) -> Tensor:
        return linear(x) * (2 if linear.weight.requires_grad else 1)  # type: ignore[no-any-return]

    alike_after(lab, run, lambda: linear.requires_grad_(False), lambda: linear.requires_grad_(True))


def test_a_mode_that_a_method_of_one_dispatch_reads_counts(lab: Lab) -> None:
    class By:
        g = 3.0

        @functools.singledispatchmethod
        def go(self, how: object, x: Tensor) -> Tensor:
            return x * self.g

        @go.register
        def _(self, how: int, x: Tensor) -> Tensor:
            return x + self.g

    by = By()
    alike_after(lab, lambda x: by.go(1, x) + by.go("s", x), lambda: setattr(by, "g", 5.0))


def test_a_chain_of_dictionaries_is_looked_into(lab: Lab) -> None:
    outer, inner = dict[str, float](), {"a": 2.0}
    chain = collections.ChainMap(outer, inner)
    alike_after(lab, lambda x: x * chain["a"], lambda: inner.update(a=3.0))


@pytest.mark.parametrize("kind", [queue.Queue, queue.SimpleQueue])
def test_a_function_that_takes_from_a_queue_runs_eagerly(lab: Lab, kind: Any) -> None:
    waiting = kind()
    for number in range(8):
        waiting.put(fresh(lab, 3) + number)
    graphed = cgraph.graphed(lambda x: x * waiting.get())
    with pytest.warns(UserWarning, match="takes? nothing from it"):
        for left in range(7, 4, -1):
            graphed(fresh(lab, 3))
            assert waiting.qsize() == left


def test_a_function_that_goes_through_an_iterator_runs_eagerly(lab: Lab) -> None:
    factors = iter(range(2, 9))

    def run(x: Tensor) -> Tensor:
        for factor in factors:
            return x * factor
        raise AssertionError

    graphed = cgraph.graphed(run)
    with pytest.warns(UserWarning, match="takes? nothing from it"):
        for factor in (2, 3, 4):
            x = fresh(lab, 3)
            assert_close(graphed(x), x * factor)


def test_what_others_put_into_a_list_for_one_call_is_taken_by_that_call(lab: Lab) -> None:
    todo: list[Callable[[Tensor], Tensor]] = []

    def run(x: Tensor) -> Tensor:
        while todo:
            x = todo.pop()(x)
        return x * 2

    graphed = cgraph.graphed(run)
    for number in range(6):
        if number == 3:
            todo.append(torch.neg)
        x = fresh(lab, 3)
        assert_close(graphed(x), x * (-2 if number == 3 else 2))
        assert not todo


class Multistep:
    """A scheduler with a history of the last results, in a list that it makes anew."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.history: Any = () if kind == "tuple" else []
        self.kept: dict[str, list[Tensor]] = {"history": []}

    def step(self, x: Tensor) -> Tensor:
        """The sum of up to four."""
        if self.kind == "tuple":
            self.history = (*self.history[-3:], x * 1)
        elif self.kind == "list":
            self.history = [*self.history[-3:], x * 1]
        elif self.kind == "append":
            self.history = self.history[-3:]
            self.history.append(x * 1)
        else:
            self.kept["history"] = self.history = [*self.kept["history"][-3:], x * 1]
        return torch.stack([*self.history]).sum(0)


@pytest.mark.parametrize("warmup", [0, 1, 3])
@pytest.mark.parametrize("kind", ["tuple", "list", "append", "item"])
def test_a_history_in_a_container_that_is_made_anew_is_that_of_eager(
    lab: Lab, kind: str, warmup: int
) -> None:
    one, other = Multistep(kind), Multistep(kind)
    graphed = cgraph.graphed(one.step, warmup=warmup)
    with quiet():
        for _ in range(7):
            x = fresh(lab, 3)
            assert_close(graphed(x), other.step(x))
            assert len(one.history) == len(other.history)


class Sampler:
    """Has a method of a model in an attribute."""

    def __init__(self, denoise: Callable[[Tensor], Tensor]) -> None:
        self.denoise = denoise

    def step(self, x: Tensor) -> Tensor:
        """What the method gives."""
        return self.denoise(x)


@pytest.mark.parametrize("kind", ["method", "partial", "argument"])
def test_a_model_whose_method_is_kept_or_passed_is_followed(lab: Lab, kind: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(lab.device).eval()
    sampler = Sampler(functools.partial(model) if kind == "partial" else model.forward)

    def run(x: Tensor) -> Tensor:
        return sampler.step(x)

    def run_given(x: Tensor, denoise: Callable[[Tensor], Tensor]) -> Tensor:
        return denoise(x)

    passed = cgraph.graphed(run_given)

    def exchange() -> None:
        model[0].weight = nn.Parameter(fresh(lab, 3, 3))

    changes: list[Callable[[], object]] = [exchange, model.train, exchange, model.eval]
    if kind != "argument":
        alike_after(lab, run, *changes)
        return
    with torch.no_grad():
        for change in (lambda: None, *changes):
            change()
            for _ in range(3):
                x = fresh(lab, 4, 3)
                before = {name: one.clone() for name, one in model.named_buffers()}
                found = passed(x, model.forward).clone()
                for name, one in model.named_buffers():
                    one.copy_(before[name])
                assert_close(found, model(x))


def test_settings_in_defaults_by_keyword_count(lab: Lab) -> None:
    config = types.SimpleNamespace(k=2.0)

    def scale(x: Tensor, *, by: Any = config) -> Tensor:
        return x * by.k

    alike_after(lab, lambda x: scale(x), lambda: setattr(config, "k", 3.0))


def test_a_truth_value_of_numpys_counts(lab: Lab) -> None:
    owner: Any = types.SimpleNamespace(flag=np.bool_(False))
    changes = (lambda: setattr(owner, "flag", np.bool_(True)), lambda: setattr(owner, "flag", 0))
    alike_after(lab, lambda x: -x if owner.flag else x, *changes)


def test_a_table_of_many_numbers_may_be_exchanged(lab: Lab) -> None:
    owner: Any = types.SimpleNamespace(table=[0.5] * 100, array=np.ones(200))

    def run(x: Tensor) -> Tensor:
        return x * owner.table[3] + float(owner.array[5])

    changes: list[Callable[[], object]] = [
        lambda: setattr(owner, "table", [3.0] * 100),
        lambda: setattr(owner, "array", np.full(200, 7.0)),
    ]
    alike_after(lab, run, *changes)


def test_a_hook_that_a_refused_capture_has_added_is_gone(lab: Lab) -> None:
    linear = nn.Linear(3, 3).to(lab.device)

    def run(x: Tensor) -> Tensor:
        handle = linear.register_forward_hook(lambda *given: given[-1] + 1)
        y = linear(x)
        y = y * y.sum().item()
        handle.remove()
        return y

    graphed = cgraph.graphed(run)
    with torch.no_grad(), pytest.warns(UserWarning, match="runs eagerly"):
        for _ in range(3):
            x = fresh(lab, 3)
            assert_close(graphed(x), run(x))
            assert not linear._forward_hooks


@pytest.mark.parametrize("warmup", [1, 3])
def test_what_the_first_call_sets_up_stays_where_the_capture_is_refused(
    lab: Lab, warmup: int
) -> None:
    linear = nn.Linear(3, 3).to(lab.device).requires_grad_(False)
    done = set[str]()

    def run(x: Tensor) -> Tensor:
        if not done:
            done.add("set up")
            linear.requires_grad_(True)
            linear.register_forward_hook(lambda *given: given[-1] + 1)
        y: Tensor = linear(x)
        return y * y.sum().item()

    graphed = cgraph.graphed(run, warmup=warmup)
    with quiet():
        graphed(fresh(lab, 3))
        assert linear.weight.requires_grad and len(linear._forward_hooks) == 1
        x = fresh(lab, 3)
        assert_close(graphed(x), run(x))
