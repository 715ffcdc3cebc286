"""Sentences of the contract of ``graphed`` that only a GPU can show: each test quotes its own."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import cgraph
from cgraph.errors import EagerWarning
from graphed_calls import near, states
from lab import CudaLab, fresh

pytestmark = pytest.mark.gpu
lab = CudaLab()
Step = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def _cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CGRAPH_DRIVER", "cuda")
    yield
    torch.cuda.synchronize()


def step_of(net: nn.Module) -> Step:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_a_step_waits_until_a_loss_of_an_earlier_call_is_gone() -> None:
    """A key waits where a held eager loss pins AccumulateGrad nodes to another stream."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).to(lab.device)
    twin = copy.deepcopy(net)
    held = net(fresh(lab, 3, 8)).sum()
    graphed, eager = cgraph.graphed(step_of(net)), step_of(twin)

    def call() -> None:
        x = fresh(lab, 3, 8)
        assert near(graphed(x), eager(x))
        assert all(near(a, b) for a, b in zip(net.parameters(), twin.parameters(), strict=True))

    call()
    with pytest.warns(EagerWarning, match=r"somebody keeps has a history.*let it go"):
        call()
    for _ in range(3):
        call()
    assert states(graphed) == ["eager"]
    del held
    for _ in range(4):
        call()
    assert states(graphed) == ["captured"]


def test_random_numbers_of_another_thread_raise_while_a_call_is_captured() -> None:
    """While one call captures, CUDA random numbers in other threads raise (torch)."""
    calls, errors = [0], list[BaseException]()
    out = torch.zeros(4, device=lab.device)

    def draw() -> None:
        try:
            out.normal_()
        except RuntimeError as error:
            errors.append(error)

    def function(x: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] == 2:
            thread = threading.Thread(target=draw)
            thread.start()
            thread.join()
        return x * 2

    graphed = cgraph.graphed(function, guards={"calls": False}, side_effects="ignore")
    for _ in range(4):
        x = fresh(lab, 3)
        assert near(graphed(x), x * 2)
    assert calls == [2]
    assert len(errors) == 1
    draw()
    assert len(errors) == 1


def test_calls_load_no_compiler() -> None:
    """No mode of ours imports ``torch._dynamo``, which takes seconds."""
    code = (
        "import sys, torch, cgraph\n"
        "graphed = cgraph.graphed(lambda x: x * 2)\n"
        "x = torch.ones(3, device='cuda')\n"
        "for _ in range(3): graphed(x)\n"
        "assert graphed.report().captured == 1\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
