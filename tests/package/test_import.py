"""Effects of `import cgraph`, and their absence."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import cgraph
from cgraph.piecewise import Dispatcher, PiecewiseBackend, RuntimeMode
from lab import Lab, fresh


def run(code: str, **environment: str) -> str:
    """Return the output of a fresh interpreter."""
    import os

    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_cuda_python_is_not_needed() -> None:
    assert (
        run(
            "import sys; sys.modules['cuda'] = None; sys.modules['cuda.bindings'] = None\n"
            "import torch, cgraph\n"
            "with cgraph.sim.use():\n"
            "    graph, x = cgraph.CUDAGraph(keep_graph=True), torch.ones(3)\n"
            "    with cgraph.graph(graph): y = x + 1\n"
            "    print(graph.raw_cuda_graph() > 0)\n"
        )
        == "True"
    )


def test_a_torch_without_cuda_can_import_cgraph_and_use_only_the_simulator() -> None:
    assert (
        run(
            "import torch, torch._C\n"
            "del torch._C._CudaStreamBase\n"
            "import cgraph\n"
            "try: cgraph.CUDAGraph().capture_begin()\n"
            "except cgraph.errors.NoDriverError as error: print('without CUDA' in str(error))\n",
            CGRAPH_DRIVER="cuda",
        )
        == "True"
    )


def test_the_import_is_light_beside_torchs() -> None:
    # Not a timing: imports are slow because of the modules that they bring in.
    brought = run(
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import cgraph\n"
        "print(*sorted(set(sys.modules) - before))\n"
    ).split()
    ours = [name for name in brought if name.startswith("cgraph")]
    assert len(brought) - len(ours) <= 3, brought


def test_exit_makes_no_driver_call_and_no_noise() -> None:
    assert (
        run(
            "import torch, cgraph\n"
            "context = cgraph.sim.use()\n"
            "simulator = context.__enter__()\n"
            "graph, x = cgraph.CUDAGraph(), torch.ones(3)\n"
            "with cgraph.graph(graph): y = x + 1\n"
            "graph.replay()\n"
        )
        == ""
    )


@pytest.mark.gpu
def test_the_import_and_the_question_start_no_context() -> None:
    assert (
        run(
            "import torch, cgraph\n"
            "from cuda.bindings import driver\n"
            "asked = cgraph.is_current_stream_capturing()\n"
            "driver.cuInit(0)\n"
            "_, flags, active = driver.cuDevicePrimaryCtxGetState(driver.cuDeviceGet(0)[1])\n"
            "print(asked, torch.cuda.is_initialized(), active)\n",
            CGRAPH_DRIVER="cuda",
        )
        == "False False 0"
    )


@pytest.mark.gpu
def test_exit_with_live_graphs_on_cuda_makes_no_noise() -> None:
    assert (
        run(
            "import torch, cgraph\n"
            "graph, x = cgraph.CUDAGraph(keep_graph=True), torch.ones(3, device='cuda')\n"
            "with cgraph.graph(graph): y = torch.rand(3, device='cuda') + x\n"
            "graph.replay()\n",
            CGRAPH_DRIVER="cuda",
        )
        == ""
    )


def test_a_free_threaded_python_is_refused() -> None:
    assert (
        run(
            "import sysconfig\n"
            "sysconfig.get_config_var = {'Py_GIL_DISABLED': 1}.get\n"
            "try: import cgraph\n"
            "except ImportError as error: print(error)\n"
        )
        == "cgraph needs a Python with the GIL: use python3 instead of the free-threaded python3t"
    )


def test_every_public_name_is_found_by_completion() -> None:
    assert set(cgraph.__all__) <= set(dir(cgraph))
    assert {"graphed", "explain", "GraphLadder", "piecewise", "trees"} <= set(dir(cgraph))
    for name in cgraph.__all__:
        assert getattr(cgraph, name) is not None


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_representations_say_the_state_not_the_address(lab: Lab) -> None:
    x = fresh(lab, 4)
    graph, ladder = cgraph.CUDAGraph(), cgraph.GraphLadder()
    table = Dispatcher([2, 4])
    fast, backend = cgraph.graphed(double), PiecewiseBackend(capture_sizes=[2])
    pool = cgraph.MemPool()
    empty = [repr(one) for one in (graph, ladder, table, fast, backend, pool)]
    assert empty[:2] == [
        "<cgraph.CUDAGraph: nothing captured>",
        "<cgraph.GraphLadder: 0 graphs ()>",
    ]
    with cgraph.graph(graph):
        _ = x * 2
    ladder.capture(4, lambda x: x * 2, x)
    segmented, _ = cgraph.SegmentedGraph.capture(lambda: x * 2)
    table.add(RuntimeMode.PIECEWISE, 2)
    table.freeze()
    for _ in range(2):
        fast(x)
    found = [repr(one) for one in (graph, ladder, segmented, table, fast)]
    assert "1 node from " in found[0] and "test_import.py" in found[0]
    assert found[1:] == [
        "<cgraph.GraphLadder: 1 graph (4)>",
        "<cgraph.SegmentedGraph: 1 segment, 0 breaks>",
        "<cgraph.Dispatcher: sizes [2, 4], keys: 1 PIECEWISE, frozen>",
        "<graphed double: 1 graph>",
    ]
    assert not any("0x" in one for one in [*empty, *found])
