"""`patch_torch`: torch's names are cgraph's inside it and torch's own after it."""

from __future__ import annotations

import copy
import importlib
import random
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.cuda.graphs

import cgraph
from cgraph.errors import ArgumentError, StateError
from lab import Lab, SimLab, fresh

OF_CUDA = (
    "CUDAGraph",
    "graph",
    "graph_pool_handle",
    "is_current_stream_capturing",
    "make_graphed_callables",
    "export_dot",
    "export_graph_data",
)
HOOKS = tuple(cgraph.hooks.__all__)


def names() -> list[Any]:
    """Return the contents of torch's two modules under these names."""
    modules = (torch.cuda, torch.cuda.graphs)
    return [vars(module).get(name, "lacking") for module in modules for name in OF_CUDA + HOOKS]


@pytest.fixture(autouse=True)
def before() -> Iterator[list[Any]]:
    """Yield torch's names; each test must leave them unchanged."""
    found = names()
    yield found
    assert names() == found


@pytest.fixture
def user_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import a module that took torch's names before the patch."""
    module = ModuleType("code_of_a_user")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec("from torch.cuda import CUDAGraph, graph as capture, graph_pool_handle", vars(module))
    exec("from torch.cuda.graphs import is_current_stream_capturing", vars(module))
    exec("unrelated = None", vars(module))
    return module


def test_inside_all_names_are_cgraphs_and_afterwards_torchs_own(before: Any) -> None:
    with cgraph.patch_torch():
        for name in OF_CUDA:
            assert getattr(torch.cuda, name) is getattr(cgraph, name)
        for name in OF_CUDA + HOOKS:
            assert getattr(torch.cuda.graphs, name) is getattr(cgraph, name)
    assert names() == before
    assert torch.cuda.CUDAGraph is not cgraph.CUDAGraph
    assert torch.cuda.CUDAGraph.__module__ == "torch.cuda.graphs"


def test_names_that_this_torch_lacks_are_gone_again(before: Any) -> None:
    lacking = [name for name in HOOKS if not hasattr(torch.cuda.graphs, name)]
    with cgraph.patch_torch():
        assert all(hasattr(torch.cuda.graphs, name) for name in lacking)
    assert not any(hasattr(torch.cuda.graphs, name) for name in lacking)
    assert not hasattr(cgraph.CUDAGraph, "get_currently_capturing_graph")


def test_the_call_alone_patches_until_undo(before: Any) -> None:
    patch = cgraph.patch_torch()
    assert torch.cuda.graph is cgraph.graph
    patch.undo()
    assert names() == before
    patch.undo()
    assert names() == before


def test_a_dropped_patch_stays_in_force() -> None:
    cgraph.patch_torch()
    try:
        assert torch.cuda.graph is cgraph.graph
    finally:
        # Nothing holds the first patch, so this is the way to end it.
        importlib.import_module("cgraph.patch")._remove()


def test_modules_that_imported_names_before_get_cgraphs_and_theirs_back(
    user_module: ModuleType,
) -> None:
    found = dict(vars(user_module))
    with cgraph.patch_torch():
        assert user_module.CUDAGraph is cgraph.CUDAGraph
        assert user_module.capture is cgraph.graph
        assert user_module.graph_pool_handle is cgraph.graph_pool_handle
        assert user_module.is_current_stream_capturing is cgraph.is_current_stream_capturing
        assert user_module.unrelated is None
    assert dict(vars(user_module)) == found


def test_a_name_bound_anew_inside_stays_as_it_is(user_module: ModuleType) -> None:
    with cgraph.patch_torch():
        user_module.capture = "mine"
    assert user_module.capture == "mine"
    assert user_module.CUDAGraph is torch.cuda.CUDAGraph


def test_a_module_imported_inside_keeps_what_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("code_of_a_late_user")
    with cgraph.patch_torch():
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec("from torch.cuda import CUDAGraph", vars(module))
    assert vars(module)["CUDAGraph"] is cgraph.CUDAGraph


def test_a_lazy_module_is_not_loaded_by_the_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lazy(ModuleType):
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(f"asked for {name}")

    monkeypatch.setitem(sys.modules, "code_that_loads_late", Lazy("code_that_loads_late"))
    with cgraph.patch_torch():
        assert torch.cuda.graph is cgraph.graph


def test_patches_in_patches_end_with_the_last_in_any_order(before: Any) -> None:
    for _ in range(6):
        patches = [cgraph.patch_torch() for _ in range(4)]
        random.shuffle(patches)
        for patch in patches:
            assert torch.cuda.CUDAGraph is cgraph.CUDAGraph
            patch.undo()
            patch.undo()
        assert names() == before


def test_an_exception_in_the_block_comes_out_and_undoes_the_patch(before: Any) -> None:
    with pytest.raises(ValueError, match="mine"), cgraph.patch_torch():
        raise ValueError("mine")
    assert names() == before


def test_a_patch_that_was_taken_back_cannot_be_entered() -> None:
    with cgraph.patch_torch() as patch:
        pass
    with pytest.raises(StateError, match="patch_torch"), patch:
        pass


