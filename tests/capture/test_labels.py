"""Labels: scopes, modules, operators and lines of captured nodes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn
from torch.utils import _python_dispatch as python_dispatch
from torch.utils.checkpoint import checkpoint

import cgraph
from cgraph import labels, picture
from cgraph.errors import ArgumentError, StateError
from cgraph.hooks import register_graph_capture_end_hook
from cgraph.labels import Label
from lab import Lab, SimLab, captured, fresh

OWN = os.path.dirname(cgraph.__file__)


def line_of(text: str) -> str:
    """Return the line of a text in this file."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if text in line and "line_of" not in line]
    return f"{__file__}:{number}"


def labelled(graph: cgraph.CUDAGraph) -> list[Label]:
    """Return the labels of a graph's nodes in dependency order; every node has one."""
    nodes = json.loads(graph._template.json())["nodes"]
    assert len(nodes) == len(graph._labels)
    return [graph._labels[node["handle"]] for node in nodes]


def of(graph: cgraph.CUDAGraph, operator: str) -> list[Label]:
    """Return the labels of an operator's nodes."""
    return [label for label in labelled(graph) if operator in str(label.operator)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with cgraph.annotate("block"):
            return self.inner(x).sigmoid()  # the block's line


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.exp()


def new() -> cgraph.CUDAGraph:
    return cgraph.CUDAGraph(keep_graph=True)


def capture(graph: cgraph.CUDAGraph, **options: Any) -> Any:
    return cgraph.graph(graph, enable_annotations=True, **options)


def warm_up(lab: Lab, model: nn.Module, x: torch.Tensor) -> None:
    """Set up libraries, outside the capture."""
    side = lab.stream()
    lab.fork(side)
    with lab.use(side):
        for _ in range(2):
            model(x).sum().backward()
            model.zero_grad(set_to_none=True)
    lab.join(side)
    lab.sync()


def test_every_node_has_its_operator_and_the_line_that_called_it(lab: Lab) -> None:
    x, graph = fresh(lab, 8), new()
    with capture(graph):
        y = x * 2  # the product's line
        y = y + 1  # the sum's line
    x.normal_()
    graph.replay()
    assert torch.equal(y, x * 2 + 1)
    first, second = labelled(graph)
    assert (first.operator, first.source) == ("aten.mul.Tensor", line_of("# the product's line"))
    assert (second.operator, second.source) == ("aten.add.Tensor", line_of("# the sum's line"))


def test_scopes_nest_and_end(lab: Lab) -> None:
    x, graph = fresh(lab, 8), new()
    with cgraph.annotate("around"), capture(graph):
        x.add(1)
        with cgraph.annotate("outer"):
            x.sub(1)
            with cgraph.annotate("inner"):
                x.mul(2)
            x.div(3)
        x.exp()
    stacks = [label.stack for label in labelled(graph)]
    outer = ("around", "outer")
    assert stacks == [("around",), outer, (*outer, "inner"), outer, ("around",)]


def test_a_scope_decorates_functions_and_ends_when_they_raise(lab: Lab) -> None:
    @cgraph.annotate("named")
    def double(x: torch.Tensor, times: int) -> torch.Tensor:
        if times > 1:
            return double(x, times - 1).mul(2)
        if times < 1:
            raise ValueError("mine")
        return x.mul(2)

    x, graph = fresh(lab, 8), new()
    with capture(graph):
        double(x, 2)
        with pytest.raises(ValueError, match="mine"):
            double(x, 0)
        x.exp()
    stacks = [label.stack for label in labelled(graph)]
    assert stacks == [("named", "named"), ("named",), ()]


def test_nodes_have_the_path_of_their_module(lab: Lab) -> None:
    model, graph = Model().to(lab.device), new()
    x = fresh(lab, 4, 8)
    with torch.no_grad():
        model(x)
        with capture(graph):
            model(x).neg()
    assert [label.module for label in of(graph, "sigmoid")] == ["Model.layers.0", "Model.layers.1"]
    assert {label.module for label in of(graph, "addmm") + of(graph, "linear")} == {
        "Model.layers.0.inner",
        "Model.layers.1.inner",
    }
    assert [label.module for label in of(graph, "exp")] == ["Model"]
    assert [label.module for label in of(graph, "neg")] == [None]


def test_nodes_of_graphed_callables_have_the_path_of_their_module(lab: Lab) -> None:
    model = Model().to(lab.device)
    seen: list[set[str | None]] = []
    hook = register_graph_capture_end_hook(
        lambda graph: seen.append({label.module for label in graph._labels.values()})
    )
    try:
        cgraph.make_graphed_callables(model, (fresh(lab, 4, 8),), enable_annotations=True)
    finally:
        hook.remove()
    assert {"Model.layers.0.inner", "Model.layers.1.inner", "Model"} <= seen[0]


def test_a_module_that_raises_is_left(lab: Lab) -> None:
    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("mine")

    x, graph = fresh(lab, 8), new()
    with capture(graph):
        with pytest.raises(ValueError, match="mine"):
            Broken()(x)
        x.exp()
    assert [label.module for label in labelled(graph)] == [None]


def test_backward_work_has_the_origin_of_its_forward_operator(lab: Lab) -> None:
    model, graph = Model().to(lab.device), new()
    x = fresh(lab, 4, 8)
    warm_up(lab, model, x)
    with capture(graph), cgraph.annotate("step"):
        with cgraph.annotate("forward"):
            loss = model(x).sum()
        with cgraph.annotate("backward"):
            loss.backward()
    first, second = of(graph, "sigmoid_backward")
    assert [first.module, second.module] == ["Model.layers.1", "Model.layers.0"]
    assert first.stack == ("step", "backward", "forward", "block")
    assert first.source == line_of("# the block's line")
    assert {label.module for label in of(graph, "aten.mm")} == {
        "Model.layers.0.inner",
        "Model.layers.1.inner",
    }


def test_backward_work_of_a_forward_pass_outside_has_the_scopes_around_backward(lab: Lab) -> None:
    model, graph = Model().to(lab.device), new()
    x = fresh(lab, 4, 8)
    warm_up(lab, model, x)
    stream = lab.stream()
    lab.fork(stream)
    with lab.use(stream):
        loss = model(x).sum()
    with capture(graph, stream=stream), cgraph.annotate("backward"):
        loss.backward()
    for label in of(graph, "sigmoid_backward"):
        assert (label.stack, label.module) == (("backward",), None)
    del loss


def test_a_checkpointed_module_keeps_its_path_when_it_runs_again(lab: Lab) -> None:
    model, graph = Model().to(lab.device), new()
    x = fresh(lab, 4, 8).requires_grad_()

    def run() -> None:
        y = checkpoint(model.layers[1], x, use_reentrant=False, preserve_rng_state=False)
        y.sum().backward()

    side = lab.stream()
    lab.fork(side)
    with lab.use(side):
        run()
    lab.join(side)
    lab.sync()
    x.grad = None
    model.zero_grad(set_to_none=True)
    with capture(graph):
        run()
    found = of(graph, "sigmoid.default")
    assert [label.module for label in found] == ["Block", "Block"]
    assert [label.stack for label in found] == [("block",), ("block",)]


def test_work_on_forked_streams_is_labelled(lab: Lab) -> None:
    x, side, graph = fresh(lab, 8), lab.stream(), new()
    with capture(graph), cgraph.annotate("main"):
        a = x + 1
        lab.fork(side)
        with lab.use(side), cgraph.annotate("side"):
            b = x * 2
        c = x - 3
        with lab.use(side), cgraph.annotate("foreign"):
            launch(lab, side)
        lab.join(side)
        a.add_(b).add_(c)
    assert [label.stack for label in of(graph, "mul")] == [("main", "side")]
    assert [label.stack for label in of(graph, "sub")] == [("main",)]
    assert [label.stack for label in of(graph, "add_")] == [("main",), ("main",)]
    assert of(graph, "None") == [Label(("main", "foreign"), None, None, None)]


def launch(lab: Lab, stream: Any) -> None:
    """Enqueue work that no torch operator enqueues."""
    if isinstance(lab, SimLab):
        lab.simulator.core.launch(stream, "foreign", lambda: None)
        return
    from cuda.bindings import runtime

    target = torch.empty(64, device="cuda", dtype=torch.uint8)
    (code,) = runtime.cudaMemsetAsync(target.data_ptr(), 0, 64, stream.cuda_stream)
    assert int(code) == 0


def test_work_between_operators_has_the_scopes_and_no_operator(lab: Lab) -> None:
    x, graph = fresh(lab, 8), new()
    launch(lab, lab.current())
    with capture(graph):
        with cgraph.annotate("ours"):
            launch(lab, lab.current())
        launch(lab, lab.current())
        x.exp()
        with cgraph.annotate("last"):
            launch(lab, lab.current())
    found = [(label.stack, label.operator) for label in labelled(graph)]
    exp = ((), "aten.exp.default")
    assert found == [(("ours",), None), ((), None), exp, (("last",), None)]


def test_a_failed_capture_leaves_no_labels_and_no_recording(lab: Lab) -> None:
    x, graph = fresh(lab, 8), new()
    with pytest.raises(ValueError, match="mine"), capture(graph):
        with cgraph.annotate("failed"):
            x.exp()
            raise ValueError("mine")
    assert graph._labels == {} and not labels._looks and labels.scopes() == []
    assert not python_dispatch._get_current_dispatch_mode_stack()
    with cgraph.graph(graph):
        x.exp()
    assert graph._labels == {}
    graph.reset()
    with capture(graph):
        x.add(1)
    assert [label.stack for label in labelled(graph)] == [()]


def test_labels_are_gone_with_the_graph_they_are_of(lab: Lab) -> None:
    x, graph = fresh(lab, 8), new()
    with capture(graph):
        x.exp()
    assert graph._labels
    graph.reset()
    assert graph._labels == {}


def test_without_labels_nothing_is_entered(lab: Lab) -> None:
    x, graph = fresh(lab, 8), new()
    inside: list[Any] = []
    hooks = len(nn.modules.module._global_forward_hooks)
    with cgraph.graph(graph), cgraph.annotate("unused"):
        inside = [type(m).__module__ for m in python_dispatch._get_current_dispatch_mode_stack()]
        assert len(nn.modules.module._global_forward_hooks) == hooks and not labels._looks
        x.exp()
    assert "cgraph._captures.label_recorder" not in inside and graph._labels == {}


def test_hooks_see_the_labels_of_the_live_template(lab: Lab) -> None:
    x, graph = fresh(lab, 8), cgraph.CUDAGraph()
    seen: list[list[Label]] = []
    graph.register_capture_end_hook(lambda graph: seen.append(labelled(graph)))
    with capture(graph), cgraph.annotate("hooked"):
        x.exp()
    assert [label.stack for label in seen[0]] == [("hooked",)]


def test_whole_stacks_are_recorded_where_they_are_asked_for(lab: Lab) -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return x.exp()  # the inner line

    x, graph = fresh(lab, 8), new()
    with capture(graph, annotation_config={"record_py_stacks": True}):
        inner(x)  # the outer line
    (label,) = labelled(graph)
    assert label.frames[-1] == f"{line_of('# the inner line')} inner"
    assert label.frames[-2].startswith(f"{line_of('# the outer line')} test_whole")
    assert not any(OWN in frame for frame in label.frames)
    assert labels.as_dict(label)["frames"] == list(label.frames)


def test_directories_are_left_out_of_stacks_instead_of_the_usual_ones(lab: Lab) -> None:
    x = fresh(lab, 8)
    frames = []
    for paths in ([], [os.path.dirname(__file__)]):
        graph = new()
        config = {"record_py_stacks": True, "py_stack_filter_paths": paths}
        with capture(graph, annotation_config=config):
            x.exp()
        frames.append(labelled(graph)[0].frames)
    everything, without_tests = frames
    assert OWN in everything[-1] and any(__file__ in frame for frame in everything)
    assert OWN in without_tests[-1] and not any(__file__ in frame for frame in without_tests)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"nothing": 1}, "nothing"),
        ({"backend": "magic"}, "magic"),
        ({"key_by": None}, "key_by"),
        ({"record_py_stacks": "yes"}, "yes"),
        ({"py_stack_filter_paths": "one"}, "one"),
        ({"py_stack_filter_paths": [""]}, "py_stack_filter_paths"),
        (["backend"], "annotation_config"),
    ],
)
def test_an_unknown_option_is_refused_by_name(lab: Lab, config: Any, named: str) -> None:
    with pytest.raises(ArgumentError, match=named) as failure:
        cgraph.graph(new(), annotation_config=config)
    assert isinstance(failure.value, ValueError) and "expected" in str(failure.value)


