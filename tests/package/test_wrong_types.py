"""A value of a wrong type is refused by the name of the argument, before anything is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import cgraph
from cgraph.errors import ArgumentError
from cgraph.piecewise import mark_size, split_graph

CALLS: dict[str, tuple[Callable[[Any], object], str]] = {
    "graph_data": (cgraph.graph_data, "graph is 1, expected a cgraph.CUDAGraph"),
    "MemPool.of": (cgraph.MemPool.of, "source is 1, expected a CUDAGraph"),
    "mark_size": (mark_size, "tensor is 1, expected a tensor"),
    "split_graph": (lambda one: split_graph(one, []), "graph is 1, expected a torch.fx.Graph"),
    "as_dict": (cgraph.labels.as_dict, "label is 1, expected a label"),
    "view": (cgraph.view, "what is 1, expected a CUDAGraph"),
    "dry_run": (cgraph.dry_run, "function is 1, expected something that can be called"),
    "cudagraphify": (lambda one: cgraph.trees.cudagraphify(one, []), "model is 1, expected a func"),
    "inputs": (lambda one: cgraph.trees.cudagraphify(list, one), "inputs is 1, expected the inp"),
    "cudagraphs": (lambda one: cgraph.aot.cudagraphs(one, []), "model is 1, expected a torch.fx"),
    "apply": (cgraph.aot.apply_cuda_graphs, "gm is 1, expected a torch.fx.GraphModule"),
    "partition": (lambda one: cgraph.aot.partition_cudagraphs(one, []), "gm is 1, expected a torc"),
    "mutations": (cgraph.aot.find_input_mutations, "g is 1, expected a torch.fx.Graph"),
    "module": (lambda one: cgraph.aot.CudaGraphModule(one, set()), "gm is 1, expected a module"),
    "written": (lambda one: cgraph.aot.CudaGraphModule(torch.sin, one), "mutated_inputs is 1, exp"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_value_of_a_wrong_type_is_refused_by_the_name_of_its_argument(name: str) -> None:
    call, message = CALLS[name]
    with cgraph.sim.use(), pytest.raises(ArgumentError, match=message):
        call(1)


@pytest.mark.parametrize("kind", ["list", "dict"])
def test_an_argument_that_contains_itself_is_refused_by_its_name(kind: str) -> None:
    chain: Any = [torch.ones(2)] if kind == "list" else {"a": torch.ones(2)}
    chain.append(chain) if kind == "list" else chain.update(b=chain)
    fast = cgraph.graphed(lambda x, chain: x * 2)
    with cgraph.sim.use():
        for _ in range(3):
            with pytest.raises(ArgumentError, match=f"chain is a {kind} that contains itself"):
                fast(torch.ones(2), chain)
        assert torch.equal(fast(torch.ones(2), [1.0]), torch.full((2,), 2.0))
