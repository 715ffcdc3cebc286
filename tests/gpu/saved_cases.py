"""Rules of saved graphs, in a process that records images; ``test_saved.py`` runs it."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from cgraph.errors import ArgumentError, CgraphError, StateError

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True, scope="module")
def recorded() -> None:
    cgraph.record_images()
    cgraph.record_images()  # once more changes nothing


def fresh(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda")


@torch.no_grad()
def capture(
    run: Callable[[], Any], pool: Any = None, **options: Any
) -> tuple[cgraph.CUDAGraph, Any]:
    """Run a function and capture it; return the graph and what it returned."""
    run()
    graph = cgraph.CUDAGraph(keep_graph=True)
    for generator in options.get("generators", ()):
        graph.register_generator_state(generator)
    with cgraph.graph(graph, pool=pool, stream=options.get("stream")):
        out = run()
    return graph, out


def replayed(graph: cgraph.CUDAGraph, out: Tensor) -> Tensor:
    out.fill_(77)
    graph.replay()
    return out.clone()


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, nn.Module, Tensor]:
    """Save a graph of a layer; return the file, the layer and its input."""
    layer, x = nn.Linear(64, 64).cuda(), fresh(8, 64)
    graph, out = capture(lambda: layer(x).relu())
    cgraph.save(tmp_path / "graphs", graph, {"layer": layer, "x": x, "out": out})
    return tmp_path / "graphs", layer, x


def test_loaded_graphs_use_what_they_are_given(saved: tuple[Path, nn.Module, Tensor]) -> None:
    file, layer, x = saved
    other, y = nn.Linear(64, 64).cuda(), fresh(8, 64)
    for one, into in ((layer, x), (other, y)):
        loaded = cgraph.load(file, {"layer": one, "x": into})
        into.copy_(fresh(8, 64))
        found = replayed(loaded.graphs["graph"], loaded.tensors["out"])
        with torch.no_grad():
            assert torch.equal(found, one(into).relu())


def test_kernels_are_loaded_beside_other_work(saved: tuple[Path, nn.Module, Tensor]) -> None:
    file, layer, x = saved
    kernels = cgraph.load_kernels(file)
    for _ in range(2):  # it serves several loads
        loaded = cgraph.load(kernels, {"layer": layer, "x": x})
        found = replayed(loaded.graphs["graph"], loaded.tensors["out"])
        with torch.no_grad():
            assert torch.equal(found, layer(x).relu())
    missing = cgraph.load_kernels(file.with_name("missing"))
    with pytest.raises(CgraphError, match="missing: it cannot be read"):
        cgraph.load(missing, {})


def test_a_loaded_graph_keeps_what_it_uses(saved: tuple[Path, nn.Module, Tensor]) -> None:
    file, _, _ = saved
    layer, x = nn.Linear(64, 64).cuda(), fresh(8, 64)
    with torch.no_grad():
        expected = layer(x).relu()
    loaded = cgraph.load(file, {"layer": layer, "x": x})
    graph, out = loaded.graphs["graph"], loaded.tensors["out"]
    del layer, x, loaded
    gc.collect()
    taken = [torch.full((64, 64), 5.0, device="cuda") for _ in range(50)]
    assert torch.equal(replayed(graph, out), expected)
    del taken


def test_what_is_missing_or_unlike_is_refused_by_its_name(
    saved: tuple[Path, nn.Module, Tensor],
) -> None:
    file, layer, x = saved
    with pytest.raises(ArgumentError, match=r"names lacks layer.weight, layer.bias, x, as saved"):
        cgraph.load(file, {})
    with pytest.raises(ArgumentError, match=r"out was given, and lies in the graphs' own memory"):
        cgraph.load(file, {"layer": layer, "x": x, "out": x})
    with pytest.raises(ArgumentError, match=r"x is float32\[4, 64\]"):
        cgraph.load(file, {"layer": layer, "x": fresh(4, 64)})
    with pytest.raises(ArgumentError, match=r"layer.weight is float64"):
        cgraph.load(file, {"layer": nn.Linear(64, 64).cuda().double(), "x": x})


def test_a_tensor_in_a_larger_storage_is_used_where_it_is(
    saved: tuple[Path, nn.Module, Tensor],
) -> None:
    file, layer, _ = saved
    longer = fresh(16, 64)
    loaded = cgraph.load(file, {"layer": layer, "x": longer[:8]})
    found = replayed(loaded.graphs["graph"], loaded.tensors["out"])
    with torch.no_grad():
        assert torch.equal(found, layer(longer[:8]).relu())


def test_memory_without_a_name_is_refused_by_node_and_kernel(tmp_path: Path) -> None:
    x, hidden = fresh(8), fresh(8)
    graph, out = capture(lambda: x * hidden)
    with pytest.raises(ArgumentError, match=r"node 0 \(.*\): an address is .* without a name") as e:
        cgraph.save(tmp_path / "graphs", graph, {"x": x, "out": out})
    assert "name the tensor that lies there" in e.value.__notes__[0]
    assert not list(tmp_path.iterdir())


CUDA: Any = ctypes.CDLL("libcuda.so.1") if torch.cuda.is_available() else None
PTX = b"""
.version 8.0
.target sm_80
.address_size 64
.visible .global .align 4 .f32 value = 0f40000000;
.visible .entry scale(.param .u64 x) {
  .reg .u64 %r<3>; .reg .f32 %f<4>;
  ld.param.u64 %r1, [x]; cvta.to.global.u64 %r2, %r1;
  ld.global.f32 %f1, [%r2]; ld.global.f32 %f2, [value];
  mul.f32 %f3, %f1, %f2; st.global.f32 [%r2], %f3; ret;
}
"""


def scaling(x: Tensor) -> tuple[ctypes.c_void_p, Callable[[], None]]:
    """Load a module by hand; return it, and a launch of its kernel on a tensor."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    assert CUDA.cuModuleLoadData(ctypes.byref(module), PTX) == 0
    assert CUDA.cuModuleGetFunction(ctypes.byref(function), module, b"scale") == 0
    address = ctypes.c_uint64(x.data_ptr())
    args = (ctypes.c_void_p * 1)(ctypes.addressof(address))

    def run() -> None:
        assert address.value == x.data_ptr()
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        one = [ctypes.c_uint(1)] * 6
        assert CUDA.cuLaunchKernel(function, *one, 0, stream, args, None) == 0

    return module, run


