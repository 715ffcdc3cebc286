"""Random programs: every call equals that of the same program without graphs."""

from __future__ import annotations

import os
import random
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils import _pytree as pytree

import cgraph
from cgraph.errors import CgraphWarning, add_note
from graphed_calls import quiet
from lab import Lab
from random_programs import World

CALLS, EACH = 12, 10
FIRST = int(os.environ.get("CGRAPH_SEED", "0"))


def mode_of(world: World, draw: random.Random) -> AbstractContextManager[Any]:
    """Return the mode of a call: a program with gradients also runs without them."""
    if world.mode == "inference":
        return torch.inference_mode()
    if world.mode == "no_grad" or (world.mode == "grad" and draw.random() < 0.2):
        return torch.no_grad()
    return torch.enable_grad()


def call(world: World, run: Any, seed: int, rows: int) -> tuple[Any, list[Any]]:
    """Make a change and a call; return its result, and the state that it may write."""
    draw = random.Random(seed)
    if seed % CALLS > 2 and draw.random() < 0.4:
        for _ in range(draw.choice([1, 1, 2])):
            draw.choice(world.actions)(draw)
    for change in world.steady:
        change(draw)
    if draw.random() < 0.3:
        world.net.zero_grad(set_to_none=draw.random() < 0.5)
    x = world.fresh(draw, rows, 4)
    into = world.into if draw.random() < 0.7 else torch.zeros(4, device=world.device)
    given = world.wrap(into)
    needs_grad = world.mode == "grad" and draw.random() < 0.8
    torch.manual_seed(seed)
    with mode_of(world, draw):
        x.requires_grad_(needs_grad)
        found = run(x, given, world.by)
        leaves = [one for one in pytree.tree_leaves(found) if isinstance(one, Tensor)]
        noted = pytree.tree_map_only(Tensor, lambda one: one.detach().clone(), found)
        losses = [one.sum() * (2 + one.mean().detach()) for one in leaves if one.requires_grad]
        if draw.random() < 0.8 and losses and world.mode == "grad" and torch.is_grad_enabled():
            sum(losses).backward()  # type: ignore[union-attr]
    flags = [(one.requires_grad, one.is_inference()) for one in leaves]
    if world.kind == "argument" and world.mode != "train":
        assert leaves[0] is x
    added = given.get("pred") if isinstance(given, dict) else None
    left = [x, into, x.grad, added, *(one for make in world.tensors for one in make())]
    copies = [one.detach().clone() if isinstance(one, Tensor) else one for one in left]
    with torch.inference_mode(world.mode == "inference"), torch.no_grad():
        for one in leaves:
            one.fill_(77)
    # Padding rows draw random numbers as well.
    after = torch.rand(1, device=world.device) if world.sizes is None else None
    return (noted, flags), [*copies, after, *(make() for make in world.values)]


def agree(found: Any, expected: Any) -> None:
    """Require equality up to the order of sums."""
    parts, spec = pytree.tree_flatten(found)
    others, its_spec = pytree.tree_flatten(expected)
    assert spec == its_spec
    for part, other in zip(parts, others, strict=True):
        if isinstance(other, Tensor):
            assert_close(part, other, rtol=1e-3, atol=1e-4, equal_nan=True)
        else:
            assert type(part) is type(other) and part == other


def compare(lab: Lab, seed: int) -> int:
    """Run a program with and without graphs; return the number of replays."""
    world, twin = (World(seed, lab.device, has_graphs=one) for one in (True, False))
    for one in (world, twin):
        one.into = torch.zeros(4, device=lab.device)
    graphed = cgraph.graphed(world.run, sizes=world.sizes)
    draw = random.Random(seed)
    heights = draw.choice([[3], [3], [3, 5], [1, 2, 3, 5, 6]])
    with quiet() as caught, world.exits, twin.exits:
        for number in range(CALLS):
            rows = draw.choice(heights)
            own = seed * CALLS + number
            try:
                expected = call(twin, twin.run, own, rows)
                agree(call(world, graphed, own, rows), expected)
            except Exception as error:
                add_note(error, f"seed {seed}, call {number}, {world.mode}")
                raise
    # torch warns that a gradient waits for the stream of the previous call.
    own = [one for one in caught if "AccumulateGrad node's stream" not in str(one.message)]
    others = [one for one in own if not issubclass(one.category, CgraphWarning)]
    assert not others, others[0]
    return graphed.report().replays


@pytest.mark.parametrize("block", range(30))
def test_random_programs_are_as_without_graphs_at_each_call(lab: Lab, block: int) -> None:
    """Graphs keep their promises at any program size."""
    replays = [compare(lab, FIRST + block * EACH + number) for number in range(EACH)]
    assert sum(replays) >= EACH
