"""Each test of graph trees begins without graphs, marks of steps, and warnings given before."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

import cgraph
from lab import Lab


@pytest.fixture(autouse=True)
def _own_trees(lab: Lab) -> Iterator[None]:
    # Compiled functions of the test before may be garbage, which reports would list.
    gc.collect()
    cgraph.trees.reset()
    yield
    cgraph.trees.reset()
