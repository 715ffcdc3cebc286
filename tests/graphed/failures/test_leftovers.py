"""Leftovers of a failed capture in calls, and other ways in which code reads settings."""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

import cgraph
from graphed_calls import alike_after, quiet
from lab import Lab, fresh


class Spread(nn.Module):
    """A module with settings of many kinds in one dictionary."""

    def __init__(self, how: str, lab: Lab) -> None:
        super().__init__()
        self.how, self.order = how, ["scale", "shift"]
        self.given: dict[str, Any] = {"scale": 2.0, "shift": 1.0}
        self.given["mask"] = fresh(lab, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return [n, 3] → [n, 3]."""
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
    """A module with an activation, settings and a tensor on its class."""

    act: Any = staticmethod(functional.relu)
    options: ClassVar[dict[str, float]] = {"k": 2.0}
    weight: Any = None

    def forward(self, x: Tensor) -> Tensor:
        """Return [n, 3] → [n, 3]."""
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


def test_settings_in_defaults_by_keyword_count(lab: Lab) -> None:
    config = types.SimpleNamespace(k=2.0)

    def scale(x: Tensor, *, by: Any = config) -> Tensor:
        return x * by.k

    alike_after(lab, lambda x: scale(x), lambda: setattr(config, "k", 3.0))


def test_a_truth_value_of_numpys_counts(lab: Lab) -> None:
    owner: Any = types.SimpleNamespace(flag=np.bool_(False))
    changes = (lambda: setattr(owner, "flag", np.bool_(True)), lambda: setattr(owner, "flag", 0))
    alike_after(lab, lambda x: -x if owner.flag else x, *changes)


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
