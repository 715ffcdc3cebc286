"""Calls of graphed callables."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout
from torch.nn.modules.module import register_module_forward_hook
from torch.testing import assert_close

import cgraph
from cgraph import make_graphed_callables
from lab import Lab, fresh
from networks import leaf, network, random_state


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class Counting(nn.Module):
    """A counter of the calls of its Python."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x).tanh()


def test_one_callable_gives_one_and_a_tuple_gives_a_tuple(lab: Lab) -> None:
    one = make_graphed_callables(torch.sin, (fresh(lab, 4),))
    assert callable(one)
    many = make_graphed_callables((torch.sin, torch.cos), ((fresh(lab, 4),), (fresh(lab, 4),)))
    assert isinstance(many, tuple)
    single = make_graphed_callables((torch.sin,), ((fresh(lab, 4),),))
    assert isinstance(single, tuple)
    x = fresh(lab, 4)
    assert_close(one(x), x.sin())
    assert_close(many[0](x), x.sin())
    assert_close(many[1](x), x.cos())
    assert_close(single[0](x), x.sin())


def test_each_callable_is_captured_with_its_own_arguments(lab: Lab) -> None:
    product, matrix = make_graphed_callables(
        (torch.mul, torch.mm),
        ((fresh(lab, 3), fresh(lab, 3)), (fresh(lab, 4, 2), fresh(lab, 2, 5))),
    )
    a, b, c, d = fresh(lab, 3), fresh(lab, 3), fresh(lab, 4, 2), fresh(lab, 2, 5)
    assert_close(product(a, b), a * b)
    assert_close(matrix(c, d), c @ d)


@pytest.mark.parametrize("iterations", [0, 3, 11])
def test_the_callable_runs_num_warmup_iters_times_and_once_more(lab: Lab, iterations: int) -> None:
    module = Counting().to(lab.device)
    if lab.device == "cuda":
        module.linear(leaf(lab, 4, 6)).sum().backward()  # what cuBLAS sets up on first use
    make_graphed_callables(module, (leaf(lab, 4, 6),), num_warmup_iters=iterations)
    assert module.calls == iterations + 1
    x = fresh(lab, 4, 6)
    assert_close(module(x), module.linear(x).tanh())
    assert module.calls == iterations + 1