@pytest.mark.parametrize("backend", ["auto", "cupti", "edge_walk"])
@pytest.mark.parametrize("key_by", ["exec", "source", "auto"])
def test_every_backend_and_key_of_torchs_gives_the_same_labels(
    lab: Lab, backend: str, key_by: str
) -> None:
    x, graph = fresh(lab, 8), new()
    with capture(graph, annotation_config={"backend": backend, "key_by": key_by}):
        x.exp()
    assert [label.operator for label in labelled(graph)] == ["aten.exp.default"]


def test_a_scope_without_a_name_is_refused() -> None:
    with pytest.raises(ArgumentError, match="3"):
        cgraph.annotate(3)  # type: ignore[arg-type]


def test_the_picture_shows_labels_and_names_boxes_by_operator(lab: Lab, tmp_path: Path) -> None:
    model, graph = Model().to(lab.device), new()
    x = fresh(lab, 4, 8)
    with torch.no_grad():
        model(x)
        with capture(graph), cgraph.annotate("drawn"):
            model(x)
    picture.save(graph, tmp_path / "graph.svg")
    page = ElementTree.fromstring((tmp_path / "graph.svg").read_text(encoding="utf-8"))
    svg = "{http://www.w3.org/2000/svg}"
    boxes = page.findall(f"{svg}g[@class='node']")
    (box,) = [b for b in boxes if "aten.exp.default" in b.findtext(f"{svg}title", "")]
    tooltip = box.findtext(f"{svg}title", "").splitlines()
    assert "labels: drawn" in tooltip and "module: Model" in tooltip
    assert any(line.startswith(f"source: {__file__}:") for line in tooltip)
    assert not any(line.startswith("handle") for line in tooltip)
    assert "exp" in "".join(box.find(f"{svg}text").itertext())  # type: ignore[union-attr]
    tooltips = [box.findtext(f"{svg}title", "") for box in boxes]
    assert any("labels: drawn > block" in tooltip for tooltip in tooltips)


