"""Each test of graph trees begins without graphs, marks of steps, and warnings given before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import cgraph
from lab import Lab


@pytest.fixture(autouse=True)
def _own_trees(lab: Lab) -> Iterator[None]:
    cgraph.trees.reset()
    yield
    cgraph.trees.reset()
