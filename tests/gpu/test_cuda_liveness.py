"""Memory that torch does not track: raw allocations under tensors, kernels of others."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import cgraph
from cgraph.errors import LivenessError
from lab import CudaLab, fresh

pytestmark = pytest.mark.gpu
lab = CudaLab()

NBYTES = 64 << 20
PTX = b"""
.version 6.3
.target sm_75
.address_size 64
.visible .entry poke(.param .u64 place)
{
    .reg .b64 %rd<3>;
    .reg .b32 %r<2>;
    ld.param.u64 %rd1, [place];
    cvta.to.global.u64 %rd2, %rd1;
    mov.u32 %r1, 7;
    st.global.u32 [%rd2], %r1;
    ret;
}
\0"""


def ok(result: tuple[Any, ...]) -> Any:
    """Return the results of a cuda-bindings call besides its code, which must be zero."""
    assert int(result[0]) == 0, result[0]
    return result[1] if len(result) == 2 else result[1:]


class Raw:
    """Device memory of the driver, which can be freed before the tensors that lie in it."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        torch.zeros(1, device="cuda")  # makes the device's context current
        self.address = int(ok(driver.cuMemAlloc(NBYTES)))
        self.__cuda_array_interface__ = {
            "shape": (NBYTES // 4,),
            "typestr": "<i4",
            "data": (self.address, False),
            "version": 3,
        }

    def tensor(self) -> torch.Tensor:
        return torch.as_tensor(self, device="cuda")

    def free(self) -> None:
        from cuda.bindings import driver

        torch.cuda.synchronize()
        ok(driver.cuMemFree(driver.CUdeviceptr(self.address)))


@pytest.fixture(scope="module")
def poke() -> Iterator[Any]:
    """Launch a kernel of our own that writes a 7, on torch's current stream."""
    from cuda.bindings import driver

    scratch = torch.zeros(1, device="cuda")
    module = ok(driver.cuModuleLoadData(PTX))
    function = ok(driver.cuModuleGetFunction(module, b"poke"))

    def launch(address: int) -> None:
        stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
        arguments = ((address,), (ctypes.c_uint64,))
        ok(driver.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, arguments, 0))

    launch(scratch.data_ptr())  # the driver may load it as late as this
    yield launch
    gc.collect()
    torch.cuda.synchronize()


def test_a_tensor_over_memory_that_its_owner_freed_raises() -> None:
    raw, graph = Raw(), cgraph.CUDAGraph()
    x = raw.tensor()
    x.fill_(3)
    with cgraph.graph(graph, check_input_liveness=True):
        y = x[:8] * 2
    graph.replay()
    assert y.tolist() == [6] * 8
    raw.free()
    with pytest.raises(LivenessError, match=r"aten\.mul.*freed"):
        graph.replay()


def test_a_dlpack_import_that_died_raises() -> None:
    raw, graph = Raw(), cgraph.CUDAGraph()
    x = torch.from_dlpack(raw.tensor())
    x.fill_(3)
    with cgraph.graph(graph, check_input_liveness=True):
        y = x[:8] * 2
    graph.replay()
    assert y.tolist() == [6] * 8
    del x
    with pytest.raises(LivenessError, match=r"aten\.mul.*freed"):
        graph.replay()
    raw.free()


def test_a_kernel_of_ours_on_freed_driver_memory_raises(poke: Any) -> None:
    raw, graph = Raw(), cgraph.CUDAGraph()
    x = raw.tensor()
    x.zero_()
    with cgraph.graph(graph, check_input_liveness=True):
        poke(raw.address + 4)
    graph.replay()
    assert x[:3].tolist() == [0, 7, 0]
    del x
    graph.replay()
    raw.free()
    with pytest.raises(LivenessError, match=f"poke.*{raw.address + 4:#x}"):
        graph.replay()


@pytest.mark.parametrize("empty_cache", [False, True])
def test_a_kernel_of_ours_on_a_deleted_tensor_raises(poke: Any, empty_cache: bool) -> None:
    x, graph = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda"), cgraph.CUDAGraph()
    with cgraph.graph(graph, check_input_liveness=True):
        poke(x.data_ptr())
    graph.replay()
    assert x[:2].tolist() == [7, 0]
    del x
    if empty_cache:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    with pytest.raises(LivenessError, match=r"poke.*0x"):
        graph.replay()


def test_a_custom_operator_on_a_hidden_address_is_seen(poke: Any) -> None:
    hidden = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda")
    address = hidden.data_ptr()

    @torch.library.custom_op("cgraph_test::poke_hidden", mutates_args=())
    def poke_hidden(x: torch.Tensor) -> torch.Tensor:
        poke(address)
        return x + 1

    x, graph = fresh(lab, 8), cgraph.CUDAGraph()
    with cgraph.graph(graph, check_input_liveness=True):
        y = poke_hidden(x)
    graph.replay()
    assert torch.equal(y, x + 1) and int(hidden[0]) == 7
    del hidden
    with pytest.raises(LivenessError, match=r"poke.*0x"):
        graph.replay()


def test_a_memcpy_from_a_deleted_tensor_raises() -> None:
    from cuda.bindings import runtime

    x, y = fresh(lab, NBYTES // 4), torch.empty(NBYTES // 4, device="cuda")
    graph = cgraph.CUDAGraph()
    with cgraph.graph(graph, check_input_liveness=True):
        stream = torch.cuda.current_stream().cuda_stream
        kind = runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        ok(runtime.cudaMemcpyAsync(y.data_ptr(), x.data_ptr(), NBYTES, kind, stream))
    graph.replay()
    assert torch.equal(x, y)
    del x
    with pytest.raises(LivenessError, match=r"memcpy.*0x"):
        graph.replay()


def test_a_dead_alias_of_another_graphs_living_output_passes() -> None:
    x, first = fresh(lab, 1 << 10), cgraph.CUDAGraph()
    with cgraph.graph(first):
        y = x * 2
    alias, second = torch.from_dlpack(y), cgraph.CUDAGraph()  # another storage, the same memory
    with cgraph.graph(second, first.pool(), check_input_liveness=True):
        z = alias + 1
    del alias
    x.normal_()
    first.replay()
    second.replay()
    assert torch.equal(z, x * 2 + 1)
    del y
    gc.collect()
    with pytest.raises(LivenessError, match="freed"):
        second.replay()


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_products_reductions_and_optimizers_raise_nothing_without_cause() -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(784, 64)
    ).cuda()
    optimizer = torch.optim.Adam(model.parameters(), capturable=True, foreach=True)
    x, graph, stream = fresh(lab, 32, 3, 9, 9), cgraph.CUDAGraph(), torch.cuda.Stream()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(x).square().mean().backward()
        optimizer.step()

    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    optimizer.zero_grad(set_to_none=True)
    with cgraph.graph(graph, check_input_liveness=True):
        step()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = [parameter.clone() for parameter in model.parameters()]
    for _ in range(3):
        x.normal_()
        graph.replay()
    after = list(model.parameters())
    assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
