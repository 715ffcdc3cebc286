"""Compilers and their settings."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import cgraph
from cgraph import _torch
from cgraph._torch.inductor import _wants_parts
from cgraph.errors import ArgumentError, CaptureError, EagerWarning
from lab import Lab, fresh
from tree_programs import graphs_of, in_tree, step


@pytest.fixture(autouse=True)
def _own_compiler(lab: Lab) -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("said", ["option", "variable", "nothing"])
def test_1_2_torchs_variable_for_errors_wins_over_all_that_a_program_says(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    options = {"strict": False} if said == "option" else {}
    if said == "variable":
        monkeypatch.setenv("CGRAPH_STRICT", "0")
    monkeypatch.setenv("TORCHINDUCTOR_CUDAGRAPH_OR_ERROR", "1")
    with pytest.raises(CaptureError, match="the options say strict"):
        in_tree(lab, lambda a, x: x * a, 0.5, fresh(lab, 4), options=options)
    monkeypatch.setenv("TORCHINDUCTOR_CUDAGRAPH_OR_ERROR", "0")
    with pytest.warns(EagerWarning):
        in_tree(lab, lambda a, x: x * a, 0.5, fresh(lab, 4), options={"strict": True})
    monkeypatch.setenv("TORCHINDUCTOR_CUDAGRAPH_OR_ERROR", "maybe")
    with pytest.raises(ArgumentError, match="TORCHINDUCTOR_CUDAGRAPH_OR_ERROR is 'maybe'"):
        in_tree(lab, torch.sin, fresh(lab, 4))


def test_1_3_an_input_without_contents_is_no_reason_to_run_without_a_graph(lab: Lab) -> None:
    def body(form: Tensor, x: Tensor) -> Tensor:
        return x * form.shape[1]

    form = torch.randn(1, 16, 8, device="meta")
    fast = in_tree(lab, body, form, fresh(lab, 4), options={"strict": True})
    for _ in range(5):
        step()
        x = fresh(lab, 4)
        assert torch.equal(fast(torch.randn(1, 16, 8, device="meta"), x), x * 16)
    assert graphs_of(fast) == 1


def test_1_4_a_reason_has_torchs_words_once() -> None:
    trace = '. Found from : \n   File "/x/model.py", line 7, in forward\n    return x.cpu()\n'
    for prefix in ("", "skipping cudagraphs due to ", "skipping cudagraphs due to " * 2):
        reason = _torch.reason_without_trace(f"{prefix}multiple devices: cpu, cuda:0{trace}")
        assert reason == "multiple devices: cpu, cuda:0, in forward (model.py:7)"


def test_parts_are_made_unless_a_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_GRAPH_PARTITION", raising=False)
    assert _wants_parts({})
    for wants in (False, True):
        with inductor_config.patch(graph_partition=wants):
            assert _wants_parts({}) is wants
            assert not _wants_parts({"cpp_wrapper": True})
        # What a patch leaves behind is no choice of a user's.
        assert _wants_parts({})
    monkeypatch.setenv("TORCHINDUCTOR_GRAPH_PARTITION", "0")
    # torch reads it when it is loaded.
    assert _wants_parts({}) is bool(inductor_config.graph_partition)


# torch's own, about gradients that its compiler looks at.
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_1_27_gradients_of_compiled_autograd_are_right_and_soon_captured(lab: Lab) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).to(lab.device)
    eager = copy.deepcopy(model)
    fast = torch.compile(model, backend="cgraph_aot")
    autograd: Any = torch._dynamo.compiled_autograd
    for _ in range(24):
        x = fresh(lab, 4, 8)
        with autograd._enable(torch.compile(backend="cgraph_aot")):
            fast(x).square().mean().backward()
        eager(x).square().mean().backward()
        for one, other in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)
        model.zero_grad()
        eager.zero_grad()
    functions = cgraph.trees.report().functions
    assert sum(one.replays for one in functions) > 20, str(cgraph.trees.report())


def test_1_32_the_line_of_an_input_without_one_is_that_of_what_uses_it() -> None:
    trace = 'File "/x/model.py", line {}, in forward\n    y = x + 1\n'
    users = [SimpleNamespace(stack_trace=None), SimpleNamespace(stack_trace=trace.format(3))]
    for own, line in ((None, 3), ("", 3), (trace.format(8), 8)):
        one = SimpleNamespace(name="x", stack_trace=own, users=users)
        assert _torch.described_input([one], 0) == f"input 0 (x) of forward (model.py:{line})"


def test_the_backend_has_the_name_that_torch_once_had(lab: Lab) -> None:
    fast = torch.compile(lambda x: (x.sin() * 2).sum(), backend="aot_cudagraphs")
    for _ in range(5):
        x = fresh(lab, 8).requires_grad_()
        value = fast(x)
        value.backward()
        assert torch.allclose(x.grad, x.detach().cos() * 2)  # type: ignore[arg-type]
        assert torch.allclose(value, (x.sin() * 2).sum())
    assert sum(one.replays for one in cgraph.trees.report().functions) >= 4


def test_3_14_the_first_call_writes_its_argument_once_and_leaves_no_stream_behind(
    lab: Lab,
) -> None:
    def added(x: Tensor, total: Tensor) -> Tensor:
        total.add_(x)
        return total * 2

    graph = make_fx(added)(fresh(lab, 4), fresh(lab, 4))
    fast = cgraph.aot.cudagraphs(graph, [fresh(lab, 4), fresh(lab, 4)])
    total = fresh(lab, 4)
    for _ in range(5):
        x, before, stream = fresh(lab, 4), total.clone(), lab.current()
        assert torch.allclose(fast(x, total), (before + x) * 2)
        assert torch.allclose(total, before + x)
        assert lab.current() == stream


def test_strict_refuses_an_operator_that_no_graph_of_the_aot_backend_can_have(lab: Lab) -> None:
    fast = torch.compile(torch.nonzero, backend="cgraph_aot", options={"strict": True})
    with (
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
        pytest.raises(RuntimeError, match=r"needs values of the device.*say strict"),
    ):
        fast(fresh(lab, 8))


def test_weights_of_the_aot_backend_are_read_where_they_lie(lab: Lab) -> None:
    model = nn.Linear(64, 64).to(lab.device)
    fast = torch.compile(model, backend="cgraph_aot")
    with torch.no_grad():
        for _ in range(4):
            x = fresh(lab, 2, 64)
            model.weight.add_(1)
            assert torch.allclose(fast(x), model(x), rtol=1e-4, atol=1e-3)
    [one] = cgraph.trees.report().functions
    assert one.copied_bytes == 2 * 64 * 4


def test_what_writes_only_static_inputs_is_captured_whatever_input_mutation_says(lab: Lab) -> None:
    def counted(x: Tensor, total: Tensor) -> Tensor:
        return total.add_(x) * 2

    places = {"static_input_idxs": [1], "mutated_input_idxs": [1]}
    total = fresh(lab, 4)
    fast = in_tree(lab, counted, total, total, options={"input_mutation": False}, **places)
    for _ in range(4):
        step()
        x, before = fresh(lab, 4), total.clone()
        assert torch.equal(fast(x, total), (before + x) * 2)
    assert graphs_of(fast) == 1


def test_a_report_names_the_line_of_the_users_code(lab: Lab) -> None:
    def body(x: Tensor) -> Tensor:
        return torch.sin(x) + 1

    for backend in ("cgraph", "cgraph_aot"):
        torch.compiler.reset()
        with torch.no_grad():
            torch.compile(body, backend=backend)(fresh(lab, 4))
        [one] = cgraph.trees.report().functions
        line = body.__code__.co_firstlineno + 1
        assert f"body (test_compiler_settings.py:{line})" in one.name
