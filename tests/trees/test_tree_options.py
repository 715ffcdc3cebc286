"""Options of graph trees."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from cgraph.errors import ArgumentError, CaptureError, CgraphWarning, EagerWarning
from lab import Lab, fresh
from tree_programs import graphs_of, half, in_tree, line, step

Options = dict[str, Any]


@pytest.fixture(autouse=True)
def _own_compiler(lab: Lab) -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def tripled(args: list[Any]) -> list[Any]:
    size, x = args
    args.clear()
    return [x[:size] * 3]


def sized(lab: Lab, options: Options) -> Any:
    example = [3, fresh(lab, 8)]
    return cgraph.trees.cudagraphify(tripled, example, is_inference=True, options=options)


def call_sizes(lab: Lab, fast: Any, *sizes: int) -> None:
    for size in sizes:
        for _ in range(3):
            step()
            x = fresh(lab, 8)
            [y] = fast([size, x])
            assert torch.equal(y, x[:size] * 3)
            del y


def captured() -> list[Any]:
    """Return the functions with graphs; other tests may have left some without."""
    return [one for one in cgraph.trees.report().functions if one.graphs]


def graphs() -> int:
    return sum(one.graphs for one in captured())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strikt": True}, "unknown option 'strikt': did you mean 'strict'"),
        ({"foo": 1}, "unknown option 'foo': expected one of strict, input_mutation"),
        ({"strict": "yes"}, "strict is 'yes', expected True or False"),
        ({"held_outputs": "drop"}, "held_outputs is 'drop', expected 'keep' or 'raise'"),
        ({"max_sizes": -1}, "max_sizes is -1, expected a number, at least 0"),
        ({"capture_sizes": 2.5}, "capture_sizes is 2.5, expected sizes"),
        ({"capture_sizes": ["a"]}, "capture_sizes is .'a'., expected sizes"),
    ],
)
def test_an_option_that_is_not_as_expected_is_named(
    lab: Lab, options: Options, message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        in_tree(lab, half, fresh(lab, 4), options=options)
    with pytest.raises(RuntimeError, match=message):
        torch.compile(half, backend="cgraph", options=options)(fresh(lab, 4))


def test_options_of_inductor_are_taken_and_unknown_modes_are_named(lab: Lab) -> None:
    fast = torch.compile(half, backend="cgraph", options={"max_autotune": False})
    x = fresh(lab, 4)
    assert torch.allclose(fast(x), half(x))
    with pytest.raises(RuntimeError, match="did you mean 'epilogue_fusion'"):
        torch.compile(line, backend="cgraph", options={"epilogue_fusio": True})(x)
    with pytest.raises(RuntimeError, match="mode is 'fastest'"):
        torch.compile(line, backend="cgraph", mode="fastest")(x)


def test_the_environment_sets_options_that_the_call_does_not(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CGRAPH_STRICT", "1")
    with pytest.raises(CaptureError, match="the options say strict"):
        in_tree(lab, lambda a, x: x * a, 0.5, fresh(lab, 4))
    with pytest.warns(EagerWarning):
        in_tree(lab, lambda a, x: x * a, 0.5, fresh(lab, 4), options={"strict": False})
    monkeypatch.setenv("CGRAPH_HELD_OUTPUTS", "forget")
    with pytest.raises(ArgumentError, match="CGRAPH_HELD_OUTPUTS is 'forget'"):
        in_tree(lab, half, fresh(lab, 4))


def test_the_configuration_of_torch_sets_options_that_nobody_else_does(lab: Lab) -> None:
    import torch._inductor.config as config

    with config.patch({"triton.cudagraph_skip_dynamic_graphs": True}):
        fast = sized(lab, {})
        call_sizes(lab, fast, 3, 4)
        assert graphs() == 0
        other = sized(lab, {"skip_dynamic_graphs": False})
        call_sizes(lab, other, 3)
        assert graphs() == 1


def test_1_2_torchs_switch_for_errors_is_strict(lab: Lab) -> None:
    import torch._inductor.config as config

    if not hasattr(config.triton, "cudagraph_or_error"):
        pytest.skip("this torch has no such switch")
    with (
        config.patch({"triton.cudagraph_or_error": True}),
        pytest.raises(CaptureError, match="the options say strict"),
    ):
        in_tree(lab, lambda a, x: x * a, 0.5, fresh(lab, 4))


def test_1_23_a_function_is_captured_anew_as_often_as_an_option_says(lab: Lab) -> None:
    options = {"max_rerecords": 2}
    fast = in_tree(
        lab, torch.add, fresh(lab, 4), fresh(lab, 4), static_input_idxs=[1], options=options
    )
    kept = []
    with pytest.warns(EagerWarning, match="write new weights in place"):
        for _ in range(6):
            step()
            x, y = fresh(lab, 4), fresh(lab, 4)
            kept.append(y)
            assert torch.equal(fast(x, y), x + y)
    assert graphs_of(fast) == 3


def test_strict_raises_where_a_graph_needs_values_on_the_host(lab: Lab) -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        fast = torch.compile(torch.nonzero, backend="cgraph", options={"strict": True})
        with pytest.raises(RuntimeError, match=r"skipping cudagraphs due to .*nonzero"):
            fast(fresh(lab, 16))


def test_strict_raises_where_a_call_would_run_without_a_graph(lab: Lab) -> None:
    options = {"strict": True}
    fast = in_tree(
        lab, lambda x: x.add_(1) * 2, fresh(lab, 4), mutated_input_idxs=[0], options=options
    )
    step()
    fast(fresh(lab, 4))
    step()
    x = fresh(lab, 4)
    before = x.clone()
    with pytest.raises(CaptureError, match="mutated inputs"):
        fast(x)
    assert torch.equal(x, before)


def test_strict_lets_through_what_is_captured(lab: Lab) -> None:
    model = nn.Linear(8, 4).to(lab.device)
    fast = torch.compile(model, backend="cgraph", options={"strict": True})
    for _ in range(5):
        x = fresh(lab, 2, 8)
        y = fast(x)
        assert torch.allclose(y, model(x), atol=1e-5)
        y.sum().backward()


def test_a_skip_counts_in_the_statistics_of_torch_once(lab: Lab) -> None:
    from torch._dynamo.utils import counters

    before = counters["inductor"]["cudagraph_skips"]
    fast = in_tree(lab, lambda x: x.add_(1) * 2, fresh(lab, 4), mutated_input_idxs=[0])
    with pytest.warns(EagerWarning):
        for _ in range(3):
            step()
            fast(fresh(lab, 4))
    assert counters["inductor"]["cudagraph_skips"] == before + 1


def test_functions_that_write_inputs_are_left_alone_where_an_option_says_so(lab: Lab) -> None:
    weight = fresh(lab, 4)

    def write(x: Tensor, y: Tensor) -> Tensor:
        return y.copy_(x) * 2

    for is_supported in (True, False):
        first = in_tree(lab, half, fresh(lab, 4))
        options = {"input_mutation": is_supported}
        written = [fresh(lab, 4), weight]
        if is_supported:
            second = in_tree(lab, write, *written, mutated_input_idxs=[1], options=options)
        else:
            with pytest.warns(EagerWarning, match=r"mutated inputs \(1 instances\): input 1"):
                second = in_tree(lab, write, *written, mutated_input_idxs=[1], options=options)
        for _ in range(5):
            step()
            x = fresh(lab, 4)
            y = first(x)
            assert torch.allclose(second(x, y), x * 2)
            assert torch.allclose(y, x)
            del y
        assert graphs() == (2 if is_supported else 1)
        cgraph.trees.reset()


def test_losses_of_many_steps_may_be_summed(lab: Lab) -> None:
    model = nn.Linear(8, 1).to(lab.device)

    def loss(x: Tensor) -> Tensor:
        return model(x).square().mean()

    fast = torch.compile(loss, backend="cgraph")
    with torch.no_grad():
        xs = [fresh(lab, 4, 8) for _ in range(10)]
        assert torch.allclose(sum(fast(x) for x in xs), sum(loss(x) for x in xs), rtol=1e-4)


def test_only_sizes_that_were_named_are_captured(lab: Lab) -> None:
    call_sizes(lab, sized(lab, {"capture_sizes": (2, 4)}), 2, 3, 4, 5)
    assert [one.graphs for one in captured()] == [1, 1]
    assert "sizes that are not among capture_sizes" in str(cgraph.trees.report())


def test_sizes_beyond_the_limit_run_without_a_graph_and_those_before_are_replayed(
    lab: Lab,
) -> None:
    fast = sized(lab, {"max_sizes": 2})
    call_sizes(lab, fast, 2, 3)
    with pytest.warns(EagerWarning, match="more than 2 sizes.* Fix: pad inputs to fewer sizes"):
        call_sizes(lab, fast, 4)
    call_sizes(lab, fast, 5, 2)
    assert [one.graphs for one in captured()] == [1, 1]
    assert [one.replays for one in captured()] == [4, 1]


def test_many_sizes_are_warned_of_once(lab: Lab) -> None:
    import torch._inductor.config as config

    with config.patch({"triton.cudagraph_dynamic_shape_warn_limit": 2}):
        fast = sized(lab, {})
        call_sizes(lab, fast, 1, 2)
        with pytest.warns(CgraphWarning, match="recording a new graph for each distinct") as told:
            call_sizes(lab, fast, 3, 4)
    assert len(told) == 1


def test_a_static_input_that_moved_is_named_with_its_addresses_and_line(
    lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    layers = [nn.Linear(8, 8).to(lab.device) for _ in range(2)]

    def apply(layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x)

    fast = torch.compile(apply, backend="cgraph")
    with torch.no_grad(), caplog.at_level(logging.INFO, "cgraph.trees"):
        for number in range(8):
            step()
            x = fresh(lab, 2, 8)
            layer = layers[number // 4]
            assert torch.allclose(fast(layer, x), layer(x), atol=1e-5)
    [line] = [one for one in caplog.messages if "captured anew" in one]
    address = layers[0].weight.data_ptr(), layers[1].weight.data_ptr()
    assert f"moved from {address[0]:#x} to {address[1]:#x}" in line
    assert "apply (test_tree_options.py:" in line
    [one] = captured()
    assert (one.graphs, one.rerecords) == (2, 1)
    assert one.moved is not None
    assert "moved from" in one.moved


def test_the_report_describes_the_tree(lab: Lab) -> None:
    first, second = in_tree(lab, half, fresh(lab, 8)), in_tree(lab, line, fresh(lab, 8))
    for _ in range(4):
        held = None
        step()
        held = second(first(fresh(lab, 8)))
    [tree] = cgraph.trees.report().trees
    assert (tree.roots, tree.graphs, tree.longest, tree.held_outputs) == (1, 2, 2, 1)
    assert tree.reserved_bytes > 0
    assert "tree of device 0: 1 root, up to 2 graphs in a step, 1 output in use" in str(tree)
    assert str(tree) in str(cgraph.trees.report())
    del held


def test_strict_raises_also_where_a_warning_was_given_before(lab: Lab) -> None:
    def fast(options: Options) -> None:
        in_tree(lab, lambda a, x: x * a, 0.5, fresh(lab, 4), options=options)

    with pytest.warns(EagerWarning):
        fast({})
    for _ in range(2):
        with pytest.raises(CaptureError, match="strict"):
            fast({"strict": True})


def test_names_of_torchs_configuration_count_among_the_options(lab: Lab) -> None:
    options = {"triton.cudagraph_skip_dynamic_graphs": True, "max_sizes": None}
    fast = torch.compile(lambda x: x * 2, backend="cgraph", options=options, dynamic=True)
    for size in (3, 3, 3, 5, 5, 5):
        assert fast(fresh(lab, size)).shape == (size,)
    assert graphs() == 0


def test_calls_inside_of_a_mode_are_counted(lab: Lab) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    fast = in_tree(lab, half, fresh(lab, 4))
    for _ in range(2):
        with Watch():
            fast(torch.ones(4, device=lab.device))
    [one] = [one for one in cgraph.trees.report().functions if one.name == "half" and one.eager]
    assert one.eager == {"first run": 1, "watched": 1}


def test_a_plain_program_is_said_to_have_a_first_run_and_nothing_else(lab: Lab) -> None:
    fast = torch.compile(half, backend="cgraph")
    with torch.no_grad():
        for _ in range(4):
            fast(fresh(lab, 4))
    [one] = [one for one in cgraph.trees.report().functions if one.graphs]
    assert one.eager == {"first run": 1}


def test_an_input_has_the_name_that_the_user_gave_it(lab: Lab) -> None:
    def layer(x: Tensor, cache: Tensor) -> Tensor:
        cache.add_(x)
        return torch.tanh(cache).sum(0)

    fast = torch.compile(layer, backend="cgraph")
    with torch.no_grad(), pytest.warns(EagerWarning, match=r"input \d \(cache\) of layer"):
        cache = fresh(lab, 4)
        for _ in range(3):
            fast(fresh(lab, 4), cache)


def test_a_weight_that_wraps_tensors_leaves_other_inputs_free_to_move(lab: Lab) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    halves = torch.ones(4, 4, device=lab.device), torch.ones(4, 4, device=lab.device) * 2
    weight = nn.Parameter(TwoTensor(*halves), requires_grad=False)
    for backend in ("cgraph_aot", "cgraph"):
        torch.compiler.reset()

        def body(x: Tensor) -> Tensor:
            return torch.relu(x) + (weight * 2).a.sum()

        fast, held = torch.compile(body, backend=backend), []
        with torch.no_grad():
            for _ in range(6):
                held.append(x := fresh(lab, 4, 4))
                torch.testing.assert_close(fast(x), body(x))
        assert sum(one.graphs for one in cgraph.trees.report().functions) == 1
