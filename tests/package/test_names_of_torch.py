"""The names and signatures of torch 2.15's ``torch.cuda.graphs``: they are all here."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import cgraph

EMPTY = inspect.Parameter.empty

# Parameters in order, with their defaults; a name after "*" can only be given by keyword.
FUNCTIONS: dict[str, dict[str, Any]] = {
    "is_current_stream_capturing": {},
    "graph_pool_handle": {},
    "register_graph_capture_start_hook": {"fn": EMPTY},
    "register_graph_capture_end_hook": {"fn": EMPTY},
    "register_graph_instantiate_hook": {"fn": EMPTY},
    "register_graph_replay_start_hook": {"fn": EMPTY},
    "register_graph_replay_end_hook": {"fn": EMPTY},
    "register_graph_destroy_hook": {"fn": EMPTY},
    "export_dot": {"path": EMPTY, "*verbose": True},
    "export_graph_data": {"path": EMPTY},
    "make_graphed_callables": {
        "callables": EMPTY,
        "sample_args": EMPTY,
        "num_warmup_iters": 3,
        "allow_unused_input": False,
        "pool": None,
        "capture_error_mode": "global",
        "enable_annotations": False,
    },
    "graph": {
        "cuda_graph": EMPTY,
        "pool": None,
        "stream": None,
        "capture_error_mode": "global",
        "enable_annotations": False,
        "annotation_config": None,
        "check_input_liveness": False,
    },
    "CUDAGraph": {"keep_graph": False},
}

METHODS: dict[str, dict[str, Any]] = {
    "register_capture_start_hook": {"hook": EMPTY},
    "register_capture_end_hook": {"hook": EMPTY},
    "register_post_instantiate_hook": {"hook": EMPTY},
    "register_replay_start_hook": {"hook": EMPTY},
    "register_replay_end_hook": {"hook": EMPTY},
    "register_destroy_callback": {"cb": EMPTY, "*synchronize_before_release": False},
    "retain_object": {"obj": EMPTY, "*synchronize_before_release": False},
    "capture_begin": {
        "pool": None,
        "capture_error_mode": "global",
        "check_input_liveness": False,
    },
    "capture_end_pre": {},
    "capture_end_post": {},
    "capture_end": {},
    "instantiate": {},
    "reset": {},
    "pool": {},
    "pools": {},
    "enable_debug_mode": {},
    "debug_dump": {"debug_path": EMPTY, "*verbose": True},
    "raw_cuda_graph": {},
    "raw_cuda_graph_exec": {},
    "get_graph_data": {},
    "register_generator_state": {"generator": EMPTY},
}


def parameters(function: Any) -> dict[str, Any]:
    found = inspect.signature(function).parameters.values()
    return {
        ("*" if one.kind is one.KEYWORD_ONLY else "") + one.name: one.default
        for one in found
        if one.name != "self" and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    }


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_name_of_torch_is_there_with_its_signature(name: str) -> None:
    found = parameters(getattr(cgraph, name))
    expected = FUNCTIONS[name]
    # Our own parameters come last, and only by keyword.
    assert list(found)[: len(expected)] == list(expected)
    assert {key: found[key] for key in expected} == expected
    assert all(key.startswith("*") for key in list(found)[len(expected) :])
    assert name in cgraph.__all__


@pytest.mark.parametrize("name", METHODS)
def test_a_method_of_torchs_graph_is_there_with_its_signature(name: str) -> None:
    assert parameters(getattr(cgraph.CUDAGraph, name)) == METHODS[name]


def test_replay_takes_no_argument() -> None:
    with pytest.raises(TypeError):
        cgraph.CUDAGraph().replay(1)  # type: ignore[call-arg]
