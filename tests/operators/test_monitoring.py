"""New code is reported on the thread that asks, also if others ask at the same time."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch

from cgraph._operators.codes import Codes
from cgraph._python.named_objects import named_by
from lab import Lab

newer = pytest.mark.skipif(sys.version_info < (3, 12), reason="has no sys.monitoring")
STATE = {"ready": False}


def seeded(generator: torch.Generator) -> torch.Generator:
    return generator.manual_seed(3)


def helper() -> bool:
    return STATE["ready"]


def noted() -> Codes:
    codes = Codes()
    with codes.noted():
        seeded(torch.Generator())
    return codes


@pytest.mark.parametrize("where", ["nested", "thread"])
def test_a_block_that_ends_leaves_others_their_calls(where: str) -> None:
    outer = Codes()
    with outer.noted():
        seeded(torch.Generator())
        outer.seeds = None
        if where == "nested":
            inner = noted()
        else:
            found: list[Codes] = []
            thread = threading.Thread(target=lambda: found.append(noted()))
            thread.start()
            thread.join()
            inner = found[0]
        seeded(torch.Generator())
    assert inner.seeds is not None and outer.seeds is not None
    assert seeded.__code__ in inner.globals and seeded.__code__ in outer.globals


@newer
def test_code_is_noted_where_others_use_all_tools(lab: Lab) -> None:
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
    with contextlib.ExitStack() as stack:
        for tool in (3, 4):
            monitoring.use_tool_id(tool, "another")
            stack.callback(monitoring.free_tool_id, tool)
        assert seeded.__code__ in noted().globals


def test_names_of_what_a_function_calls_inside_of_a_comprehension_count() -> None:
    found = named_by(lambda: [helper() for _ in range(2)], callees=True)
    assert any(one.name == "STATE['ready']" for one in found.found)


def test_another_module_in_the_place_of_triton_harms_nothing() -> None:
    code = "import sys, types; sys.modules['triton'] = types.ModuleType('triton'); import cgraph"
    subprocess.run([sys.executable, "-c", f"{code}; cgraph.graphed"], check=True)
