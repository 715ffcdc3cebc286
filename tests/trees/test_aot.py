"""`cgraph.aot` and `torch.compile(backend="cgraph_aot")`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import cgraph
from cgraph.aot import CudaGraphModule, apply_cuda_graphs, cudagraphs, find_input_mutations
from cgraph.errors import ArgumentError
from lab import Lab, fresh
from tree_programs import step


@pytest.fixture(autouse=True)
def _own_compiler(lab: Lab) -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Counted(nn.Module):
    """Counts how often its Python runs."""

    runs = 0

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        self.runs += 1
        return self.function(*args)


def traced(function: Callable[..., Any], *inputs: Any) -> torch.fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*inputs)


def parts_of(graph: torch.fx.GraphModule) -> int:
    return sum(isinstance(one, CudaGraphModule) for one in graph.modules())


def test_3_1_cloner_clones_tensors_and_passes_others_through(lab: Lab) -> None:
    x = fresh(lab, 4)
    y = cgraph.aot.cloner(x)
    assert torch.equal(x, y)
    assert y.data_ptr() != x.data_ptr()
    assert cgraph.aot.cloner(3) == 3


def test_3_2_hooks_of_a_graph_module_do_not_fire(lab: Lab) -> None:
    module = CudaGraphModule(nn.ReLU(), set())
    module.register_forward_hook(lambda *_: pytest.fail("a hook ran"))
    assert isinstance(module, nn.Module)
    for _ in range(3):
        x = fresh(lab, 4)
        assert torch.equal(module(x), x.relu())


def test_3_3_to_3_6_a_module_runs_twice_and_its_results_stay_right(lab: Lab) -> None:
    inner = Counted(lambda x, y: (x.add_(1) * y, {"sum": x + y}))
    module = CudaGraphModule(inner, {0})
    held = []
    for _ in range(6):
        x, y = fresh(lab, 8), fresh(lab, 8)
        before = x.clone()
        product, named = module(x, y)
        held.append((product, named["sum"], before, y))
        # The first call and the capture each change the argument once.
        assert torch.allclose(x, before + 1)
    assert inner.runs == 2
    for product, total, before, y in held:
        assert torch.allclose(product, (before + 1) * y)
        assert torch.allclose(total, before + 1 + y)


def test_3_7_arguments_of_another_shape_are_refused_and_of_other_strides_taken(lab: Lab) -> None:
    module = CudaGraphModule(nn.Identity(), set(), name="same")
    for _ in range(3):
        module(fresh(lab, 4, 3))
    for other in (fresh(lab, 1, 3), fresh(lab, 4, 3).double()):
        with pytest.raises(ArgumentError, match=r"argument 0 of same is .* expected one of shape"):
            module(other)
    with pytest.raises(ArgumentError, match="argument 0 of same is a int, expected a Tensor"):
        module(3)
    with pytest.raises(ArgumentError, match="2 arguments of same, expected 1"):
        module(fresh(lab, 4, 3), fresh(lab, 4, 3))
    x = fresh(lab, 3, 4)
    assert torch.equal(module(x.t()), x.t())
    with pytest.raises(ArgumentError, match=r"mutated_inputs of same has \[1\]"):
        CudaGraphModule(nn.Identity(), {1}, name="same")(x)


def test_3_8_inputs_that_share_written_memory_are_all_reported(lab: Lab) -> None:
    def write(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        a[1:].mul_(2)
        torch.add(b, 1, out=c)
        return a + b

    base = fresh(lab, 8)
    graph = traced(write, fresh(lab, 8), fresh(lab, 8), fresh(lab, 8)).graph
    assert find_input_mutations(graph) == {0, 2}
    places = [node for node in graph.nodes if node.op == "placeholder"]
    # As where a caller passes two views of one tensor.
    places[1].meta["val"] = places[0].meta["val"].view(2, 4)
    assert find_input_mutations(graph) == {0, 1, 2}
    del base


def test_3_9_what_operators_write_in_lists_is_found(lab: Lab) -> None:
    def write(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        torch._foreach_add_([a, b], 1.0)
        return a + c

    inputs = [fresh(lab, 4) for _ in range(3)]
    assert find_input_mutations(traced(write, *inputs).graph) == {0, 1}


def test_an_argument_that_shares_memory_with_a_written_one_is_right(lab: Lab) -> None:
    module = CudaGraphModule(lambda a, b: a.add_(1) + b, {0})
    for number in range(6):
        x, y = fresh(lab, 8), fresh(lab, 8)
        other = x if number % 2 else y
        want = (x + 1) + (x + 1 if number % 2 else y)
        assert torch.allclose(module(x, other), want)


def test_3_10_modules_in_a_graph_become_graph_modules(lab: Lab) -> None:
    inner = traced(lambda x: x.relu_() * 2, fresh(lab, 4))

    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + self.inner(x + 1)

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, module: nn.Module, name: str) -> bool:
            return True

    def outer(module: nn.Module) -> torch.fx.GraphModule:
        return torch.fx.GraphModule(module, Tracer().trace(module))

    graph, reference = outer(Outer(inner)), Outer(copy.deepcopy(inner))
    code = graph.code
    for _ in range(2):
        apply_cuda_graphs(graph)
        assert parts_of(graph) == 1
        assert graph.code == code
    for _ in range(4):
        x = fresh(lab, 4)
        y = x.clone()
        assert torch.allclose(graph(x), reference(y))
        assert torch.equal(x, y)
    with pytest.raises(ArgumentError, match="inner is a Linear, expected a graph of ATen's"):
        apply_cuda_graphs(outer(Outer(nn.Linear(4, 4))))
    [call, _] = [node for node in graph.graph.nodes if node.op == "call_module"]
    call.kwargs = {"input": call.args[0]}
    with pytest.raises(ArgumentError, match="expected no keywords"):
        apply_cuda_graphs(graph)


def test_3_11_a_graph_with_an_operator_on_the_host_has_parts_around_it(lab: Lab) -> None:
    def body(x: Tensor) -> Tensor:
        y = (x * 2).sin()
        count = torch.nonzero(y).sum() if lab.device == "cpu" else y.sum().cpu().to(x.device)
        return y.cos() + count

    def of(x: Tensor) -> Tensor:
        return body(x)

    x = torch.ones(8, device=lab.device)
    fast = cudagraphs(make_fx(of)(x), [x], name="of")
    assert parts_of(fast) >= 2
    for _ in range(4):
        step()
        x = torch.ones(8, device=lab.device) * torch.rand((), device=lab.device)
        assert torch.allclose(fast(x), body(x), atol=1e-5)
    reasons = [reason for name, reason in cgraph.trees.report().skips if name == "of"]
    assert reasons


def test_a_graph_that_writes_to_inputs_beside_what_no_capture_can_have_stays_eager(
    lab: Lab,
) -> None:
    def body(x: Tensor) -> Tensor:
        found = torch.nonzero(x).sum()
        x.add_(1)
        return x + found

    x = torch.ones(8, device=lab.device)
    with pytest.warns(cgraph.errors.EagerWarning, match="a graph that writes to its inputs"):
        fast = cudagraphs(make_fx(body)(x), [x])
    assert parts_of(fast) == 0
    want = x.clone()
    assert torch.equal(fast(x), body(want))
    assert torch.equal(x, want)


def test_3_12_the_backend_trains(lab: Lab) -> None:
    layers = nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.0), nn.Linear(16, 1)
    model = nn.Sequential(*layers).to(lab.device)
    reference = copy.deepcopy(model)
    fast = torch.compile(model, backend="cgraph_aot")
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, reference)]
    held = []
    for _ in range(8):
        x = fresh(lab, 4, 8)
        got, want = fast(x), reference(x)
        held.append((got, want))
        for y, optimizer in zip((got, want), optimizers, strict=True):
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for got, want in held:
        assert torch.allclose(got, want, atol=1e-4)
    functions = cgraph.trees.report().functions
    assert {one.graphs for one in functions if one.graphs} == {1}
    assert sum(one.replays for one in functions) >= 10


def test_the_backend_keeps_buffers_and_state_as_eager_does(lab: Lab) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).to(lab.device)
    reference = copy.deepcopy(model)
    fast = torch.compile(model, backend="cgraph_aot")
    for _ in range(6):
        x = fresh(lab, 16, 8)
        assert torch.allclose(fast(x), reference(x), atol=1e-4)
    for got, want in zip(model.buffers(), reference.buffers(), strict=True):
        assert torch.allclose(got, want, atol=1e-4)


def test_the_backend_is_right_for_sizes_that_change(lab: Lab) -> None:
    fast = torch.compile(lambda x: (x * 2).cumsum(0), backend="cgraph_aot", dynamic=True)
    for size in (3, 5, 4, 3, 5, 4, 3, 5, 4):
        x = fresh(lab, size)
        assert torch.allclose(fast(x), (x * 2).cumsum(0), atol=1e-5)


def test_an_unknown_option_of_the_backend_is_named(lab: Lab) -> None:
    fast = torch.compile(torch.sin, backend="cgraph_aot", options={"strit": True})
    with pytest.raises(RuntimeError, match="did you mean 'strict'"):
        fast(fresh(lab, 4))


def test_written_arguments_that_share_memory_are_right(lab: Lab) -> None:
    module = CudaGraphModule(lambda a, b: (a.add_(1), b.mul_(2)), {0, 1})
    for _ in range(4):
        x = fresh(lab, 4)
        want = (x + 1) * 2
        module(x, x)
        assert torch.allclose(x, want)


def test_numbers_among_the_arguments_have_graphs_and_results_of_their_own(lab: Lab) -> None:
    module = CudaGraphModule(lambda a, n: [a * n] * n, set(), name="some")
    for n in (1, 1, 1, 2, 2, 2, 1, 3):
        x = fresh(lab, 4)
        results = module(x, n)
        assert len(results) == n
        assert torch.allclose(results[-1], x * n)
    with pytest.raises(ArgumentError, match="argument 1 of some is a NoneType, expected a int"):
        module(x, None)


def test_a_first_call_that_raises_fixes_nothing(lab: Lab) -> None:
    module = CudaGraphModule(torch.matmul, set())
    with pytest.raises(RuntimeError, match="shapes"):
        module(fresh(lab, 2, 3), fresh(lab, 2, 3))
    for _ in range(3):
        x, y = fresh(lab, 2, 3), fresh(lab, 3, 2)
        assert torch.allclose(module(x, y), x @ y, atol=1e-5)


def test_a_graph_that_writes_to_an_input_after_it_was_read_is_right(lab: Lab) -> None:
    def write(x: Tensor, y: Tensor) -> Tensor:
        z = y.sin().cos().tan() * x
        x.add_(1)
        return z

    fast = cudagraphs(make_fx(write)(fresh(lab, 4), fresh(lab, 4)), [fresh(lab, 4)] * 2)
    for _ in range(4):
        x, y = fresh(lab, 4), fresh(lab, 4)
        before = x.clone()
        assert torch.allclose(fast(x, y), y.sin().cos().tan() * before)
        assert torch.allclose(x, before + 1)


@pytest.mark.parametrize(
    "body",
    [
        lambda x: (x * 2)[x > 0].sin() * 3,
        lambda x: torch.nonzero(x).sum() + x.cos(),
        lambda x: torch.unique(x.round()).sum() * x,
        lambda x: x.sin()[torch.tensor([0, 2], device=x.device)].cos(),
    ],
    ids=["mask", "nonzero", "unique", "index"],
)
def test_operators_whose_results_depend_on_values_run_between_parts(lab: Lab, body: Any) -> None:
    fast = torch.compile(body, backend="cgraph_aot", fullgraph=True)
    with torch._dynamo.config.patch(
        capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True
    ):
        for _ in range(5):
            x = fresh(lab, 8)
            assert torch.allclose(fast(x), body(x), atol=1e-5)
    assert any(one.graphs for one in cgraph.trees.report().functions)


def test_an_index_of_integers_is_captured(lab: Lab) -> None:
    fast = torch.compile(
        lambda x, i: x.sin()[i].cos(), backend="cgraph_aot", options={"strict": True}
    )
    for _ in range(4):
        x, i = fresh(lab, 8), torch.tensor([0, 5, 2], device=lab.device)
        assert torch.allclose(fast(x, i), x.sin()[i].cos(), atol=1e-5)


def test_random_numbers_are_drawn_in_the_order_of_eager(lab: Lab) -> None:
    first, second = nn.Linear(8, 8).to(lab.device), nn.Linear(8, 8).to(lab.device)

    def block(x: Tensor) -> Tensor:
        y = nn.functional.dropout(second(nn.functional.relu(first(x))))
        return y + nn.functional.dropout(x) + torch.rand_like(x)

    found = []
    for backend in ("cgraph_aot", "aot_eager"):
        torch.compiler.reset()
        fast = torch.compile(block, backend=backend)
        torch.manual_seed(5)
        x = torch.ones(4, 8, device=lab.device)
        with torch.no_grad():
            found.append([fast(x).clone() for _ in range(5)])
    for ours, eager in zip(*found, strict=True):
        assert torch.allclose(ours, eager, atol=1e-5)


def test_a_view_that_counts_from_the_begin_of_an_input_keeps_a_graph_as_it_is(lab: Lab) -> None:
    def body(x: Tensor) -> Tensor:
        return x[2:].as_strided((2,), (1,), 2) * 2

    with pytest.warns(cgraph.errors.EagerWarning, match="as_strided"):
        fast = cudagraphs(traced(body, fresh(lab, 8)), [fresh(lab, 8)])
    x = fresh(lab, 8)
    assert torch.allclose(fast(x), body(x))


def test_a_view_that_counts_from_the_begin_of_a_result_is_captured(lab: Lab) -> None:
    def body(x: Tensor) -> Tensor:
        return x.sin()[2:].as_strided((2,), (1,), 2) * 2

    fast = cudagraphs(traced(body, fresh(lab, 8)), [fresh(lab, 8)])
    for _ in range(4):
        x = fresh(lab, 8)
        assert torch.allclose(fast(x), body(x))
    assert sum(one.replays for one in cgraph.trees.report().functions) > 0


def test_a_mode_of_the_backend_is_refused(lab: Lab) -> None:
    fast = torch.compile(torch.sin, backend="cgraph_aot", mode="max-autotune")
    with pytest.raises(RuntimeError, match="mode is 'max-autotune', expected none"):
        fast(fresh(lab, 4))


def chunks(x: Tensor) -> tuple[Tensor, ...]:
    y = x * 2
    return y, y[1:], *(x + 1).chunk(2), x[:2], x.expand(2, 8), (x * 3)[::2]


def test_results_share_memory_and_have_strides_as_in_eager(lab: Lab) -> None:
    fast = torch.compile(chunks, backend="cgraph_aot")
    for _ in range(5):
        x = fresh(lab, 8)
        with torch.no_grad():
            results, wanted = fast(x), chunks(x.clone())
        for got, want in zip(results, wanted, strict=True):
            assert torch.allclose(got, want)
            assert got.stride() == want.stride()
        results[1].zero_()
        results[2].zero_()
        assert torch.equal(results[0][1:], torch.zeros_like(results[1]))
        assert results[3].abs().sum() > 0
        assert results[2].untyped_storage().data_ptr() == results[3].untyped_storage().data_ptr()
        assert results[4].data_ptr() == x.data_ptr()


def test_a_write_to_a_view_behind_a_graph_break_is_seen(lab: Lab) -> None:
    def body(x: Tensor) -> Tensor:
        y = x * 2
        view = y[1:]
        torch._dynamo.graph_break()
        view.add_(1)
        return y.sum()

    fast = torch.compile(body, backend="cgraph_aot")
    # Behind the break, AOTAutograd puts the views together by as_strided.
    with torch.no_grad(), pytest.warns(cgraph.errors.EagerWarning, match="as_strided"):
        for _ in range(5):
            x = fresh(lab, 8)
            assert torch.allclose(fast(x), body(x), atol=1e-5)


def test_writes_through_views_are_found_in_graphs_of_real_tensors(lab: Lab) -> None:
    def write(x: Tensor, y: Tensor) -> Tensor:
        x.view(-1)[1:].add_(1)
        y.chunk(2)[1].mul_(2)
        return x.sum() + y.sum()

    inputs = fresh(lab, 8), fresh(lab, 4)
    graph = make_fx(write)(*inputs)
    assert find_input_mutations(graph.graph) == {0, 1}
    fast = cudagraphs(graph, inputs)
    for _ in range(4):
        given = fresh(lab, 8), fresh(lab, 4)
        wanted = [one.clone() for one in given]
        assert torch.allclose(fast(*given), write(*wanted), atol=1e-5)
        for one, want in zip(given, wanted, strict=True):
            assert torch.allclose(one, want)


def test_an_argument_in_other_strides_that_shares_written_memory_is_right(lab: Lab) -> None:
    module = CudaGraphModule(lambda a, b: a.add_(1) + b, {0})
    for _ in range(3):
        module(fresh(lab, 3, 3), fresh(lab, 3, 3))
    x = fresh(lab, 3, 3)
    want = (x + 1) + (x + 1).t()
    assert torch.allclose(module(x, x.t()), want)


def test_an_expanded_argument_is_expected_as_such(lab: Lab) -> None:
    module = CudaGraphModule(torch.sin, set(), name="sine")
    for _ in range(3):
        x = fresh(lab, 1, 3).expand(4, 3)
        assert torch.allclose(module(x), x.sin())
    with pytest.raises(ArgumentError, match=r"sine is a tensor .* strides \(0, 1\)"):
        module(fresh(lab, 4, 3))


def test_a_module_may_be_copied_after_it_was_captured(lab: Lab) -> None:
    graph = make_fx(lambda x: x.sin() * 2)(fresh(lab, 4))
    fast = cudagraphs(graph, [fresh(lab, 4)])
    for _ in range(3):
        fast(fresh(lab, 4))
    other = copy.deepcopy(fast)
    for _ in range(3):
        x = fresh(lab, 4)
        assert torch.allclose(other(x), x.sin() * 2)
        assert torch.allclose(fast(x), x.sin() * 2)


def test_a_graph_without_known_shapes_gets_them(lab: Lab) -> None:
    def body(x: Tensor) -> Tensor:
        return x.cos() + torch.nonzero(x).sum()

    graph = make_fx(body)(torch.ones(4, device=lab.device))
    for node in graph.graph.nodes:
        node.meta.pop("val", None)
    fast = cudagraphs(graph, [torch.ones(4, device=lab.device)])
    assert parts_of(fast) == 2
    for _ in range(3):
        x = torch.rand(4, device=lab.device) + 1
        assert torch.allclose(fast(x), body(x), atol=1e-5)


def test_a_static_argument_in_another_layout_at_its_address_is_refused(lab: Lab) -> None:
    weight = fresh(lab, 3, 3)
    module = CudaGraphModule(lambda x, w: x @ w, set(), statics=[1])
    for _ in range(4):
        x = fresh(lab, 2, 3)
        torch.testing.assert_close(module(x, weight), x @ weight)
    weight.data = weight.data.t()
    with pytest.raises(ArgumentError, match=r"strides \(1, 3\)"):
        module(fresh(lab, 2, 3), weight)


def test_modules_that_are_called_without_steps_are_soon_captured(lab: Lab) -> None:
    # From now on, steps are counted by compiled functions.
    torch.compile(torch.sin, backend="eager")(fresh(lab, 4))
    first, second = (CudaGraphModule(one, set()) for one in (torch.sin, torch.cos))
    for _ in range(20):
        x = fresh(lab, 4)
        torch.testing.assert_close(second(first(x)), torch.cos(torch.sin(x)))
    assert sum(one.replays for one in cgraph.trees.report().functions) > 10