def test_a_label_as_plain_values() -> None:
    label = Label(("a", "b"), "Model", "aten.exp.default", "x.py:3")
    assert json.loads(json.dumps(labels.as_dict(label))) == {
        "labels": ["a", "b"],
        "module": "Model",
        "operator": "aten.exp.default",
        "source": "x.py:3",
    }


@pytest.fixture
def clean() -> Iterator[None]:
    yield
    assert not labels._looks and labels.scopes() == []
    assert not python_dispatch._get_current_dispatch_mode_stack()


@pytest.mark.usefixtures("clean")
def test_whatever_call_fails_nothing_keeps_recording(sim: SimLab) -> None:
    x = torch.randn(8)
    outcomes = set()
    for n in range(40):
        graph = new()
        sim.simulator.fail_call(n, 999)
        try:
            with capture(graph), cgraph.annotate("some"):
                x.exp().add(1)
            outcomes.add("captured")
            assert len(graph._labels) == 2
        except cgraph.CgraphError:
            outcomes.add("failed")
            assert graph._labels == {} and not labels._looks and labels.scopes() == []
        finally:
            sim.simulator.clear_faults()
        graph.reset()
    assert outcomes == {"captured", "failed"}


def test_a_graph_that_holds_one_already_keeps_its_labels(lab: Lab) -> None:
    x, graph = fresh(lab, 8), new()
    with capture(graph):
        x.exp()
    before = dict(graph._labels)
    with pytest.raises(StateError), capture(graph):
        x.add(1)
    assert graph._labels == before and not labels._looks


def test_graph_data_has_the_label_of_each_node(lab: Lab) -> None:
    x, graph = fresh(lab, 8), cgraph.CUDAGraph(keep_graph=True)
    with cgraph.graph(graph, enable_annotations=True):
        y = x * 2
        with cgraph.annotate("inner"):
            y = y.exp()
    graph.instantiate()
    labels = [node["label"] for node in graph.get_graph_data()["nodes"]]
    assert [label["labels"] for label in labels] == [[], ["inner"]]
    assert [label["operator"] for label in labels] == ["aten.mul.Tensor", "aten.exp.default"]
    assert all(label["source"].startswith(__file__) for label in labels)
    del y


def test_graph_data_has_no_labels_where_none_were_recorded(lab: Lab) -> None:
    graph, _ = captured(lab, x := fresh(lab, 8), keep_graph=True)
    graph.instantiate()
    assert {node["label"] for node in graph.get_graph_data()["nodes"]} == {None}
    del x
