"""``examples/serve.py``: every way serves the tokens of the eager way."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from lab import Lab, SimLab

EXAMPLE = Path(__file__).parents[2] / "examples" / "serve.py"


@pytest.fixture(scope="module")
def example() -> Any:
    """Return the example as a module; its operator is defined once in a process."""
    spec = importlib.util.spec_from_file_location("serve", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# That of torch's own trees.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_each_way_serves_the_tokens_of_the_eager_way(
    lab: Lab, example: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CGRAPH_DISABLE_COMPILE_CACHE", "1")
    for name, value in {"layers": 2, "width": 64, "heads": 2, "slots": 3, "tokens": 7}.items():
        monkeypatch.setattr(example.config, name, value)
    # The fourth needs a compiler of C++ on a machine without a GPU.
    ways = ("eager", "full", "pieces", "reduce-overhead")[: 3 if isinstance(lab, SimLab) else 4]
    torch.compiler.reset()
    example.main(lab.device, 5, ways)
    head, *rows = capsys.readouterr().out.splitlines()
    assert "tokens/s" in head
    assert [row.split()[0] for row in rows] == list(ways)
    assert all(float(row.split()[-1].rstrip("%")) > 90 for row in rows), rows
    torch.compiler.reset()
