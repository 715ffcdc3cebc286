"""Calls of graphed functions with tensors that are more than elements in memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import cgraph
from graphed_calls import states
from lab import Lab, fresh


def plain(tensor: Tensor) -> list[Tensor]:
    """The rows, as dense tensors of floating point numbers."""
    values = tensor.dequantize() if tensor.is_quantized else tensor
    rows = values.unbind() if values.is_nested else values.to_dense().unbind()
    return list(rows)


@pytest.mark.filterwarnings("ignore:.*(prototype|beta state)")
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


def test_transforms_of_torch_func_see_the_operators(lab: Lab) -> None:
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
