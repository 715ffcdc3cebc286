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


def test_a_part_of_the_open_size_that_is_broadcast_is_named_with_its_line() -> None:
    backend = PiecewiseBackend(capture_sizes=[4], cache=False)
    fast = torch.compile(lambda x: torch.tanh(x) - torch.tanh(x)[:1], backend=backend)
    with pytest.raises(RuntimeError, match=r"test_pieces_cuda.py:\d+.*narrow\(0, 0, 1\)"):
        for _ in range(2):
            fast(mark_size(torch.randn(8, 16, device="cuda")))


def test_what_inductor_cannot_compile_is_named_with_its_line_and_a_way_out() -> None:
    linear = torch.nn.Linear(16, 16).cuda()

    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = linear(x)
        return y, y[:1]

    fast = torch.compile(model, backend=PiecewiseBackend(capture_sizes=[4], cache=False))
    x = mark_size(torch.randn(8, 16, device="cuda"))
    try:
        torch.testing.assert_close(fast(x), model(x), rtol=1e-2, atol=1e-2)
    except RuntimeError as error:
        # torch 2.11 fails at the size of the part, others may not.
        assert "compiler='eager'" in str(error)
        assert "test_pieces_cuda.py" in str(error)
