"""Calls of graphed functions with tensors that are more than elements in memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.testing import assert_close

import cgraph
from cgraph import _torch
from cgraph.errors import CaptureError
from graphed_calls import states
from lab import Lab, fresh


def plain(tensor: Tensor) -> list[Tensor]:
    """The rows, as dense tensors of floating point numbers."""
    values = tensor.dequantize() if tensor.is_quantized else tensor
    rows = values.unbind() if values.is_nested else values.to_dense().unbind()
    return list(rows)


@pytest.mark.filterwarnings("ignore:.*(prototype|beta state|quantized tensor creation)")
@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda x: (x > 0).float().to_sparse(), "sparse_coo"),
        (lambda x: x.to_sparse_csr(), "sparse_csr"),
        (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), "quantized"),
        (lambda x: torch.nested.nested_tensor([x[:1], x]), "nested"),
    ],
)
def test_tensors_that_are_more_than_elements_run_eagerly_beside_dense_ones(
    lab: Lab, make: Callable[[Tensor], Tensor], word: str
) -> None:
    function = cgraph.graphed(lambda x: x.clone())
    dense, odd = fresh(lab, 3, 3), make(fresh(lab, 3, 3))
    assert_close(function(dense), dense)
    with pytest.warns(UserWarning, match=f"x is {word}.* pass the tensors") as caught:
        for _ in range(2):
            found = function(odd)
            assert (found.layout, found.is_nested) == (odd.layout, odd.is_nested)
            found, expected = (
                one.dequantize() if one.is_quantized else one for one in (found, odd)
            )
            for one, other in zip(found.unbind(), expected.unbind(), strict=True):
                assert_close(one.to_dense(), other.to_dense())
    assert len(caught) == 1
    assert states(function) == ["captured", "eager"]
    other = fresh(lab, 3, 3)
    assert_close(function(other), other)


def test_transforms_of_torch_func_see_the_operators(lab: Lab, modes_told: None) -> None:
    @cgraph.graphed
    def cubed(x: Tensor) -> Tensor:
        return x * x * x

    for _ in range(2):
        x = fresh(lab, 4, 3)
        assert_close(cubed(x), x * x * x)
        assert_close(torch.vmap(cubed)(x), x * x * x)
        assert_close(torch.func.grad(lambda x: cubed(x).sum())(x), 3 * x * x)
        slopes = torch.vmap(torch.func.grad(lambda x: cubed(x).sum()))(x)
        assert_close(slopes, 3 * x * x)
    assert states(cubed) == ["captured"]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_forward_mode_differentiation_sees_the_operators(lab: Lab, modes_told: None) -> None:
    cubed = cgraph.graphed(lambda x: x * x * x)
    for _ in range(2):
        x, slope = fresh(lab, 4), fresh(lab, 4)
        assert_close(cubed(x), x * x * x)
        with forward_ad.dual_level():
            found = forward_ad.unpack_dual(cubed(forward_ad.make_dual(x, slope)))
            assert_close(found.tangent, 3 * x * x * slope)
    assert states(cubed) == ["captured"]


def test_no_capture_ahead_of_time_begins_inside_a_transform(lab: Lab) -> None:
    doubled = cgraph.graphed(lambda x: x * 2)

    def captured(x: Tensor) -> Tensor:
        doubled.capture(x)
        return x

    with pytest.raises(CaptureError, match=r"inside a transform of torch\.func"):
        torch.vmap(captured)(fresh(lab, 3, 2))
    with forward_ad.dual_level(), pytest.raises(CaptureError, match="forward-mode"):
        doubled.capture(fresh(lab, 2))
    x = fresh(lab, 2)
    assert_close(doubled.capture(x)(x), x * 2)


@pytest.mark.parametrize("sizes", [None, [2, 4]])
def test_captures_ahead_of_time_name_tensors_that_are_more_than_elements(
    lab: Lab, sizes: list[int] | None
) -> None:
    function = cgraph.graphed(lambda x: x.clone(), sizes=sizes)
    with pytest.raises(CaptureError, match="no memory of its own: x is sparse_coo"):
        function.capture(fresh(lab, 3, 3).to_sparse())
    assert states(function).count("captured") == 0


NESTED = """
import sys, torch, cgraph
from cgraph import _torch
from cgraph._torch import native
device, driver, way = sys.argv[1:]
if way == "functions":
    native.tensor_fields = dict
with cgraph.sim.use() if driver == "sim" else torch.no_grad():
    function = cgraph.graphed(lambda x: x.clone())
    dense = torch.randn(2, 3, 3, device=device)
    function(dense)
    nested = torch.nested.nested_tensor([dense[0], dense[1, :1]])
    for _ in range(5):
        assert function(nested).is_nested
        assert torch.equal(function(dense), dense)
reader = _torch.tensor_reader()
assert reader.uses_fields or not reader.uses_stable_functions
"""


@pytest.mark.parametrize(("way", "complaints"), [("fields", 0), ("functions", 1)])
def test_torch_complains_about_nested_tensors_at_most_once_and_where_fields_tell_them_never(
    lab: Lab, way: str, complaints: int
) -> None:
    driver = "sim" if lab.device == "cpu" else "cuda"
    command = [sys.executable, "-W", "ignore", "-c", NESTED, lab.device, driver, way]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    known = complaints if _torch.tensor_reader().uses_fields else 1
    assert done.stderr.count("Exception in aoti_torch") <= known
