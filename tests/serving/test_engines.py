"""The plugins of vLLM and SGLang, on stand-ins of the classes that they replace."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import cgraph
from cgraph.integrations import sglang, vllm
from lab import Lab
from stand_ins import install_sglang, install_vllm


@pytest.fixture
def vllm_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Switch the plugin of vLLM on."""
    monkeypatch.setenv("CGRAPH_VLLM", "1")
    yield
    vllm.unregister()


@pytest.fixture
def sglang_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Switch the plugin of SGLang on."""
    monkeypatch.setenv("CGRAPH_SGLANG", "1")
    yield
    sglang.unregister()


def attend(x: Tensor, out: Tensor) -> None:
    """Write the result of what no graph could hold."""
    torch.mul(x, float(x.abs().max()), out=out)


class Decoder:
    """Layers with an attention between them."""

    def __init__(self, lab: Lab) -> None:
        self.x = torch.randn(4, 8, device=lab.device)
        self.outs = [torch.empty(4, 8, device=lab.device) for _ in range(3)]
        self.weight = torch.randn(8, 8, device=lab.device)

    def __call__(self, between: Callable[[Tensor, Tensor], object]) -> Tensor:
        x = self.x
        for out in self.outs:
            between(torch.tanh(x @ self.weight), out)
            x = out
        return x @ self.weight + 1

    def check(self, replay: Callable[[], object], result: Tensor) -> None:
        """Replay with a new input, and compare the result with eager."""
        self.x.normal_()
        right = self(attend)
        for out in self.outs:
            out.fill_(float("nan"))
        replay()
        assert torch.allclose(result, right, atol=1e-4)


def natives_of(monkeypatch: pytest.MonkeyPatch) -> list[list[bool]]:
    """Note which steps of native replays are graphs, from now on."""
    natives: list[list[bool]] = []
    segments = cgraph._core.Segments

    def noted(steps: list[Any], modes: Any) -> Any:
        natives.append([isinstance(one, cgraph.CUDAGraph) for one in steps])
        return segments(steps, modes)

    monkeypatch.setattr(cgraph._core, "Segments", noted)
    return natives


def test_the_plugins_are_entry_points_of_both_engines() -> None:
    found = {
        group: [one.load() for one in entry_points(group=group) if one.name == "cgraph"]
        for group in ("vllm.general_plugins", "sglang.srt.plugins")
    }
    assert found["vllm.general_plugins"] == [vllm.register]
    assert found["sglang.srt.plugins"] == [sglang.register]


@pytest.mark.parametrize("plugin", [vllm, sglang])
@pytest.mark.parametrize("value", [None, "", "0"])
def test_a_plugin_does_nothing_unless_it_is_switched_on(
    plugin: Any, value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for switch in ("CGRAPH_VLLM", "CGRAPH_SGLANG"):
        monkeypatch.delenv(switch, raising=False)
        if value is not None:
            monkeypatch.setenv(switch, value)
    module = install_vllm(monkeypatch)
    before, replay = torch.cuda.CUDAGraph, module.BreakableCUDAGraphCapture.replay
    plugin.register()
    assert torch.cuda.CUDAGraph is before
    assert module.BreakableCUDAGraphCapture.replay is replay


def test_breakable_graphs_of_vllm_are_replayed_by_one_native_call(
    lab: Lab, vllm_on: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    captures = install_vllm(monkeypatch).BreakableCUDAGraphCapture
    vllm.register()
    decoder = Decoder(lab)

    def between(x: Tensor, out: Tensor) -> None:
        captures.current().add_eager(lambda: attend(x, out))

    with lab.use(lab.stream()):
        pool = torch.cuda.graph_pool_handle()
        with captures(pool) as capture:
            result = decoder(between)
    assert len(capture.segments) == 7
    natives = natives_of(monkeypatch)
    for _ in range(3):
        decoder.check(capture.replay, result)
    assert natives == [[True, False, True, False, True, False, True]]


def test_a_capture_of_vllm_that_grows_is_replayed_whole(
    lab: Lab, vllm_on: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    captures = install_vllm(monkeypatch).BreakableCUDAGraphCapture
    vllm.register()
    x, seen = torch.ones(4, device=lab.device), []
    with lab.use(lab.stream()), captures() as capture:
        y = x * 2
    capture.replay()
    capture.segments.append(lambda: seen.append(y.sum().item()))
    capture.replay()
    assert seen == [8.0]


def test_a_capture_of_vllm_whose_segments_have_changed_lets_the_old_ones_go(
    lab: Lab, vllm_on: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    captures = install_vllm(monkeypatch).BreakableCUDAGraphCapture
    vllm.register()
    x = torch.ones(4, device=lab.device)
    with lab.use(lab.stream()), captures() as capture:
        y = x * 2
    capture.replay()
    old = weakref.ref(capture.graph)
    with lab.use(lab.stream()), captures() as other:
        y = x * 3
    capture.segments, capture.graph = other.segments, None
    capture.replay()
    gc.collect()
    assert old() is None
    assert y.tolist() == [3.0] * 4
    capture.segments = []
    capture.replay()


def test_an_exception_between_graphs_comes_out_and_the_next_replay_is_whole(
    lab: Lab, vllm_on: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    captures = install_vllm(monkeypatch).BreakableCUDAGraphCapture
    vllm.register()
    x, fails = torch.ones(4, device=lab.device), [False]

    def between() -> None:
        if fails[0]:
            raise KeyError("a request is gone")

    with lab.use(lab.stream()), captures() as capture:
        y = x * 2
        capture.add_eager(between)
        z = y + 1
    fails[0] = True
    with pytest.raises(KeyError, match="a request is gone"):
        capture.replay()
    fails[0] = False
    x.fill_(3)
    capture.replay()
    assert z.tolist() == [7.0] * 4


def test_a_second_registration_changes_nothing(
    vllm_on: None, sglang_on: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    captures = install_vllm(monkeypatch).BreakableCUDAGraphCapture
    engine = install_sglang(monkeypatch)
    before = torch.cuda.CUDAGraph
    vllm.register()
    sglang.register()
    replay, hooks = captures.replay, len(engine.registry.HookRegistry.hooks)
    vllm.register()
    sglang.register()
    assert captures.replay is replay
    assert len(engine.registry.HookRegistry.hooks) == hooks == 2
    sglang.unregister()
    vllm.unregister()
    assert torch.cuda.CUDAGraph is before


def test_classes_that_have_moved_are_left_alone_with_one_line(
    vllm_on: None,
    sglang_on: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    module = install_vllm(monkeypatch)
    del module.BreakableCUDAGraphCapture
    engine = install_sglang(monkeypatch)
    del engine.breakable.BreakableCUDAGraph, engine.utils.resolve_decode_backend
    with caplog.at_level(logging.WARNING):
        vllm.register()
        sglang.register()
    assert issubclass(torch.cuda.CUDAGraph, cgraph.CUDAGraph)
    first, *others = [record.getMessage() for record in caplog.records]
    assert "BreakableCUDAGraphCapture" in first
    assert "vLLM 0.33.0" in first
    assert len(others) == 2
    assert all("left alone" in one and "SGLang 0.5.23" in one for one in others)


def test_captures_with_other_attributes_are_replayed_by_the_engine_with_one_line(
    lab: Lab, vllm_on: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = install_vllm(monkeypatch)
    ran: list[int] = []

    class Other:
        def replay(self) -> None:
            ran.append(1)

    module.BreakableCUDAGraphCapture = Other
    with caplog.at_level(logging.INFO):
        vllm.register()
        for _ in range(3):
            Other().replay()
    assert len(ran) == 3
    own = [one.getMessage() for one in caplog.records if one.name.startswith("cgraph")]
    effect, left_alone = own
    assert effect == "torch's CUDA graphs are cgraph's, as CGRAPH_VLLM=1 says"
    assert "no attribute 'segments'" in left_alone


def test_a_module_of_vllm_that_fails_to_load_does_not_end_the_engine(
    vllm_on: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install_vllm(monkeypatch)

    def fails(name: str) -> Any:
        raise OSError(f"{name}: a library is missing")

    monkeypatch.setattr(vllm, "import_module", fails)
    with caplog.at_level(logging.WARNING):
        vllm.register()
    assert "a library is missing" in caplog.records[0].getMessage()
    assert issubclass(torch.cuda.CUDAGraph, cgraph.CUDAGraph)


def test_registration_does_not_initialise_cuda() -> None:
    code = (
        "import torch\n"
        "from cgraph.integrations import sglang, vllm\n"
        "vllm.register(); sglang.register()\n"
        "assert torch.cuda.CUDAGraph.__module__.startswith('cgraph')\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    env = {**os.environ, "CGRAPH_VLLM": "1", "CGRAPH_SGLANG": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("left alone") == 3


def test_breakable_graphs_of_sglang_are_replayed_by_one_native_call(
    lab: Lab, sglang_on: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = install_sglang(monkeypatch)
    sglang.register()
    engine.registry.HookRegistry.apply_hooks()
    decoder, streams = Decoder(lab), []

    def noting(x: Tensor, out: Tensor) -> None:
        streams.append(engine.breakable.present.get())
        attend(x, out)

    graph = engine.breakable.BreakableCUDAGraph()
    between = engine.breakable.eager_on_graph(noting)
    with lab.use(lab.stream()), engine.breakable.BreakableCUDAGraphCapture(graph):
        result = decoder(between)
    segments, streams[:] = graph._segments[:], []
    natives = natives_of(monkeypatch)
    for _ in range(2):
        decoder.check(graph.replay, result)
    assert natives == [[True, False, True, False, True, False, True]]
    # SGLang's own code around the loop has run, and its capture is as it was.
    assert len(streams) == 6
    assert None not in streams
    assert graph._segments == segments
    assert len(graph._break_fns) == 3


def backend_of(lab: Lab, engine: SimpleNamespace) -> Any:
    sglang.register()
    engine.registry.HookRegistry.apply_hooks()
    runner = SimpleNamespace(
        device_module=SimpleNamespace(synchronize=lab.sync), enable_profile_cuda_graph=False
    )
    return engine.utils.resolve_decode_backend(runner)


def test_full_graphs_of_sglang_are_those_of_a_ladder(
    lab: Lab, sglang_on: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = install_sglang(monkeypatch)
    backend = backend_of(lab, engine)
    assert isinstance(backend, engine.base)
    assert isinstance(backend, sglang.LadderBackend)
    weight, x = torch.randn(8, 8, device=lab.device), torch.randn(8, 8, device=lab.device)
    steps, order = torch.zeros(1, device=lab.device), []

    def forward(rows: int) -> SimpleNamespace:
        order.append(rows)
        steps.add_(1)
        return SimpleNamespace(logits=x[:rows] @ weight, mode="decode")

    def reset() -> None:
        order.append("hook")
        steps.zero_()

    replays: list[Any] = []
    hook = cgraph.register_graph_replay_start_hook(replays.append)
    with torch.no_grad(), backend.capture_session(lab.stream()):
        for rows in (8, 4, 1):
            backend.capture_one(rows, lambda n=rows: forward(n), torch.empty(1), reset)
    hook.remove()
    # As SGLang does: the hook after each warm-up, and nothing is launched by the capture.
    assert order == [one for n in (8, 4, 1) for one in (n, "hook", n, "hook", n)]
    assert not replays
    assert steps.item() == 0
    assert [backend.can_run(None, rows) for rows in (8, 4, 2, 1)] == [True, True, False, True]
    kept = {}
    with backend.replay_session():
        for rows in (1, 8, 4):
            x.normal_()
            kept[rows] = backend.replay(rows, None), x[:rows] @ weight
    # Results of other shapes stay, as SGLang's own do.
    for output, right in kept.values():
        assert torch.allclose(output.logits, right, atol=1e-4)
        assert output.mode == "decode"
    assert steps.item() == 3
    backend.cleanup()
    assert not backend.can_run(None, 8)


def test_two_backends_of_sglang_over_one_pool_leave_each_other_their_results(
    lab: Lab, sglang_on: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = install_sglang(monkeypatch)
    target = backend_of(lab, engine)
    draft = engine.utils.resolve_decode_backend(target._theirs._cuda_graph_runner)
    pool = torch.cuda.graph_pool_handle()
    x = torch.randn(4, 4, device=lab.device)
    for factor, backend in enumerate((target, draft), 2):
        backend._theirs._pool = pool
        with torch.no_grad(), backend.capture_session(lab.stream()):
            backend.capture_one(4, lambda n=factor: [x * n, x + n])
    first, second = target.replay(4, None), draft.replay(4, None)
    for factor, results in enumerate((first, second), 2):
        assert torch.allclose(results[0], x * factor)
        assert torch.allclose(results[1], x + factor)


@pytest.mark.parametrize(
    "switch",
    [
        "SGLANG_ENABLE_GRAPH_POOL_BORROW",
        "SGLANG_ENABLE_GRAPH_POOL_PRECARVE",
        "SGLANG_MEMORY_SAVER_CUDA_GRAPH",
    ],
)
def test_sglang_keeps_its_backend_where_others_use_the_pools_memory(
    switch: str, lab: Lab, sglang_on: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = install_sglang(monkeypatch)
    monkeypatch.setenv(switch, "1")
    assert type(backend_of(lab, engine)) is engine.full


def test_sglang_keeps_a_backend_that_is_not_of_full_graphs(
    lab: Lab, sglang_on: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = install_sglang(monkeypatch)

    class OfAPlatform(engine.full):  # type: ignore[misc, name-defined]
        pass

    monkeypatch.setattr(engine.utils, "resolve_decode_backend", OfAPlatform)
    assert type(backend_of(lab, engine)) is OfAPlatform
