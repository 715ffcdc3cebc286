"""A torch that lacks a private name, or has a version that cgraph has not seen."""

from __future__ import annotations

import subprocess
import sys

import pytest

REPLAYS = """
import warnings; warnings.simplefilter("error")
try:
    import cgraph
    with cgraph.sim.use():
        x = torch.ones(3)
        function = cgraph.graphed(lambda x: x * 2 + 1)
        for _ in range(3):
            assert torch.equal(function(x), x * 2 + 1)
        print(function.report().keys[0].state)
except Exception as error:
    print(type(error).__name__, error)
"""
SOME_WAY_WITHOUT = [
    "torch._foreach_copy_",
    "torch._foreach_zero_",
    "torch._lazy_clone",
    "torch._C._is_cow_tensor",
    "torch._C._dispatch_key_parse",
    "torch._C._demangle",
    "torch.Tensor.__dlpack_c_exchange_api__",
]
NO_WAY_WITHOUT = [
    "torch._C._current_graph_task_id",
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
]


def ran(changes: str) -> str:
    program = f"import torch, torch.utils._python_dispatch\n{changes}\n{REPLAYS}"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def test_without_names_that_only_make_it_faster_everything_works() -> None:
    parts = [name.rpartition(".") for name in SOME_WAY_WITHOUT]
    deleted = [f"if hasattr({of}, {name!r}): del {of}.{name}" for of, _, name in parts]
    assert ran("\n".join(deleted)) == "captured"


@pytest.mark.parametrize("name", NO_WAY_WITHOUT)
def test_a_name_that_nothing_replaces_is_named_at_its_first_use(name: str) -> None:
    found = ran(f"del {name}")
    assert found.startswith("TorchError torch 2.")
    assert f"has no {name}, which cgraph needs" in found
    assert "2.8 to 2.15" in found


def test_a_class_that_nothing_replaces_is_named_at_import() -> None:
    found = ran("del torch.utils._python_dispatch.TorchDispatchMode")
    assert found.startswith("TorchError torch 2.") and "Fix: use a torch that" in found
    assert "TorchDispatchMode" in found


@pytest.mark.parametrize("version", ["2.11rc1", "2.11.0a0+git1234567", "unknown", "3.0"])
def test_any_version_of_torch_is_read(version: str) -> None:
    assert ran(f"torch.__version__ = type(torch.__version__)({version!r})") == "captured"