def test_a_kernel_is_refused_if_the_program_may_have_written_a_variable_of_its_module(
    tmp_path: Path,
) -> None:
    x, found = fresh(1), ctypes.c_void_p()
    module, run = scaling(x)
    graph, _ = capture(run)
    cgraph.save(tmp_path / "graphs", graph, {"x": x})
    y = fresh(1)
    expected = y * 2
    cgraph.load(tmp_path / "graphs", {"x": y}).graphs["graph"].replay()
    assert torch.equal(y, expected)
    assert CUDA.cuModuleGetGlobal_v2(ctypes.byref(found), None, module, b"value") == 0
    with pytest.raises(ArgumentError, match="of which the program has taken a variable's address"):
        cgraph.save(tmp_path / "graphs", graph, {"x": x})


def test_pinned_memory_of_the_host_is_refused(tmp_path: Path) -> None:
    x = torch.ones(1, pin_memory=True)
    graph, _ = capture(scaling(x)[1])
    with pytest.raises(ArgumentError, match=r"node 0 \(scale\): an address is .* without a name"):
        cgraph.save(tmp_path / "graphs", graph, {})


def test_tensors_that_shared_memory_must_share_it_again(tmp_path: Path) -> None:
    x = fresh(8)
    graph, out = capture(lambda: x[:4] + x[4:])
    cgraph.save(tmp_path / "graphs", graph, {"a": x[:4], "b": x[4:], "out": out})
    y = fresh(8)
    loaded = cgraph.load(tmp_path / "graphs", {"a": y[:4], "b": y[4:]})
    assert torch.equal(replayed(loaded.graphs["graph"], loaded.tensors["out"]), y[:4] + y[4:])
    with pytest.raises(ArgumentError, match="b has a storage of its own, expected that of a"):
        cgraph.load(tmp_path / "graphs", {"a": y[:4], "b": fresh(8)[4:]})


def test_a_constant_in_the_pool_comes_back_with_its_contents(tmp_path: Path) -> None:
    pool = cgraph.MemPool()
    x = fresh(1000)
    with torch.cuda.use_mem_pool(pool):
        constant = torch.arange(1000.0, device="cuda")
    graph, out = capture(lambda: x + constant, pool)
    expected = x + constant
    # Results are not kept: the graph makes them.
    out.fill_(5)
    cgraph.save(tmp_path / "graphs", graph, {"x": x, "out": out})
    constant.zero_()
    loaded = cgraph.load(tmp_path / "graphs", {"x": x})
    assert not torch.equal(loaded.tensors["out"], torch.full_like(out, 5))
    assert torch.equal(replayed(loaded.graphs["graph"], loaded.tensors["out"]), expected)


def test_a_constant_is_kept_where_an_earlier_graph_had_a_result(tmp_path: Path) -> None:
    pool, x, stream = cgraph.MemPool(), fresh(1000), torch.cuda.Stream()
    first, out = capture(lambda: x * 2, pool, stream=stream)
    place = out.data_ptr()
    del out
    with torch.cuda.use_mem_pool(pool), torch.cuda.stream(stream):
        constant = torch.arange(1000.0, device="cuda")
    assert constant.data_ptr() == place
    second, out = capture(lambda: x + constant, pool, stream=stream)
    torch.cuda.synchronize()
    expected = x + constant
    cgraph.save(tmp_path / "graphs", second, {"x": x, "out": out})
    constant.zero_()
    loaded = cgraph.load(tmp_path / "graphs", {"x": x})
    assert torch.equal(replayed(loaded.graphs["graph"], loaded.tensors["out"]), expected)
    del first


