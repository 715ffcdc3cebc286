"""Public models through ``graphed``: the results of eager, forward and in training.

Needs transformers, timm and torch-geometric. Without one of them a test fails.
"""

from __future__ import annotations

import copy
import pkgutil
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim import SGD

import cgraph
from models import MODELS, Batch, Model, tensors

pytestmark = [
    pytest.mark.gpu,
    # Warnings of the packages. cgraph's own are raised, by the options below.
    pytest.mark.filterwarnings("ignore"),
]

DEVICE = "cuda"
SIZES = (2, 3)
STEPS = 3

Loss = Callable[..., Tensor]


def own_loss(model: Any, targets: Tensor, **batch: Any) -> Tensor:
    """Return the model's own loss."""
    loss: Tensor = model(**batch, labels=targets).loss
    return loss


def class_loss(model: Any, targets: Tensor, **batch: Any) -> Tensor:
    """Return the loss of the class of each image or node."""
    return cross_entropy(model(**batch), targets)


def noise_loss(model: Any, targets: Tensor, **batch: Any) -> Tensor:
    """Return the loss of a noise to find."""
    return mse_loss(model(**batch), targets)


def classes(batch: Batch) -> Tensor:
    """Return one of ten classes for each image or node."""
    return torch.randint(10, batch["x"].shape[:1], device=DEVICE)


# None of these has dropout.
TARGETS: dict[str, tuple[Callable[[Batch], Tensor], Loss]] = {
    "decoder": (lambda batch: batch["input_ids"], own_loss),
    "MoE, with breaks": (lambda batch: batch["input_ids"], own_loss),
    "ResNet": (classes, class_loss),
    "GNN": (classes, class_loss),
    "GNN, with breaks": (classes, class_loss),
    "diffusion UNet": (lambda batch: torch.randn_like(batch["x"]), noise_loss),
}


@pytest.fixture(autouse=True)
def _exactly_repeatable() -> Iterator[None]:
    with torch.backends.cudnn.flags(
        enabled=True, benchmark=False, deterministic=True, allow_tf32=False
    ):
        yield


@pytest.mark.parametrize("name", MODELS)
def test_replays_of_a_public_model_equal_eager(name: str, monkeypatch: MonkeyPatch) -> None:
    one = MODELS[name]
    model = one.make().to(DEVICE).eval()
    graphed = graphed_as_marked(one, model, monkeypatch)
    with torch.no_grad():
        for size in SIZES:
            results = [check_call(graphed, model, one.batch(size, DEVICE)) for _ in range(3)]
            # Fresh inputs give other results, or equality would prove nothing.
            assert not torch.allclose(results[0], results[1], rtol=1e-2, atol=0)
    require_replays(graphed, keys=len(SIZES), each=2, breaks=one.breaks, marked=one.marked)


@pytest.mark.parametrize("name", [name for name, one in MODELS.items() if one.breaks])
def test_a_model_that_needs_a_break_says_where(name: str) -> None:
    one = MODELS[name]
    model = one.make().to(DEVICE).eval()
    batch = one.batch(2, DEVICE)
    with torch.no_grad():
        expected = model(**batch)
        graphed = cgraph.graphed(model, on_fail="raise")
        assert_same(graphed(**batch), expected)
        with pytest.raises(RuntimeError) as raised:
            graphed(**batch)
        notes = getattr(raised.value, "__notes__", [])
        assert f"{one.refused}:" in "\n".join([str(raised.value), *notes])
        # The model is undamaged.
        assert_same(model(**batch), expected)


def test_a_model_output_is_of_its_own_class_in_each_call() -> None:
    from transformers.modeling_outputs import CausalLMOutputWithPast

    one = MODELS["decoder"]
    model = one.make().to(DEVICE).eval()
    graphed = cgraph.graphed(model, on_fail="raise")
    with torch.no_grad():
        batches = [one.batch(2, DEVICE) for _ in range(3)]
        outputs = [graphed(**batch, output_hidden_states=True) for batch in batches]
        for output, batch in zip(outputs, batches, strict=True):
            expected = model(**batch, output_hidden_states=True)
            assert type(output) is CausalLMOutputWithPast
            assert list(output.keys()) == list(expected.keys()) == ["logits", "hidden_states"]
            assert type(output.hidden_states) is tuple and output[0] is output.logits
            assert_same(output, expected)
    require_replays(graphed, keys=1, each=2)