@pytest.mark.parametrize("backward_too", [True, False])
def test_graphs_are_captured_in_live_order_into_one_pool(lab: Lab, backward_too: bool) -> None:
    graphs: list[cgraph.CUDAGraph] = []
    log: list[str] = []

    class Logging(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
            ctx.name = name
            log.append(f"forward {name}")
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            log.append(f"backward {ctx.name}")
            return grad * 2, None

    functions = tuple(lambda x, name=name: Logging.apply(x, name) for name in "abc")
    samples = tuple((fresh(lab, 4).requires_grad_(backward_too),) for _ in functions)
    handle = cgraph.graph_pool_handle()
    hook = cgraph.register_graph_capture_end_hook(graphs.append)
    try:
        kept = make_graphed_callables(functions, samples, num_warmup_iters=0, pool=handle)
    finally:
        hook.remove()
    forward = ["forward a", "forward b", "forward c"]
    backward = ["backward c", "backward b", "backward a"]
    assert log == (forward + backward if backward_too else forward)
    assert len(graphs) == (6 if backward_too else 3)
    assert {tuple(graph.pool()) for graph in graphs} == {tuple(handle)}
    del kept


def test_without_a_differentiable_output_there_is_no_backward(
    lab: Lab,
) -> None:
    module = network(lab).requires_grad_(False)
    eager = copy.deepcopy(module)
    make_graphed_callables(module, (fresh(lab, 4, 6),))
    x = fresh(lab, 4, 6)
    result = module(x)
    assert not result.requires_grad
    assert_close(result, eager(x))
    y = leaf(lab, 4)
    graphed = make_graphed_callables(lambda t: (t > 0).int(), (leaf(lab, 4),))
    assert torch.equal(graphed(y), (y > 0).int())


def test_a_result_is_overwritten_by_the_next_call(lab: Lab) -> None:
    graphed = make_graphed_callables(torch.sin, (fresh(lab, 4),))
    x, y = fresh(lab, 4), fresh(lab, 4)
    first = graphed(x)
    assert_close(first, x.sin())
    second = graphed(y)
    assert_close(first, y.sin())
    assert first.data_ptr() == second.data_ptr()
    first.fill_(float("nan"))
    assert_close(graphed(x), x.sin())


def test_clone_outputs_gives_results_and_gradients_that_stay(lab: Lab) -> None:
    module = network(lab)
    eager = copy.deepcopy(module)
    make_graphed_callables(module, (leaf(lab, 4, 6),), clone_outputs=True)
    inputs = [leaf(lab, 4, 6) for _ in range(3)]
    results, grads = [], []
    for x in inputs:
        results.append(module(x))
        grads.append(torch.autograd.grad(results[-1].square().sum(), x)[0])
    for x, result, grad in zip(inputs, results, grads, strict=True):
        expected = eager(x)
        assert_close(result, expected)
        assert_close(grad, torch.autograd.grad(expected.square().sum(), x)[0])


def test_outputs_keep_their_containers_and_constants(lab: Lab) -> None:
    def function(x: Tensor) -> dict[str, Any]:
        return {
            "pair": Pair(x * 2, x + 1),
            "list": [x.sum(), (x.mean(), None)],
            "size": 3,
            "name": "cgraph",
            "index": x.argmax(),
        }

    graphed = make_graphed_callables(function, (leaf(lab, 5),))
    for x in (leaf(lab, 5), fresh(lab, 5)):
        result, expected = graphed(x), function(x)
        assert isinstance(result["pair"], Pair)
        assert (result["size"], result["name"], result["list"][1][1]) == (3, "cgraph", None)
        assert_close(result["pair"], expected["pair"])
        assert_close(result["list"][0], expected["list"][0])
        assert_close(result["list"][1][0], expected["list"][1][0])
        assert torch.equal(result["index"], expected["index"])
        assert not result["index"].requires_grad
        assert result["pair"].first.requires_grad == x.requires_grad


@pytest.mark.parametrize("result", [None, 7, (), [], {}, ((),)])
def test_a_callable_may_return_no_tensor(lab: Lab, result: object) -> None:
    def function(x: Tensor) -> object:
        x.mul_(2)
        return result

    sample = fresh(lab, 4)
    graphed = make_graphed_callables(function, (sample,))
    x = fresh(lab, 4)
    assert graphed(x) == result
    assert_close(sample, x * 2)


def test_outputs_may_be_inputs_views_parameters_and_each_other(lab: Lab) -> None:
    class Aliases(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(fresh(lab, 6))

        def forward(self, x: Tensor, c: Tensor) -> tuple[Tensor, ...]:
            y = x * self.weight
            return x, x[1:3], y, y, y.view(2, 3), c, self.weight, y.detach()

    module = Aliases()
    eager = copy.deepcopy(module)
    make_graphed_callables(module, (leaf(lab, 6), fresh(lab, 3)))
    for _ in range(3):
        x, c = leaf(lab, 6), fresh(lab, 3)
        results, expected = module(x, c), eager(x, c)
        assert_close(results, expected)
        assert [r.requires_grad for r in results] == [r.requires_grad for r in expected]
        weights = [fresh(lab, *result.shape) for result in results]
        found = []
        for one, outputs in ((module, results), (eager, expected)):
            one.zero_grad()
            loss = sum((o * w).sum() for o, w in zip(outputs, weights, strict=True))
            found.append((*torch.autograd.grad(loss, (x, one.weight)),))
        assert_close(*found)


def test_a_module_is_returned_itself_and_graphed_in_its_mode(lab: Lab) -> None:
    module = Counting().to(lab.device)
    assert make_graphed_callables(module, (fresh(lab, 4, 6),)) is module
    before, x = module.calls, fresh(lab, 4, 6)
    expected = module.linear(x).tanh()
    assert_close(module(x), expected)
    assert module.calls == before
    module.eval()
    assert_close(module(x), expected)
    assert module.calls == before + 1
    assert_close(module(fresh(lab, 2, 6)).shape, torch.Size([2, 3]))
    module.train()
    module(x)
    assert module.calls == before + 2


def test_a_module_can_be_graphed_in_both_modes(lab: Lab) -> None:
    module = network(lab, nn.Dropout(0.5))
    eager = copy.deepcopy(module)
    x = fresh(lab, 64, 6)
    make_graphed_callables(module, (fresh(lab, 64, 6),))
    make_graphed_callables(module.eval(), (fresh(lab, 64, 6),))
    for training in (True, False, True):
        for one in (module, eager):
            one.train(training)
        torch.manual_seed(3)
        result = module(x).clone()
        torch.manual_seed(3)
        assert_close(result, eager(x))


@pytest.mark.parametrize("bound", [True, False])
def test_a_deep_copy_of_a_graphed_module_has_its_own_parameters_and_is_not_graphed(
    lab: Lab, bound: bool
) -> None:
    module = Counting().to(lab.device)
    if not bound:
        module.forward = torch.sin
    make_graphed_callables(module, (fresh(lab, 4, 6),))
    twin = copy.deepcopy(nn.Sequential(module))[0]
    with torch.no_grad():
        twin.linear.weight.mul_(2)
    x = fresh(lab, 5, 6)
    assert_close(twin(x), twin.linear(x).tanh() if bound else x.sin())
    y = fresh(lab, 4, 6)
    assert_close(module(y), module.linear(y).tanh() if bound else y.sin())


def test_a_forward_that_is_an_attribute_of_the_module_is_called_in_the_other_mode(lab: Lab) -> None:
    module = nn.Identity()
    module.forward = lambda x: x * 3
    make_graphed_callables(module, (fresh(lab, 4),))
    x = fresh(lab, 4)
    assert_close(module(x), x * 3)
    assert_close(module.eval()(x), x * 3)


def test_a_function_gets_a_wrapper_with_its_name(lab: Lab) -> None:
    def function(x: Tensor) -> Tensor:
        """Its own text."""
        return x * 2

    graphed = make_graphed_callables(function, (fresh(lab, 4),))
    assert graphed is not function
    assert (graphed.__name__, graphed.__doc__) == ("function", "Its own text.")


def test_objects_methods_and_lambdas_are_callables(lab: Lab) -> None:
    class Adder:
        def __init__(self) -> None:
            self.value = fresh(lab, 4)

        def __call__(self, x: Tensor) -> Tensor:
            return x + self.value

        def subtract(self, x: Tensor) -> Tensor:
            return x - self.value

    adder, x = Adder(), fresh(lab, 4)
    samples = tuple((fresh(lab, 4),) for _ in range(3))
    add, subtract, sine = make_graphed_callables(
        (adder, adder.subtract, lambda x: x.sin()), samples
    )
    assert_close(add(x), x + adder.value)
    assert_close(subtract(x), x - adder.value)
    assert_close(sine(x), x.sin())


def test_hooks_registered_afterwards_run_at_each_call(lab: Lab) -> None:
    module = network(lab)
    eager = copy.deepcopy(module)
    make_graphed_callables(module, (leaf(lab, 4, 6),))
    seen: list[str] = []
    module.register_forward_pre_hook(lambda m, args: seen.append("pre"))
    module.register_forward_hook(lambda m, args, result: seen.append("forward"))
    module.register_full_backward_hook(lambda m, given, result: seen.append("backward"))
    for _ in range(2):
        seen.clear()
        x = leaf(lab, 4, 6)
        result = module(x)
        (found,) = torch.autograd.grad(result.square().sum(), x)
        assert seen == ["pre", "forward", "backward"]
        assert_close(result, eager(x))
        assert_close(found, torch.autograd.grad(eager(x).square().sum(), x)[0])


def test_hooks_of_all_modules_run_once_around_a_graphed_one(lab: Lab) -> None:
    hook = register_module_forward_hook(lambda module, args, output: output + 1)
    try:
        module = nn.Linear(3, 3, device=lab.device)
        eager = copy.deepcopy(module)
        graphed = make_graphed_callables(module, (fresh(lab, 2, 3),))
        for _ in range(2):
            x = fresh(lab, 2, 3)
            assert_close(graphed(x), eager(x))
    finally:
        hook.remove()
    x = fresh(lab, 2, 3)
    assert_close(graphed(x), eager(x))


def test_what_the_call_of_a_module_does_besides_happens_once(lab: Lab) -> None:
    class Doubled(nn.Linear):
        def __call__(self, x: Tensor) -> Tensor:
            return cast("Tensor", super().__call__(x) * 2)

    module = Doubled(3, 3, device=lab.device)
    eager = copy.deepcopy(module)
    make_graphed_callables(module, (fresh(lab, 2, 3),))
    x = fresh(lab, 2, 3)
    assert_close(module(x), eager(x))


def test_hooks_of_submodules_are_captured_with_a_warning(lab: Lab) -> None:
    module = network(lab)
    calls: list[int] = []

    def double(_: nn.Module, args: Any, result: Tensor) -> Tensor:
        calls.append(1)
        return result * 2

    module[0].register_forward_hook(double)
    eager = copy.deepcopy(module)
    with pytest.warns(UserWarning, match=r"submodules of Sequential have hooks \(0\)") as caught:
        make_graphed_callables(module, (fresh(lab, 4, 6),))
    assert caught[0].filename == __file__
    before, x = len(calls), fresh(lab, 4, 6)
    result = module(x)
    assert len(calls) == before
    assert_close(result, eager(x))


class LateBuffers(nn.BatchNorm1d):
    """A module whose buffers make readers wait for a while, on the current stream."""

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        if torch.cuda.is_available():
            torch.cuda._sleep(100_000_000)
        return super().buffers(recurse)


def test_state_is_noted_before_the_warm_up_changes_it(lab: Lab) -> None:
    for _ in range(2):  # the first time loads kernels, which waits for the device
        module = LateBuffers(6).to(lab.device)
        make_graphed_callables(module, (fresh(lab, 4, 6),), preserve_state=True)
        assert module.num_batches_tracked == 0
        assert torch.equal(module.running_var.cpu(), torch.ones(6))


def test_the_warm_up_leaves_traces_unless_state_is_preserved(lab: Lab) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.5)).to(lab.device)

    plain, preserved = build(), build()
    make_graphed_callables(plain, (fresh(lab, 4, 6),))
    assert plain[0].num_batches_tracked == 3
    sample = fresh(lab, 4, 6)
    before = random_state(lab)
    make_graphed_callables(preserved, (sample,), preserve_state=True)
    assert torch.equal(before, random_state(lab))
    assert preserved[0].num_batches_tracked == 0
    assert torch.equal(preserved[0].running_var.cpu(), torch.ones(6))
    eager = build()
    for _ in range(3):
        x = fresh(lab, 4, 6)
        torch.manual_seed(11)
        result = preserved(x).clone()
        torch.manual_seed(11)
        assert_close(result, eager(x))
        for name, buffer in eager.named_buffers():
            assert_close(preserved.get_buffer(name), buffer)


