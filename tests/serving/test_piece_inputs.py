"""Inputs of models in pieces: copied or in place, moved, empty, written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from cgraph.errors import EagerWarning
from cgraph.piecewise import PiecewiseBackend, mark_size
from lab import Lab, fresh
from served import Decoder, Served

pytestmark = pytest.mark.usefixtures("own_compiler")


def test_inputs_are_copied_to_memory_that_stays(lab: Lab) -> None:
    """Inputs with gaps keep their strides; sizes share the memory of the largest."""
    served = Served(lab, Decoder(), capture_sizes=[8, 4])
    for size in (8, 4):
        for _ in range(4):
            x = fresh(lab, size, 32)[:, 3:19]
            mark_size(x)
            assert torch.allclose(served.fast(x), served.eager(x), atol=1e-5)
    assert served.backend.counters.captures == 2


def test_without_copies_an_input_that_has_moved_is_refused(lab: Lab) -> None:
    served = Served(lab, Decoder(), capture_sizes=[4], copy_inputs=False)
    x = served.rows(4)
    for _ in range(4):
        x.normal_()
        assert torch.allclose(served.fast(x), served.eager(x), atol=1e-5)
    assert served.backend.counters.replays == 1
    with pytest.raises(cgraph.errors.ArgumentError, match="Input addresses for cudagraphs are"):
        served.fast(served.rows(4))


@pytest.mark.parametrize("fields", [{}, {"copy_inputs": False}])
def test_a_weight_with_other_memory_than_at_the_capture_is_right_and_told(
    lab: Lab, fields: dict[str, Any]
) -> None:
    served = Served(lab, Decoder(), capture_sizes=[4], **fields)
    x = served.rows(4)
    for _ in range(4):
        x.normal_()
        assert torch.allclose(served.fast(x), served.eager(x), atol=1e-5)
    replays = served.backend.counters.replays
    name, weight = next(iter(served.model.named_parameters()))
    weight.data = torch.randn_like(weight)
    served.eager.get_parameter(name).data.copy_(weight)
    with pytest.warns(EagerWarning, match=f"{name.split('.')[0]}.*has other memory"):
        for _ in range(2):
            x.normal_()
            assert torch.allclose(served.fast(x), served.eager(x), atol=1e-5)
    served.backend.clear()
    for _ in range(4):
        x.normal_()
        assert torch.allclose(served.fast(x), served.eager(x), atol=1e-5)
    assert served.backend.counters.replays > replays


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_a_batch_without_rows_is_as_in_eager(lab: Lab, compiler: str) -> None:
    served = Served(lab, Decoder(), capture_sizes=[2, 4], compiler=compiler, cache=False)
    for size in (4, 3, 0, 2, 0):
        served.check(size)


class Writes(nn.Module):
    """A model that writes its input."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.ops.served.routed(x)
        x.add_(1)
        return y + x


@pytest.mark.parametrize("outputs", ["fresh", "static"])
def test_a_model_that_writes_a_copied_input_runs_without_a_graph(lab: Lab, outputs: str) -> None:
    served = Served(
        lab, Writes(), splitting_ops=["served::routed"], capture_sizes=[4], outputs=outputs
    )
    with pytest.warns(EagerWarning, match=r"writes its input L_x_.*copy_inputs=False"):
        for _ in range(6):
            x = served.rows(4)
            given = x.clone()
            got, want = served.fast(x), served.eager(given)
            assert torch.allclose(got, want)
            assert torch.equal(x, given)
    assert served.backend.counters.replays == 0
    assert "writes its input" in str(served.backend.report())


def test_a_tensor_that_is_exchanged_makes_calls_run_without_a_graph(lab: Lab) -> None:
    served = Served(lab, Decoder(), capture_sizes=[4])
    for _ in range(4):
        served.check(4)
    for model in (served.model, served.eager):
        weight = torch.full_like(model.layers[0].weight, 0.5)
        model.layers[0].weight = nn.Parameter(weight)
    replays = served.backend.counters.replays
    with pytest.warns(EagerWarning, match="weight_ is another tensor than at the capture"):
        for _ in range(3):
            served.check(4)
    assert served.backend.counters.replays == replays
    served.backend.clear()
    for _ in range(3):
        served.check(4)
    assert served.backend.counters.replays == replays + 1


def test_an_expanded_input_makes_calls_run_without_a_graph(lab: Lab) -> None:
    def model(x: Tensor) -> Tensor:
        return torch.ops.served.routed(x * 2) + 1

    backend = PiecewiseBackend(
        splitting_ops=["served::routed"], capture_sizes=[4], compiler="eager"
    )
    fast = torch.compile(model, backend=backend)
    with pytest.warns(EagerWarning, match=r"its input L_x_ is expanded.*contiguous\(\)"):
        for _ in range(5):
            x = fresh(lab, 4).expand(3, 4)
            mark_size(x, -1)
            assert torch.allclose(fast(x), model(x))
    assert backend.counters.replays == 0
    with pytest.raises(cgraph.errors.ArgumentError, match=r"dim is 2, expected a dimension of"):
        mark_size(x, 2)


def test_an_input_on_another_kind_of_device_makes_calls_run_without_a_graph(lab: Lab) -> None:
    def model(x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.served.routed(x * 2) + 1, other + 1

    backend = PiecewiseBackend(
        splitting_ops=["served::routed"], capture_sizes=[4], compiler="eager"
    )
    fast, other = torch.compile(model, backend=backend), torch.ones(3, device="meta")
    with pytest.warns(EagerWarning, match="its input L_other_ is on meta.*or as a number"):
        for _ in range(5):
            x = mark_size(fresh(lab, 4))
            assert torch.allclose(fast(x, other)[0], model(x, other)[0])
    assert backend.counters.replays == 0


# Inductor's own, about its modules.
