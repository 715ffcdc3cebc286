"""Work on a GPU that torch's dispatcher does not see: kernels of others, and seeds."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cgraph
from graphed_calls import near, states

pytestmark = pytest.mark.gpu

triton: Any = pytest.importorskip("triton")  # each torch for CUDA comes with it
tl: Any = triton.language


@triton.jit
def add_one_kernel(x, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    tl.store(x + place, tl.load(x + place, mask=mask) + 1, mask=mask)


def add_one(x: Tensor) -> None:
    """Add one in place, by a kernel that is launched by hand."""
    add_one_kernel[(triton.cdiv(x.numel(), 64),)](x, x.numel(), BLOCK=64)


@pytest.mark.parametrize("in_break", [False, True])
def test_an_argument_that_a_kernel_launched_by_hand_writes_is_written_for_the_caller(
    in_break: bool,
) -> None:
    written = cgraph.eager_break(add_one) if in_break else add_one

    def step(x: Tensor, cache: Tensor) -> Tensor:
        written(cache)
        return x * cache.sum()

    graphed = cgraph.graphed(step, on_fail="raise")
    mine = torch.randn(100, device="cuda")
    eager = mine.clone()
    for _ in range(4):
        x = torch.randn(5, device="cuda")
        assert near(graphed(x, mine), x * (eager + 1).sum())
        eager += 1
        assert near(mine, eager)
    assert states(graphed) == ["captured"]


def test_a_function_that_seeds_inside_fork_rng_gives_the_same_numbers_in_each_call() -> None:
    def noisy(x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[torch.cuda.current_device()]):
            torch.manual_seed(5)
            return x + torch.randn(4, device="cuda")

    graphed = cgraph.graphed(noisy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning that it runs eagerly
        for _ in range(5):
            x = torch.randn(4, device="cuda")
            assert torch.equal(graphed(x), noisy(x))


@pytest.mark.parametrize("is_step", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_dropout_in_a_checkpointed_block_has_one_mask_in_both_passes(
    use_reentrant: bool, is_step: bool
) -> None:
    block = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.ReLU()).cuda()
    twin = copy.deepcopy(block)

    def loss_of(net: nn.Module, x: Tensor) -> Tensor:
        net.zero_grad()
        hidden = checkpoint(net, x, use_reentrant=use_reentrant)
        loss: Tensor = hidden.square().mean()
        if is_step:
            loss.backward()
            return loss.detach()
        return loss

    graphed = cgraph.graphed(lambda x: loss_of(block, x))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning that it runs eagerly, where it does
        for seed in range(5):
            x = torch.randn(32, 16, device="cuda", requires_grad=True)
            for run, net in ((graphed, block), (lambda x: loss_of(twin, x), twin)):
                torch.manual_seed(seed)
                loss = run(x)
                if not is_step:
                    loss.backward()
                net.kept = loss.detach().clone()  # type: ignore[assignment]
            assert near(block.kept, twin.kept)
            for one, other in zip(block.parameters(), twin.parameters(), strict=True):
                assert one.grad is not None and other.grad is not None
                assert near(one.grad, other.grad)