def test_a_patch_that_fails_half_way_leaves_nothing(
    before: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cgraph import _torch

    def fail(pairs: Any) -> None:
        monkeypatch.undo()
        raise OSError("mine")

    monkeypatch.setattr(_torch, "share_tracing_rules", fail)
    with pytest.raises(OSError, match="mine"):
        cgraph.patch_torch()
    assert names() == before


def test_threads_that_patch_and_undo_at_once_leave_torchs_own(before: Any) -> None:
    barrier, wrong = threading.Barrier(8), []

    def work() -> None:
        barrier.wait()
        for _ in range(4):
            with cgraph.patch_torch():
                if torch.cuda.CUDAGraph is not cgraph.CUDAGraph:
                    wrong.append(True)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert names() == before


def test_torchs_names_capture_and_replay_with_cgraph(lab: Lab, user_module: ModuleType) -> None:
    x = fresh(lab, 32)
    graphs, hooked = [], []
    with (
        cgraph.patch_torch(),
        torch.cuda.graphs.register_graph_replay_end_hook(hooked.append),  # type: ignore[attr-defined]
    ):
        pool = torch.cuda.graph_pool_handle()
        for make, capture in (
            (torch.cuda.CUDAGraph, torch.cuda.graph),
            (user_module.CUDAGraph, user_module.capture),
        ):
            graph = make()
            assert isinstance(graph, torch.cuda.CUDAGraph)
            assert isinstance(graph, cgraph.CUDAGraph)
            assert not torch.cuda.is_current_stream_capturing()
            with capture(graph, pool=pool):
                assert torch.cuda.is_current_stream_capturing()
                y = x * 2 + 1
            assert tuple(graph.pool()) == tuple(pool)
            graphs.append((graph, y))
        x.normal_()
        for graph, y in graphs:
            graph.replay()
            assert torch.equal(y, x * 2 + 1)
    assert hooked == [graph for graph, _ in graphs]
    # They go on working when the patch is gone.
    x.normal_()
    for graph, y in graphs:
        graph.replay()
        assert torch.equal(y, x * 2 + 1)


def test_torchs_make_graphed_callables_is_cgraphs(lab: Lab) -> None:
    x, w = fresh(lab, 4, 8), fresh(lab, 8, 8).requires_grad_()
    with cgraph.patch_torch():
        function = torch.cuda.make_graphed_callables(lambda x, w: (x @ w).relu(), (x, w))
    other = fresh(lab, 4, 8)
    function(other, w).sum().backward()
    found, w.grad = w.grad, None
    (other @ w).relu().sum().backward()
    assert w.grad is not None and found is not None
    assert torch.allclose(found, w.grad)


def test_a_graph_of_torchs_own_class_is_handed_to_torchs_own_context(
    sim: SimLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[Any] = []

    class OfTorch:
        """A stand-in for torch's own context manager, which needs a GPU."""

        def __init__(self, *args: Any, **options: Any) -> None:
            steps.append((args, options))
            self.capture_stream = "stream of torch"

        def __enter__(self) -> None:
            steps.append("enter")

        def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
            steps.append(kind)

    theirs = torch._C._CUDAGraph.__new__(torch._C._CUDAGraph)
    monkeypatch.setattr(torch.cuda.graphs, "graph", OfTorch)
    with cgraph.patch_torch():
        context = torch.cuda.graph(theirs, (0, 3), capture_error_mode="relaxed")
        assert isinstance(context, torch.cuda.graph)
        assert context.capture_stream == "stream of torch"
        with context as entered:
            assert entered is None
        with pytest.raises(ValueError, match="mine"), torch.cuda.graph(theirs):
            raise ValueError("mine")
        torch.cuda.graph(theirs, check_input_liveness=True)  # type: ignore[call-arg]
    first, second = ((theirs, (0, 3), None, "relaxed"), {}), ((theirs, None, None, "global"), {})
    assert steps[:6] == [first, "enter", None, second, "enter", ValueError]
    assert steps[6] == (second[0], {"check_input_liveness": True})
    with pytest.raises(ArgumentError, match=r"torch\.cuda\.graph"):
        cgraph.graph(theirs)  # type: ignore[arg-type]


def test_compiled_code_breaks_and_recompiles_as_with_torchs_own_names(
    sim: SimLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch._dynamo
    from torch._dynamo.testing import CompileCounter
    from torch._dynamo.utils import counters

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        return y * 2 if torch.cuda.is_current_stream_capturing() else y * 3

    def compiled() -> tuple[int, list[str]]:
        torch._dynamo.reset()
        counters.clear()
        counter = CompileCounter()
        run = torch.compile(function, backend=counter)
        for _ in range(3):
            x = torch.randn(4)
            assert torch.equal(run(x), (x + 1) * 3)
        return counter.frame_count, [str(key)[:60] for key in counters["graph_break"]]

    # torch's own asks CUDA, which is not there on every machine.
    monkeypatch.setattr(torch.cuda.graphs, "_cuda_isCurrentStreamCapturing", lambda: False)
    expected = compiled()
    with cgraph.patch_torch():
        assert compiled() == expected
    assert compiled() == expected


def test_dynamo_imported_inside_knows_torchs_own_functions_afterwards() -> None:
    import subprocess

    code = (
        "import torch, cgraph\n"
        "original = torch.cuda.is_current_stream_capturing\n"
        "with cgraph.patch_torch():\n"
        "    import torch._dynamo\n"
        "rules = torch._dynamo.trace_rules.get_torch_obj_rule_map()\n"
        "print(rules[original].__name__, rules[original] is rules[cgraph.graphs."
        "is_current_stream_capturing])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "TorchInGraphFunctionVariable True", done.stderr


def test_a_copy_of_a_patch_is_the_patch() -> None:
    patch = cgraph.patch_torch()
    copied = copy.copy(patch)
    copied.undo()
    patch.undo()
    with cgraph.patch_torch():
        assert torch.cuda.CUDAGraph is cgraph.CUDAGraph
    assert torch.cuda.CUDAGraph is not cgraph.CUDAGraph
