"""`Dispatcher` and `PiecewiseConfig`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cgraph.errors import ArgumentError, StateError
from cgraph.piecewise import BatchKey, Dispatcher, PiecewiseConfig, RuntimeMode

NONE, PIECEWISE, FULL = RuntimeMode


def test_sizes_to_capture_stay_and_others_are_padded_to_the_next() -> None:
    table = Dispatcher([8, 1, 2, 4])
    sizes = [table.padded(one) for one in range(10)]
    assert sizes == [0, 1, 2, 4, 4, 8, 8, 8, 8, None]


def test_a_size_to_compile_that_padding_changes_is_refused() -> None:
    Dispatcher([1, 2, 4], [2, 16])
    with pytest.raises(ArgumentError, match="compile_sizes has 3, which batches are padded from"):
        Dispatcher([1, 2, 4], [3])


def test_whole_graphs_need_equal_fields_and_pieces_do_not() -> None:
    table = Dispatcher([1, 2, 4])
    for size in (1, 2, 4):
        table.add(PIECEWISE, size)
        table.add(FULL, size, ("decode", size))
    table.add(FULL, 4, ("mixed", 2))
    table.freeze()
    assert table.dispatch(4, ("decode", 4)) == (FULL, BatchKey(4, ("decode", 4)))
    assert table.dispatch(3, ("mixed", 2)) == (FULL, BatchKey(4, ("mixed", 2)))
    assert table.dispatch(3, ("decode", 3)) == (PIECEWISE, BatchKey(4))
    assert table.dispatch(5, ("decode", 5)) == (NONE, BatchKey(5, ("decode", 5)))
    assert table.dispatch(0)[0] is NONE


def test_the_callers_modes_stay_as_they_are() -> None:
    table = Dispatcher([4])
    table.add(PIECEWISE, 4)
    table.add(FULL, 4)
    allowed = {PIECEWISE, NONE}
    assert table.dispatch(4, allowed=allowed)[0] is PIECEWISE
    assert allowed == {PIECEWISE, NONE}
    assert table.dispatch(4, allowed=())[0] is NONE
    assert table.dispatch(4)[0] is FULL


def test_a_frozen_table_takes_no_key_and_wrong_ones_are_named() -> None:
    table = Dispatcher([2, 4])
    with pytest.raises(ArgumentError, match="size is 3, expected one that is captured: 2, 4"):
        table.add(FULL, 3)
    with pytest.raises(ArgumentError, match="mode is"):
        table.add(NONE, 4)
    for sizes in ([0], [-1, 2], ["4"]):
        with pytest.raises((ArgumentError, TypeError), match=r"sizes has|not supported"):
            Dispatcher(sizes)  # type: ignore[arg-type]
    table.freeze()
    with pytest.raises(StateError, match=r"after freeze\(\)"):
        table.add(FULL, 4)


def test_configurations_are_compared_by_value_and_kept_as_names() -> None:
    one = PiecewiseConfig(
        splitting_ops=[torch.ops.aten.sin, "mine::attention"],  # type: ignore[arg-type]
        capture_sizes=[4, 2, 4],  # type: ignore[arg-type]
        inductor_options={"max_autotune": True},  # type: ignore[arg-type]
    )
    other = PiecewiseConfig.of(
        {
            "splitting_ops": (torch.ops.aten.sin, "mine.attention"),
            "capture_sizes": {2, 4},
            "inductor_options": (("max_autotune", True),),
        }
    )
    assert one == other
    assert hash(one) == hash(other)
    assert one.capture_sizes == (2, 4)
    assert one != PiecewiseConfig()


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"capture_size": [1]}, "'capture_size': capture_sizes is the nearest"),
        ({"capture_sizes": [0]}, "capture_sizes has 0"),
        ({"capture_sizes": 8}, "capture_sizes is 8"),
        ({"compile_sizes": [-2]}, "compile_sizes has -2"),
        ({"splitting_ops": "aten::sin"}, "expected several operators"),
        ({"splitting_ops": [3]}, "a splitting operator is 3"),
        ({"warmups": -1}, "warmups is -1"),
        ({"compiler": "inductr"}, "'inductr', expected .*: 'inductor' is the nearest"),
        ({"outputs": "statics"}, "'static' is the nearest"),
        ({"copy_inputs": 1}, "copy_inputs is 1, expected True or False"),
        ({"compiler": "eager", "compile_sizes": [4]}, r"compile_sizes is \(4,\), and compiler is"),
        ({"inductor_options": {"a": []}}, "inductor_options is .*can be hashed"),
    ],
)
def test_wrong_fields_are_named_with_the_nearest(fields: dict[str, Any], error: str) -> None:
    with pytest.raises(ArgumentError, match=error):
        PiecewiseConfig.of(fields)
