"""Gradients of compiled functions: what is differentiated twice, what a backward pass compiles."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
import torch._functorch.config
from torch import Tensor, nn

import cgraph
from lab import Lab, fresh

BACKENDS = ("cgraph", "cgraph_aot")
both = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(autouse=True)
def _own_compiler(lab: Lab) -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def penalty_gradient(model: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor) -> Tensor | None:
    """Return the gradient, by a weight, of the square of the gradient by the input."""
    x = x.clone().requires_grad_()
    (force,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (force.square().sum() + weight.sum() * 0).backward()
    found, weight.grad = weight.grad, None
    return found


@both
def test_a_gradient_of_a_gradient_is_refused_in_each_call_as_by_torch(
    lab: Lab, backend: str
) -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).to(lab.device)
    fast = torch.compile(model, backend=backend)
    with torch._functorch.config.patch(donated_buffer=False):
        for _ in range(5):
            with pytest.raises(RuntimeError, match="does not currently support double backward"):
                penalty_gradient(fast, fresh(lab, 4, 3), model[0].weight)


@both
@pytest.mark.parametrize("chained", [False, True])
# Dynamo looks at the gradient of each input.
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_gradient_of_a_gradient_by_an_input_that_moves_is_refused_too(
    lab: Lab, backend: str, chained: bool
) -> None:
    first = torch.compile(lambda x: x * 2, backend=backend)
    second = torch.compile(torch.sin, backend=backend)
    weight = torch.ones(1, device=lab.device, requires_grad=True)

    def model(x: Tensor) -> Tensor:
        out: Tensor = second(first(x) if chained else x)
        return out

    with torch._functorch.config.patch(donated_buffer=False):
        for _ in range(5):
            with pytest.raises(RuntimeError, match="does not currently support double backward"):
                penalty_gradient(model, fresh(lab, 4, 3), weight)


def test_a_replay_returns_the_weight_itself_that_the_function_returns(lab: Lab) -> None:
    weight = nn.Parameter(fresh(lab, 4))
    fast = cgraph.trees.cudagraphify(
        lambda args: [args[0] * 2, args.pop(0)], [weight], static_input_idxs=[0], is_inference=True
    )
    with torch.no_grad():
        for _ in range(4):
            cgraph.trees.mark_step_begin()
            twice, same = fast([weight])
            assert same is weight
            assert torch.equal(twice, weight * 2)


def test_a_function_may_be_compiled_in_a_backward_pass() -> None:
    # Objects that were freed too early are found.
    environment = {**os.environ, "PYTHONMALLOC": "debug", "CGRAPH_DRIVER": "sim"}
    subprocess.run([sys.executable, "-c", _IN_BACKWARD], env=environment, check=True)


_IN_BACKWARD = """
import gc
import torch
import cgraph

double = torch.compile(lambda g: g * 2, backend="cgraph")


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return double(grad)


for step in range(6):
    x = torch.ones(3, requires_grad=True)
    Scale.apply(x).sum().backward()
    gc.collect()
    assert x.grad.tolist() == [2.0] * 3
[one] = cgraph.trees.report().functions
assert one.replays > 0, one
"""


def test_a_weight_that_the_function_gives_other_memory_is_right_and_the_reason_is_told(
    lab: Lab,
) -> None:
    class Masked(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.data = self.weight.data * 0.5
            return super().forward(x)

    for backend in BACKENDS:
        model, reference = Masked(3, 3).to(lab.device), Masked(3, 3).to(lab.device)
        reference.load_state_dict(model.state_dict())
        fast = torch.compile(model, backend=backend)
        with torch.no_grad(), pytest.warns(cgraph.errors.EagerWarning, match="other memory"):
            for _ in range(4):
                x = fresh(lab, 2, 3)
                assert torch.allclose(fast(x), reference(x), atol=1e-5)
                assert torch.equal(model.weight, reference.weight)


def test_a_recording_that_moves_a_weight_unseen_raises_and_leaves_it_as_it_was(lab: Lab) -> None:
    weight = nn.Parameter(fresh(lab, 4))
    want, address = weight.detach().clone(), weight.data_ptr()
    others = [torch.zeros(4, device=lab.device), torch.zeros(4, device=lab.device)]

    def moving(args: list[Tensor]) -> list[Tensor]:
        result = args[0] * 2
        if calls:
            args[0].data = others[0]
        calls.append(0)
        return [result]

    calls: list[int] = []
    fast = cgraph.trees.cudagraphify(moving, [weight], static_input_idxs=[0], is_inference=True)
    with torch.no_grad():
        fast([weight])
        for _ in range(2):
            with pytest.raises(cgraph.errors.CaptureError, match="other memory to input 0"):
                fast([weight])
            assert weight.data_ptr() == address
            assert torch.equal(weight, want)


def test_a_recording_that_fails_leaves_a_weight_as_it_was(lab: Lab) -> None:
    weight = nn.Parameter(fresh(lab, 4))
    want, calls = weight.detach().clone(), list[int]()

    def failing(args: list[Tensor]) -> list[Tensor]:
        result = args[0] * 2
        if calls:
            args[0].data = result
            raise ValueError("of the function")
        calls.append(0)
        return [result]

    fast = cgraph.trees.cudagraphify(failing, [weight], static_input_idxs=[0], is_inference=True)
    with torch.no_grad():
        fast([weight])
        for _ in range(2):
            with pytest.raises(ValueError, match="of the function"):
                fast([weight])
            assert torch.equal(weight, want)


@both
def test_a_gradient_of_a_gradient_is_refused_where_weights_are_saved_transposed(
    lab: Lab, backend: str
) -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.Linear(8, 1)).to(lab.device)
    fast = torch.compile(lambda x: model(x * 2).sum(), backend=backend)
    with torch._functorch.config.patch(donated_buffer=False):
        for _ in range(5):
            x = fresh(lab, 4, 3).requires_grad_()
            with pytest.raises(RuntimeError, match="does not currently support double backward"):
                (force,) = torch.autograd.grad(fast(x), x, create_graph=True)
                force.square().sum().backward()


@both
def test_what_hooks_have_saved_in_other_strides_is_right(lab: Lab, backend: str) -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)).to(lab.device)
    fast = torch.compile(model, backend=backend)

    def moved(saved: Tensor) -> Tensor:
        return saved.contiguous().clone()

    for number in range(8):
        x = fresh(lab, 5, 3)
        if number >= 4 and (backend == "cgraph_aot" or lab.device == "cpu"):
            # Inductor's own backward pass refuses other strides than those that it has compiled.
            x = fresh(lab, 1, 3).expand(5, 3)
        gradients = []
        for call in (fast, model):
            hooks = torch.autograd.graph.saved_tensors_hooks(moved, lambda saved: saved)
            with hooks if number != 2 else nullcontext():
                call(x).square().sum().backward()
            gradients.append(
                [one.grad.clone() for one in model.parameters() if one.grad is not None]
            )
            model.zero_grad()
        for got, want in zip(*gradients, strict=True):
            assert torch.allclose(got, want, atol=1e-5)
