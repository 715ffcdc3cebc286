"""The drivers that tests run on, and the rule that every test leaves nothing behind."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import cgraph
from cgraph import _torch
from lab import CudaLab, Lab, SimLab

REQUIRED = os.environ.get("CGRAPH_REQUIRE_CUDA") == "1"
HAS_GPU = torch.cuda.is_available()
not_run: list[str] = []


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the GPU tests where there is no GPU, unless one is required."""
    if HAS_GPU or REQUIRED:
        return
    of_gpu = [item for item in items if item.get_closest_marker("gpu") or "[cuda" in item.name]
    not_run.extend(item.nodeid for item in of_gpu)
    items[:] = [item for item in items if item not in of_gpu]
    config.hook.pytest_deselected(items=of_gpu)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Report to the process that started this one, if there is one."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["not_run"] = not_run


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Receive the report; each process has collected all tests."""
    not_run[:] = getattr(node, "workeroutput", {}).get("not_run", not_run)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report tests that did not run: green never means skipped."""
    if not_run:
        terminalreporter.write_line(
            f"{len(not_run)} GPU tests did not run: there is no GPU here"
            " (CGRAPH_REQUIRE_CUDA=1 makes that a failure)"
        )


@pytest.fixture(params=["sim", "cuda"])
def lab(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    """Yield a driver with CPU or CUDA tensors; check afterwards that nothing is alive."""
    if request.param == "cuda":
        assert HAS_GPU, "CGRAPH_REQUIRE_CUDA=1 and torch finds no GPU"
        monkeypatch.setenv("CGRAPH_DRIVER", "cuda")
        yield CudaLab()
        gc.collect()
        torch.cuda.synchronize()
        assert not torch.cuda.is_current_stream_capturing()
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        return
    with cgraph.sim.use(seed=7) as simulator:
        yield SimLab(simulator)
    gc.collect()
    simulator.synchronize()
    simulator.device.collect()
    gc.collect()
    assert not any(simulator.live().values()), simulator.live()


@pytest.fixture
def sim() -> Iterator[SimLab]:
    """Yield the simulator alone."""
    with cgraph.sim.use(seed=7) as simulator:
        yield SimLab(simulator)


@pytest.fixture(autouse=True)
def _own_garbage() -> Iterator[None]:
    """Limit collections to the test's own objects: all of torch's modules take 0.15 s."""
    gc.freeze()
    yield
    gc.collect()
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Draw another seed each time; a failure's report shows it under "Captured stdout setup"."""
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"torch.manual_seed({seed})")
    torch.manual_seed(seed)


@pytest.fixture(params=["by_torch", "by_python"])
def modes_told(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Return both ways in which a call asks torch for its modes."""
    if request.param == "by_python":
        monkeypatch.setattr(_torch, "mode_addresses", dict)
    else:
        assert {"is_included", "is_function_mode"} <= _torch.mode_addresses().keys()
        assert len(_torch.interception_keys()) == 4
