"""Parts of Inductor's graphs, and whole ones."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import Tensor, nn

import cgraph
from cgraph.errors import EagerWarning

pytestmark = [
    pytest.mark.gpu,
    # Warnings of the compiler.
    pytest.mark.filterwarnings("ignore:.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _own_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Shifted(nn.Module):
    """A model with a copy to the host and back in its middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.gelu(self.first(x))
        loss: Tensor = (self.last(y) + y.sum().cpu().cuda()).square().mean()
        return loss


@pytest.mark.parametrize("entry", ["backend", "reduce-overhead"])
def test_a_training_step_in_parts_equals_eager(entry: str) -> None:
    model = Shifted().cuda()
    eager = copy.deepcopy(model)
    with cgraph.patch_torch(trees=True):
        kind = {"backend": "cgraph"} if entry == "backend" else {"mode": entry}
        with inductor_config.patch(graph_partition=True):
            fast = torch.compile(model, **kind)  # type: ignore[call-overload]
            optimizers = [torch.optim.SGD(one.parameters(), lr=0.01) for one in (model, eager)]
            for _ in range(10):
                x = torch.randn(4, 8, device="cuda")
                losses = []
                for run, optimizer in zip((fast, eager), optimizers, strict=True):
                    loss = run(x)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    losses.append(loss.detach())
                torch.testing.assert_close(*losses, rtol=1e-3, atol=1e-4)
        for one, other in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
        functions = cgraph.trees.report().functions
    # Two parts in each direction, at least.
    assert sum(one.graphs for one in functions) >= 4
    assert sum(one.replays for one in functions) >= 4 * 6


def test_1_15_parts_manage_no_more_tensors_than_one_graph_does() -> None:
    found = []
    for partition in (True, False):
        torch.compiler.reset()
        model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)).cuda()
        fast = torch.compile(model, backend="cgraph", options={"graph_partition": partition})
        with torch.no_grad():
            for _ in range(5):
                x = torch.randn(4, 8, device="cuda")
                assert torch.allclose(fast(x), model(x), atol=1e-3)
        [one] = cgraph.trees.report().functions
        found.append((one.graphs, one.replays, one.copied_bytes))
    assert found[0] == found[1] == (1, 3, 4 * 8 * 4)


def test_1_17_an_input_that_is_not_aligned_is_right_in_every_call() -> None:
    def body(x: Tensor) -> Tensor:
        return (x * 2 + 1).sin()

    fast = torch.compile(body, backend="cgraph")
    memory = torch.randn(4100, device="cuda")
    with torch.no_grad():
        for offset in (0, 1, 2, 3, 1, 4, 3, 0, 1):
            memory.normal_()
            x = memory[offset : offset + 4096]
            assert torch.allclose(fast(x), body(x), atol=1e-6)
    assert sum(one.replays for one in cgraph.trees.report().functions) >= 6


def test_users_switch_parts_off_in_torchs_configuration() -> None:
    def body(x: Tensor) -> Tensor:
        return x.sin().cpu() + 1

    x = torch.randn(8, device="cuda")
    with torch.no_grad(), inductor_config.patch(graph_partition=False):
        fast = torch.compile(body, backend="cgraph")
        with pytest.warns(EagerWarning, match=r"cpu device.*body \(test_partition_cuda.py:\d+\)"):
            assert torch.allclose(fast(x), body(x))
    assert not any(one.graphs for one in cgraph.trees.report().functions)


_SKIPPED = """
import sys, torch, warnings
import cgraph
warnings.simplefilter("ignore")
options = {"graph_partition": False}
fast = torch.compile(lambda x: x.sin().cpu() + 1, backend="cgraph", options=options)
x = torch.randn(8, device="cuda")
with torch.no_grad():
    for _ in range(4):
        assert torch.allclose(fast(x), x.sin().cpu() + 1)
print("FOUND", cgraph.trees.report().skips)
"""


@pytest.mark.timeout(300)
def test_1_18_a_graph_without_a_capture_says_why_from_a_cache_too(tmp_path: Path) -> None:
    program = tmp_path / "skipped.py"
    program.write_text(_SKIPPED)
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    found = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, program], env=environment, capture_output=True, text=True, check=False
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
        assert lines, done.stderr[-2000:]
        found.append(lines[0])
    assert "cpu device" in found[0]
    assert found[0] == found[1]