def test_the_state_is_put_back_also_if_the_capture_fails(lab: Lab) -> None:
    module = nn.BatchNorm1d(6).to(lab.device)
    calls: list[int] = []

    def fails(x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 4:
            raise ValueError("the function's own")
        return dropout(x, 0.5)

    samples = (fresh(lab, 4, 6),), (fresh(lab, 4),)
    before = random_state(lab)
    with pytest.raises(ValueError, match="own"):
        make_graphed_callables((module, fails), samples, preserve_state=True)
    assert torch.equal(before, random_state(lab))
    assert module.num_batches_tracked == 0


@pytest.mark.parametrize(
    "guard", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference"]
)
@pytest.mark.parametrize("at_capture", [True, False])
def test_inference_without_gradients_is_right(lab: Lab, guard: Any, at_capture: bool) -> None:
    module = network(lab).eval()
    eager = copy.deepcopy(module)
    if at_capture:
        with guard():
            make_graphed_callables(module, (torch.randn(4, 6, device=lab.device),))
    else:
        make_graphed_callables(module, (fresh(lab, 4, 6),))
    for _ in range(3):
        with guard():
            x = fresh(lab, 6, 4).t() if at_capture else fresh(lab, 4, 6)
            result = module(x)
            assert not result.requires_grad
            assert_close(result, eager(x))


@pytest.mark.parametrize("cached", [True, False])
def test_autocast_is_captured_without_its_cache_and_refused_with_it(lab: Lab, cached: bool) -> None:
    module = network(lab)
    eager = copy.deepcopy(module)
    if cached:
        with (
            torch.autocast(lab.device, dtype=torch.bfloat16),
            pytest.raises(
                cgraph.errors.StateError,
                match=r"does not support the autocast caching.*cache_enabled",
            ),
        ):
            make_graphed_callables(None, None)
        return
    with torch.autocast(lab.device, dtype=torch.bfloat16, cache_enabled=False):
        make_graphed_callables(module, (fresh(lab, 4, 6),))
        for _ in range(2):
            x = fresh(lab, 4, 6)
            result, expected = module(x), eager(x)
            assert result.dtype == torch.bfloat16
            assert_close(result, expected)
            for one, outputs in ((module, result), (eager, expected)):
                one.zero_grad()
                outputs.float().square().sum().backward()
            for mine, other in zip(module.parameters(), eager.parameters(), strict=True):
                assert_close(mine.grad, other.grad, rtol=2e-2, atol=2e-2)


def test_annotations_label_both_passes(lab: Lab) -> None:
    graphs: list[cgraph.CUDAGraph] = []
    hook = cgraph.register_graph_capture_end_hook(graphs.append)
    try:
        graphed = make_graphed_callables(
            lambda x: x.sin() * 2, (leaf(lab, 4),), enable_annotations=True
        )
    finally:
        hook.remove()
    assert all(graph._labels for graph in graphs)
    del graphed
