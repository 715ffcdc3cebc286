"""`torch.compile(backend="cgraph")` is right as eager."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from lab import Lab, fresh


@pytest.fixture(autouse=True)
def _own_compiler(lab: Lab) -> Iterator[None]:
    """Let each test compile anew."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def net(lab: Lab) -> nn.Module:
    layers = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1)
    return nn.Sequential(*layers).to(lab.device)


def of(mode: str) -> list[Any]:
    return [one for one in cgraph.trees.report().functions if one.mode == mode]


def check_gradients(model: nn.Module, reference: nn.Module) -> None:
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    for one, other in pairs:
        assert one.grad is not None
        assert other.grad is not None
        assert torch.allclose(one.grad, other.grad, atol=1e-4)


def test_inference_is_replayed_from_the_third_call_on(lab: Lab) -> None:
    model = net(lab)
    fast = torch.compile(model, backend="cgraph")
    with torch.no_grad():
        for _ in range(6):
            x = fresh(lab, 4, 8)
            assert torch.allclose(fast(x), model(x), atol=1e-4)
    [one] = of("inference")
    assert (one.graphs, one.replays) == (1, 4)


def test_a_training_step_is_replayed_and_gradients_may_accumulate(lab: Lab) -> None:
    model = net(lab)
    reference, fast = copy.deepcopy(model), torch.compile(model, backend="cgraph")
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, reference)]
    for number in range(12):
        x = fresh(lab, 4, 8)
        got, want = fast(x), reference(x)
        assert torch.allclose(got, want, atol=1e-4)
        for y in (got, want):
            y.square().mean().backward()
        check_gradients(model, reference)
        if number % 3 == 2:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert [one.graphs for one in (*of("forward"), *of("backward"))] == [1, 1]


def test_several_forward_passes_may_wait_for_one_backward_pass(lab: Lab) -> None:
    model = net(lab)
    reference, fast = copy.deepcopy(model), torch.compile(model, backend="cgraph")
    for _ in range(6):
        xs = [fresh(lab, 4, 8) for _ in range(3)]
        for one, run in ((model, fast), (reference, reference)):
            one.zero_grad()
            sum(run(x).square().mean() for x in xs).backward()
        check_gradients(model, reference)


def test_one_compiled_layer_that_many_modules_use_is_captured_for_each(lab: Lab) -> None:
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6)).to(lab.device)
    fast = [torch.compile(layer, backend="cgraph") for layer in layers]
    with torch.no_grad():
        for _ in range(6):
            x = y = fresh(lab, 4, 8)
            for one, layer in zip(fast, layers, strict=True):
                x, y = torch.relu(one(x)), torch.relu(layer(y))
            assert torch.allclose(x, y, atol=1e-4)
    assert sum(one.graphs for one in of("inference")) == 6


def test_both_sides_of_a_graph_break_belong_to_one_step(lab: Lab) -> None:
    def body(x: Tensor) -> Tensor:
        y = torch.sin(x)
        torch._dynamo.graph_break()
        return y * 2 + x

    fast = torch.compile(body, backend="cgraph")
    with torch.no_grad():
        for _ in range(6):
            x = fresh(lab, 4, 8)
            assert torch.allclose(fast(x), body(x), atol=1e-5)
    assert [one.graphs for one in of("inference")] == [1, 1]


def test_functions_that_are_compiled_one_by_one_may_be_chained(lab: Lab) -> None:
    first, second = (lambda x: torch.sin(x) * 0.5), (lambda x: x @ x.t())
    fast = [torch.compile(one, backend="cgraph") for one in (first, second)]
    with torch.no_grad():
        for _ in range(6):
            x = fresh(lab, 8, 8)
            assert torch.allclose(fast[1](fast[0](x)), second(first(x)), atol=1e-4)


def test_dropout_differs_in_each_call(lab: Lab) -> None:
    fast = torch.compile(lambda x: nn.functional.dropout(x, 0.5), backend="cgraph")
    x = torch.ones(256, device=lab.device)
    masks = [fast(x).clone() for _ in range(6)]
    for one, other in itertools.pairwise(masks):
        assert not torch.equal(one, other)
        assert 0.2 < (one == 0).float().mean() < 0.8


def test_dropout_repeats_after_a_seed(lab: Lab) -> None:
    fast = torch.compile(lambda x: nn.functional.dropout(x, 0.5), backend="cgraph")
    x = torch.ones(256, device=lab.device)
    for _ in range(3):
        fast(x)
    runs = []
    for _ in range(2):
        torch.manual_seed(7)
        runs.append([fast(x).clone() for _ in range(4)])
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(runs[0][0], runs[0][1])


def test_an_error_of_an_overwritten_output_names_the_line_of_the_function(lab: Lab) -> None:
    def squares(x: Tensor) -> Tensor:
        return x * x + 1

    fast = torch.compile(squares, backend="cgraph", options={"held_outputs": "raise"})
    with torch.no_grad():
        held = [fast(fresh(lab, 4)) for _ in range(5)]
    with pytest.raises(RuntimeError, match=r"squares \(test_compile.py:\d+\)"):
        held[2].sum()


def test_a_reset_of_the_compiler_drops_all_graphs_and_keeps_what_is_held(lab: Lab) -> None:
    model = net(lab)
    fast = torch.compile(model, backend="cgraph")
    with torch.no_grad():
        for _ in range(4):
            y = fast(x := fresh(lab, 4, 8))
        torch.compiler.reset()
        assert all(one.graphs == 0 for one in of("inference"))
        assert torch.allclose(y, model(x), atol=1e-4)
        for _ in range(4):
            x = fresh(lab, 4, 8)
            assert torch.allclose(fast(x), model(x), atol=1e-4)


def test_a_graph_that_needs_values_on_the_host_is_right_and_the_report_says_why(lab: Lab) -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        fast = torch.compile(lambda x: torch.nonzero(x).sum(0) + 1, backend="cgraph")
        with warnings.catch_warnings():
            # On CUDA, the part behind the operator is captured.
            warnings.simplefilter("ignore", cgraph.errors.EagerWarning)
            for _ in range(4):
                x = (fresh(lab, 16) > 0).float()
                assert torch.equal(fast(x), torch.nonzero(x).sum(0) + 1)
    assert "nonzero" in str(cgraph.trees.report())


def in_torchs_trees(model: Any, x: Tensor) -> Any:
    from torch._inductor.cudagraph_trees import cudagraphify_impl

    options = {"device_index": 0, "is_backward": False, "is_inference": True}
    line = 'File "/some/model.py", line 12, in forward'
    return cudagraphify_impl(model, [x], (), stack_traces=[line], **options)


def test_patched_torch_puts_its_graphs_into_these_trees_until_the_last_patch_is_undone(
    lab: Lab,
) -> None:
    x = fresh(lab, 4)
    patches = [cgraph.patch_torch(trees=True), cgraph.patch_torch(trees=True)]
    with cgraph.patch_torch():
        patches.pop().undo()
        fast = in_torchs_trees(lambda args: [args.pop() * 2], x)
    patches.pop().undo()
    for _ in range(4):
        cgraph.trees.mark_step_begin()
        x = fresh(lab, 4)
        [y] = fast([x])
        assert torch.equal(y, x * 2)
    [one] = [one for one in of("inference") if one.graphs]
    assert one.name == "forward (model.py:12), inference"
    assert type(in_torchs_trees(lambda args: [args.pop() * 2], x)) is not type(fast)