@pytest.mark.parametrize("whole", [False, True], ids=["model", "loss"])
@pytest.mark.parametrize("name", TARGETS)
def test_a_public_model_trains_as_in_eager(
    name: str, whole: bool, monkeypatch: MonkeyPatch
) -> None:
    one, (targets, loss) = MODELS[name], TARGETS[name]
    eager = one.make().to(DEVICE)
    ours = copy.deepcopy(eager)
    begun = copy.deepcopy(eager.state_dict())
    mark(one, monkeypatch)
    surface = partial(loss, ours) if whole else ours
    # A decoder with a mask reads its values, unless its stream captures: then it trains eagerly.
    reads = "attention_mask" in one.batch(4, DEVICE) and "input_ids" in one.batch(4, DEVICE)
    graphed = cgraph.graphed(surface, on_fail="eager" if reads else "raise")
    losses = partial(loss, eager), graphed if whole else partial(loss, graphed)
    optimizers = [SGD(model.parameters(), lr=0.02, momentum=0.9) for model in (eager, ours)]
    for _ in range(STEPS):
        batch = one.batch(4, DEVICE)
        batch["targets"] = targets(batch)
        expected, found = map(partial(step, batch), losses, optimizers)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)
    trained = eager.state_dict()
    torch.testing.assert_close(dict(ours.state_dict()), dict(trained), rtol=1e-3, atol=1e-4)
    learnt = [key for key, value in begun.items() if not torch.equal(value, trained[key])]
    assert len(learnt) > 0.9 * len(begun)
    if reads:
        assert all(key.state != "captured" for key in graphed.report().keys)
        return
    require_replays(graphed, keys=1, each=STEPS - 1, breaks=one.breaks, marked=one.marked)


def step(batch: Batch, loss: Loss, optimizer: SGD) -> Tensor:
    """Take one step of an optimizer; return the previous loss."""
    optimizer.zero_grad()
    found = loss(**batch)
    found.backward()
    optimizer.step()
    return found.detach().clone()


def mark(one: Model, monkeypatch: MonkeyPatch) -> None:
    """Mark the function that must run eagerly in a model as a break."""
    if one.marked is not None:
        monkeypatch.setattr(one.marked, cgraph.eager_break(pkgutil.resolve_name(one.marked)))


def graphed_as_marked(one: Model, model: nn.Module, monkeypatch: MonkeyPatch) -> Any:
    """Return the graphed model, with its eager part marked."""
    mark(one, monkeypatch)
    return cgraph.graphed(model, on_fail="raise")


def check_call(graphed: Any, model: nn.Module, batch: Batch) -> Tensor:
    """Compare one call with eager; return the first tensor of the result."""
    expected = model(**batch)
    found = graphed(**batch)
    assert type(found) is type(expected)
    assert_same(found, expected)
    return tensors(found)[0].clone()


def assert_same(found: Any, expected: Any) -> None:
    """Require all tensors to be equal but for rounding, relative to the largest number of each."""
    pairs = list(zip(tensors(found), tensors(expected), strict=True))
    assert pairs
    for one, other in pairs:
        scale = other.abs().max().item()
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * scale)


def require_replays(
    graphed: Any, *, keys: int, each: int, breaks: int = 0, marked: str | None = None
) -> None:
    """Require replays for all but each key's first call, with breaks at the marked function."""
    report = graphed.report()
    assert (report.captured, len(report.keys)) == (keys, keys), str(report)
    for key in report.keys:
        assert (key.replays, key.eager_calls, key.rerecorded) == (each, 1, ()), str(report)
        assert (key.nodes or 0) > 10 and len(key.breaks) == breaks, str(report)
        for place in key.breaks:
            assert marked is not None and marked.endswith(place.split(" (")[0])
