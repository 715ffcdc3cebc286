"""What the times of a report leave alone on a GPU, where replays are no operators."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import cgraph
from lab import CudaLab, fresh
from networks import leaf, network

pytestmark = pytest.mark.gpu
lab = CudaLab()


@pytest.mark.parametrize("grad", [False, True])
def test_what_only_the_capture_writes_is_written_by_no_replay_for_its_time(grad: bool) -> None:
    late = fresh(lab, 3)
    before = late.clone()
    net = network(lab)

    def function(x: Tensor) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            with torch.no_grad():
                late.add_(1)
        return net(x)

    graphed = cgraph.graphed(function)
    x = leaf(lab, 4, 6) if grad else fresh(lab, 4, 6)
    with torch.set_grad_enabled(grad):
        graphed.capture(x)
        assert torch.equal(late, before)
        (key,) = graphed.report().keys
        assert (key.state, key.graph_seconds, key.eager_seconds) == ("captured", None, None)
        assert torch.equal(graphed(x), net(x))
    assert torch.equal(late, before + 1)
