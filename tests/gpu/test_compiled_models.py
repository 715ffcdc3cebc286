"""Public models under ``torch.compile`` in graph trees: forward and backward, as in eager.

Needs transformers, timm and torch-geometric. Without one of them a test fails.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import cgraph
from models import MODELS, Batch, tensors

pytestmark = [
    pytest.mark.gpu,
    # Warnings of the packages and of the compiler.
    pytest.mark.filterwarnings("ignore"),
]

DEVICE = "cuda"
NAMES = [name for name, one in MODELS.items() if not one.breaks]


@pytest.fixture(autouse=True)
def _own_compiler() -> Iterator[None]:
    torch.compiler.reset()
    cgraph.trees.reset()
    with torch.backends.cudnn.flags(
        enabled=True, benchmark=False, deterministic=True, allow_tf32=False
    ):
        yield
    torch.compiler.reset()
    cgraph.trees.reset()


def floats(model: nn.Module, batch: Batch) -> list[Tensor]:
    return [one for one in tensors(model(**batch)) if one.is_floating_point()]


def check(got: Tensor, want: Tensor) -> None:
    """Compare as vectors: single elements of fused float32 operators may differ by more."""
    distance = (got.detach().double() - want.detach().double()).norm()
    assert distance <= 2e-3 * want.detach().double().norm() + 1e-5


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["cgraph", "cgraph_aot"])
@pytest.mark.parametrize("name", NAMES)
def test_a_compiled_public_model_equals_eager_forward_and_backward(name: str, backend: str) -> None:
    one = MODELS[name]
    model = one.make().to(DEVICE).eval()
    reference, fast = copy.deepcopy(model), torch.compile(model, backend=backend)
    with torch.no_grad():
        for _ in range(4):
            batch = one.batch(2, DEVICE)
            for got, want in zip(floats(fast, batch), floats(reference, batch), strict=True):
                check(got, want)
    for _ in range(4):
        batch = one.batch(2, DEVICE)
        for run, owner in ((fast, model), (reference, reference)):
            owner.zero_grad()
            sum(result.square().mean() for result in floats(run, batch)).backward()
        for got, want in zip(model.parameters(), reference.parameters(), strict=True):
            assert (got.grad is None) == (want.grad is None)
            if want.grad is not None and got.grad is not None:
                check(got.grad, want.grad)
    report = cgraph.trees.report()
    print(name, report)
    replayed = {one.mode for one in report.functions if one.replays}
    assert replayed.union({"forward"}) == {"inference", "forward", "backward"}
