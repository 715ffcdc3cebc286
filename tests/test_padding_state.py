"""Padding that would show in gradients and in state beside random numbers is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import cgraph
from graphed_calls import states
from lab import Lab, fresh


@pytest.mark.parametrize("first", [3, 4])
def test_padding_that_shows_in_a_gradient_is_refused(lab: Lab, first: int) -> None:
    w = torch.ones(2, requires_grad=True, device=lab.device)

    def step(x: Tensor) -> Tensor:
        w.grad = None
        y = x + w
        y.sum().backward()
        return y.detach()

    function = cgraph.graphed(step, sizes=[4])
    with pytest.warns(UserWarning, match=r"the gradient of a tensor \[2\] depends on"):
        for rows in (first, 3, 4, 3):
            function(fresh(lab, rows, 2))
            assert torch.equal(w.grad, torch.full_like(w, rows))  # type: ignore[arg-type]


def test_padding_that_a_loss_leaves_out_shows_in_no_gradient(lab: Lab) -> None:
    w = torch.ones(2, requires_grad=True, device=lab.device)

    def step(x: Tensor, mask: Tensor) -> Tensor:
        w.grad = None
        y = x * w * mask[:, None]
        y.sum().backward()
        return y.detach()

    def padded(tensor: Tensor, rows: int) -> Tensor:
        return torch.cat([tensor, tensor.new_zeros(rows - tensor.shape[0], *tensor.shape[1:])])

    function = cgraph.graphed(step, sizes=[4], pad=padded)
    for rows in (4, 3, 2, 3):
        x = fresh(lab, rows, 2)
        function(x, torch.ones(rows, device=lab.device))
        torch.testing.assert_close(w.grad, x.sum(0))
    assert states(function) == ["captured"]


@pytest.mark.parametrize("first", [3, 4])
def test_padding_that_shows_in_state_is_refused_beside_random_numbers(lab: Lab, first: int) -> None:
    # So many columns that no two calls drop the same ones.
    shift, total = torch.full((99,), 50.0, device=lab.device), torch.zeros(99, device=lab.device)
    drop = nn.Dropout(0.02)

    def run(x: Tensor) -> Tensor:
        y = drop(x) + shift
        total.copy_(y.sum(0))
        return y

    function = cgraph.graphed(run, sizes=[4])
    with pytest.warns(UserWarning, match="what the function writes is not as without padding"):
        for rows in (first, 3):
            y = function(fresh(lab, rows, 99))
            torch.testing.assert_close(total, y.sum(0))


def test_a_step_with_dropout_is_not_padded(lab: Lab) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.02)).to(lab.device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = net(x).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    function = cgraph.graphed(step, sizes=[4])
    function(fresh(lab, 4, 4))
    with pytest.warns(UserWarning, match="padding to 4 rows is not safe"):
        function(fresh(lab, 3, 4))
    assert float(net[0].bias.grad.abs().max()) <= 3 / 0.98 + 1e-4  # type: ignore[union-attr]


def test_rows_of_random_numbers_are_padded_and_written_to_a_cache(lab: Lab) -> None:
    cache = torch.zeros(8, 3, device=lab.device)

    def sample(x: Tensor) -> Tensor:
        cache[: x.shape[0]] = x
        return torch.softmax(x, -1).multinomial(1)

    function = cgraph.graphed(sample, sizes=[4])
    for rows in (4, 3, 2):
        x = fresh(lab, rows, 3)
        assert function(x).shape == (rows, 1)
        assert torch.equal(cache[:rows], x)
    assert states(function) == ["captured"]


@pytest.mark.parametrize("first", [3, 4])
def test_what_counts_rows_beside_random_numbers_is_not_padded(lab: Lab, first: int) -> None:
    w = torch.ones(2, requires_grad=True, device=lab.device)
    count, drop = torch.zeros(1, device=lab.device), nn.Dropout(0.5)

    def gradient(x: Tensor) -> Tensor:
        w.grad = None
        y = x + w
        y.sum().backward()
        return drop(y.detach())

    def counted(x: Tensor) -> Tensor:
        count.add_(x.shape[0])
        return drop(x)

    rows_of = [first, 3, 4, 2]
    with pytest.warns(UserWarning, match="the gradient of a tensor"):
        step = cgraph.graphed(gradient, sizes=[4])
        for rows in rows_of:
            step(fresh(lab, rows, 2))
            assert torch.equal(w.grad, torch.full_like(w, rows))  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="what the function writes"):
        function = cgraph.graphed(counted, sizes=[4])
        for rows in rows_of:
            function(fresh(lab, rows, 2))
    assert count.item() == sum(rows_of)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint16, torch.float8_e5m2])
def test_a_cache_of_random_rows_is_padded_whatever_came_out_alike(
    lab: Lab, dtype: torch.dtype
) -> None:
    cache, drop = torch.zeros(8, 64, device=lab.device).to(dtype), nn.Dropout(0.1)

    def run(x: Tensor) -> Tensor:
        y = drop(drop(x) + 1)
        cache[: x.shape[0]] = (y * 1000).to(dtype)
        return y

    function = cgraph.graphed(run, sizes=[8])
    for rows in (8, 5, 3):
        y = function(fresh(lab, rows, 64).abs())
        assert torch.equal(cache[:rows].float(), (y * 1000).to(dtype).float())
    assert states(function) == ["captured"]


def test_what_is_not_a_number_hides_no_leak_beside_random_numbers(lab: Lab) -> None:
    drop = nn.Dropout(0.5)

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        nothing = x.sum() * 0
        return drop(x), torch.stack([nothing + x.shape[0], nothing / nothing])

    function = cgraph.graphed(run, sizes=[4])
    with pytest.warns(UserWarning, match="output 1 depends on the number of rows"):
        for rows in (4, 3, 2):
            assert function(fresh(lab, rows, 3))[1][0] == rows
