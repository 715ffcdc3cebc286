"""Random programs whose steps take branches and keep some results: all is as eager."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch

import cgraph
from interrupts import interrupt_at
from lab import Lab, fresh
from tree_programs import Program, in_tree

BODIES = [
    lambda x: torch.sin(x) * 0.5,
    lambda x: x @ x.t() * 0.1,
    lambda x: (x * 2).cumsum(0) * 0.2,
]


@pytest.mark.parametrize("seeds", range(10))
def test_programs_with_branches_and_held_results_equal_eager(lab: Lab, seeds: int) -> None:
    for seed in range(20):
        functions = [(in_tree(lab, one, fresh(lab, 4, 4)), one) for one in BODIES]
        Program(lab, 100 * seeds + seed, functions).run(8)


@pytest.mark.parametrize("seed", range(30))
def test_what_is_held_is_right_or_raises_whenever_an_interrupt_comes(lab: Lab, seed: int) -> None:
    chosen = random.Random(seed)

    kept: list[BaseException] = []
    places: list[list[bool]] = []

    @contextmanager
    def around() -> Iterator[None]:
        # A replay on a GPU has few events, or none; the first call and captures have many.
        is_first = not places
        if not is_first and chosen.random() < 0.6:
            yield
            return
        number = 1 if is_first else int(80 ** chosen.random())
        events = ("call", "c_return")
        with interrupt_at(number, kept if seed % 2 else None, events) as found:
            places.append(found)
            yield

    functions = [(in_tree(lab, one, fresh(lab, 4, 4)), one) for one in BODIES]
    Program(lab, seed, functions).run(30, around)
    assert any(found for [found] in places)


@pytest.mark.parametrize("seed", range(5))
def test_hooks_that_raise_change_no_result(
    lab: Lab, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = random.Random(seed)
    raised: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda one: raised.append(one.exc_type))

    def hook(_: object) -> None:
        if chosen.random() < 0.5:
            raise ValueError

    with ExitStack() as hooks:
        for name in cgraph.hooks.__all__:
            hooks.enter_context(getattr(cgraph.hooks, name)(hook))
        functions = [(in_tree(lab, one, fresh(lab, 4, 4)), one) for one in BODIES]
        Program(lab, seed, functions).run(12)
    assert set(raised) == {ValueError}
