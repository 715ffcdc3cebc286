"""A compiler of its own for each test of models in pieces that asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lab import Lab


@pytest.fixture
def own_compiler(lab: Lab) -> Iterator[None]:
    """Let a test compile anew, without gradients."""
    torch.compiler.reset()
    with torch.no_grad():
        yield
    torch.compiler.reset()
