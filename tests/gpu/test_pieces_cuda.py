"""Models in pieces that Inductor compiles, on a GPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch

from cgraph.piecewise import PiecewiseBackend, mark_size
from served import OPS, Decoder

pytestmark = [
    pytest.mark.gpu,
    # Warnings of the compiler.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(autouse=True)
def _own_compiler() -> Iterator[None]:
    torch.compiler.reset()
    with torch.no_grad():
        yield
    torch.compiler.reset()


@pytest.mark.timeout(300)
def test_compiled_pieces_are_as_in_eager_for_each_size() -> None:
    model = Decoder().cuda().eval()
    eager = copy.deepcopy(model)
    backend = PiecewiseBackend(
        splitting_ops=OPS,
        capture_sizes=[1, 2, 4, 8],
        compile_sizes=[4, 16],
        inductor_options={"max_autotune": False},
    )
    fast = torch.compile(model, backend=backend, fullgraph=True)

    def call(size: int) -> None:
        x = torch.randn(size, 16, device="cuda")
        mark_size(x)
        torch.testing.assert_close(fast(x), eager(x), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(model.cache, eager.cache, rtol=1e-4, atol=1e-4)

    backend.warm_up(call, progress=False, freeze=True)
    for _ in range(3):
        for size in (1, 2, 3, 4, 8, 11, 16):
            call(size)
    report = backend.report()
    print(report)
    assert report.counters.captures == 4
    assert report.counters.replays == 12
    # Four pieces, two of which compute the same, for any size and for two.
    assert report.counters.inductor_compilations == 9
    largest = report.sizes[-2]
    assert largest.reserved >= sum(one.reserved for one in report.sizes) - largest.reserved