def test_random_numbers_of_a_generator_of_ones_own_are_refused(tmp_path: Path) -> None:
    own = torch.Generator("cuda")
    out = torch.empty(8, device="cuda")
    graph, _ = capture(lambda: out.normal_(generator=own), generators=[own])
    with pytest.raises(ArgumentError, match="has a generator of its own"):
        cgraph.save(tmp_path / "graphs", graph, {"out": out})


def test_a_loaded_graph_draws_as_a_captured_one(tmp_path: Path) -> None:
    graph, out = capture(lambda: torch.rand(64, device="cuda"))
    graph.instantiate()
    torch.manual_seed(5)
    expected = [replayed(graph, out) for _ in range(3)]
    after = torch.rand(4, device="cuda")
    cgraph.save(tmp_path / "graphs", graph, {"out": out})
    loaded = cgraph.load(tmp_path / "graphs", {})
    torch.manual_seed(5)
    for one in expected:
        assert torch.equal(replayed(loaded.graphs["graph"], loaded.tensors["out"]), one)
    assert torch.equal(torch.rand(4, device="cuda"), after)


def test_a_second_capture_proves_addresses(tmp_path: Path) -> None:
    layer = nn.Linear(64, 64).cuda()
    first, second = fresh(8, 64), fresh(8, 64)
    graph, out = capture(lambda: layer(first) * first)
    other, its_out = capture(lambda: layer(second) * second)
    names = {"layer": layer, "x": first, "out": out}
    again = other, {"layer": layer, "x": second, "out": its_out}
    report = cgraph.save(tmp_path / "graphs", graph, names, again=again)
    proven, assumed = report.addresses["graph"]
    assert proven > 0 and assumed > 0  # weights did not move
    assert sum(cgraph.save(tmp_path / "graphs", graph, names).addresses["graph"]) >= proven
    loaded = cgraph.load(tmp_path / "graphs", {"layer": layer, "x": second})
    found = replayed(loaded.graphs["graph"], loaded.tensors["out"])
    with torch.no_grad():
        assert torch.equal(found, layer(second) * second)
    unlike, _ = capture(lambda: layer(second) + second)
    with pytest.raises(ArgumentError, match="the second template is"):
        cgraph.save(tmp_path / "other", graph, names, again=(unlike, again[1]))


def test_graphs_of_a_paused_pool_are_refused(tmp_path: Path) -> None:
    pool, x = cgraph.MemPool(), fresh(8)
    graph, out = capture(lambda: x * 2, pool)
    pool.pause()
    with pytest.raises(StateError, match="which is paused: call its resume"):
        cgraph.save(tmp_path / "graphs", graph, {"x": x, "out": out})
    pool.resume()
    cgraph.save(tmp_path / "graphs", graph, {"x": x, "out": out})


def test_the_memory_of_loaded_graphs_is_that_of_their_pool(
    saved: tuple[Path, nn.Module, Tensor],
) -> None:
    file, layer, x = saved
    pool = cgraph.MemPool()
    loaded = cgraph.load(file, {"layer": layer, "x": x}, pool=pool)
    graph, out = loaded.graphs["graph"], loaded.tensors["out"]
    expected = replayed(graph, out)
    assert graph.pool() == pool.id
    assert loaded.report.pools <= pool.stats()["mapped"] <= loaded.report.pools + (20 << 20)
    for other in (pool.id, graph.pool(), graph):
        cgraph.load(file, {"layer": layer, "x": x}, pool=other)
    pool.pause()
    with pytest.raises(StateError):
        graph.replay()
    pool.resume()
    assert torch.equal(replayed(graph, out), expected)


def test_several_graphs_of_a_file_work_in_their_order(tmp_path: Path) -> None:
    pool, x = cgraph.MemPool(), fresh(64)
    first, middle = capture(lambda: x * 2, pool)
    second, out = capture(lambda: middle + 1, pool)
    names = {"x": x, "middle": middle, "out": out}
    cgraph.save(tmp_path / "graphs", {"first": first, "second": second}, names)
    y = fresh(64)
    loaded = cgraph.load(tmp_path / "graphs", {"x": y})
    loaded.graphs["first"].replay()
    loaded.graphs["second"].replay()
    assert torch.equal(loaded.tensors["out"], y * 2 + 1)


def test_a_damaged_file_is_refused(saved: tuple[Path, nn.Module, Tensor]) -> None:
    file, layer, x = saved
    whole = file.read_bytes()
    for place in (20, 100, len(whole) // 2, len(whole) - 1):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        file.write_bytes(damaged)
        with pytest.raises(CgraphError, match=r"damaged|cut off|version"):
            cgraph.load(file, {"layer": layer, "x": x})
