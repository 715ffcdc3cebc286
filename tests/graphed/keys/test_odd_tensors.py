"""Calls of graphed functions with tensors that are more than elements in memory."""

from __future__ import annotations

import subprocess
import sys

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
