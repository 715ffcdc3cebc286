"""How padding trials tell noise of kernels from padding that shows."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import cgraph
from cgraph._functions.padding import trying
from cgraph._recording.noise import Noise
from lab import SimLab, fresh

ROWS = 50


def result() -> Tensor:
    """Scores as of a model in bf16, of very different sizes."""
    return (torch.randn(ROWS, 400) * torch.randn(400).exp()).bfloat16()


def again(x: Tensor, share: float = 0.05) -> Tensor:
    """The same with some elements rounded in another way."""
    step = 2**-7 * torch.randint(-1, 2, x.shape) * (torch.rand(x.shape) < share)
    return (x.float() * (1 + step)).bfloat16()


def test_results_that_differ_as_equal_replays_do_are_noise() -> None:
    for _ in range(20):
        x = result()
        noise = Noise(x, [again(x) for _ in range(8)], 0)
        assert all(noise.explains(again(x)).all() for _ in range(4))


@pytest.mark.parametrize(
    "leak",
    [
        lambda x: x * 1.02,
        lambda x: x + 0.05 * x.float().mean().abs().bfloat16() + 0.05,
        lambda x: torch.cat([x[:-1], x[-1:] * 1.02]),
        lambda x: x.index_fill(0, torch.tensor([3]), 0.0),
        lambda x: torch.where(torch.arange(400) == 7, x.float().amax().bfloat16() * 2, x),
        lambda x: torch.where(torch.arange(400) == 7, torch.nan, x),
        lambda x: torch.where(torch.arange(400) == 7, torch.inf, x),
    ],
)
def test_padding_that_shows_is_more_than_noise(leak: object) -> None:
    x = result()
    noise = Noise(x, [again(x) for _ in range(8)], 0)
    assert not noise.explains(again(leak(x))).all()  # type: ignore[operator]


def test_without_noise_nothing_is_explained() -> None:
    x = result()
    assert not Noise(x, [], 0).explains(again(x)).all()
    assert not Noise(x, [x.clone() for _ in range(8)], 0).explains(again(x)).all()
    assert not Noise(x.int(), [x.int()], 0).explains(x.int() + 1).all()


def test_infinite_elements_are_compared_as_they_are() -> None:
    x = result()
    x[3, 4], x[5, 6], x[7, 8] = torch.inf, -torch.inf, torch.nan
    noise = Noise(x, [again(x) for _ in range(8)], 0)
    assert noise.explains(again(x)).all()
    other = again(x)
    other[3, 4] = -torch.inf
    assert not noise.explains(other).all()
    assert not Noise(x, [other, again(x)], 0).explains(other).all()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("is_leaking", [False, True])
def test_a_row_that_flips_now_and_then_is_no_leak(
    sim: SimLab, monkeypatch: pytest.MonkeyPatch, seed: int, is_leaking: bool
) -> None:
    replayed, chance = trying._replayed, random.Random(seed)

    def noisy(*args: Any) -> Any:
        leaves, spec = replayed(*args)
        leaves[0][1] *= 1 + 1e-4 * (chance.random() < 0.2)
        return leaves, spec

    def score(x: Tensor) -> Tensor:
        return x * 2 + (x.abs().amax() if is_leaking else 0)

    monkeypatch.setattr(trying, "_replayed", noisy)
    graphed = cgraph.graphed(score, sizes=[8])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            x = fresh(sim, 6, 100)
            torch.testing.assert_close(graphed(x), score(x), rtol=1e-3, atol=1e-3)
    reasons = [key.reason for key in graphed.report().keys if key.state == "eager"]
    assert len(reasons) == is_leaking
    assert all("depends on what the padding rows contain" in str(one) for one in reasons)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("is_leaking", [False, True])
def test_rows_that_flip_each_now_and_then_are_no_leak(
    sim: SimLab, monkeypatch: pytest.MonkeyPatch, seed: int, is_leaking: bool
) -> None:
    replayed, chance = trying._replayed, torch.Generator().manual_seed(seed)

    def noisy(*args: Any) -> Any:
        leaves, spec = replayed(*args)
        for leaf in leaves:
            flips = torch.rand(len(leaf), 1, generator=chance) < 0.1
            leaf *= 1 + 1e-4 * flips * torch.rand(len(leaf), 1, generator=chance)
        return leaves, spec

    def scores(x: Tensor) -> tuple[Tensor, Tensor]:
        leak = x[-1:].abs() * 1e-5 if is_leaking else 0
        return x * 2, x * 3 + leak

    monkeypatch.setattr(trying, "_replayed", noisy)
    graphed = cgraph.graphed(scores, sizes=[128])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = fresh(sim, 100, 20) + 9
        for got, right in zip(graphed(x), scores(x), strict=True):
            torch.testing.assert_close(got, right, rtol=1e-3, atol=1e-3)
    reasons = [key.reason for key in graphed.report().keys if key.state == "eager"]
    assert len(reasons) == is_leaking
    assert all("output 1 depends on what the padding" in str(one) for one in reasons)


def test_results_without_rows_are_compared_as_a_whole() -> None:
    x = result()
    noise = Noise(x, [again(x) for _ in range(8)], None)
    assert noise.explains(again(x)).all()
    assert not noise.explains(again(x * 1.02)).all()


@pytest.mark.parametrize("mask", [-1e9, torch.finfo(torch.float32).min])
def test_masked_elements_hide_no_leak(sim: SimLab, mask: float) -> None:
    def score(x: Tensor) -> Tensor:
        return (x + x.amax(0)).masked_fill(torch.arange(8) == 0, mask)

    graphed = cgraph.graphed(score, sizes=[4])
    with pytest.warns(UserWarning, match="padding"):
        graphed(fresh(sim, 3, 8).abs())
    x = -fresh(sim, 3, 8).abs() - 1
    torch.testing.assert_close(graphed(x), score(x))


def test_noise_of_a_large_row_hides_no_leak_in_a_small_one() -> None:
    x = torch.randn(ROWS, 400)
    x[0] *= 1e6

    def noisy() -> Tensor:
        return x * (1 + 1e-6 * torch.randn(ROWS, 400))

    noise = Noise(x, [noisy() for _ in range(8)], 0)
    assert noise.explains(noisy()).all()
    other = noisy()
    other[7] += 0.001
    assert not noise.explains(other).all()


def test_one_number_for_each_row_is_enough(sim: SimLab) -> None:
    x = torch.randn(ROWS)
    noise = Noise(x, [x * (1 + 1e-6 * torch.randn(ROWS)) for _ in range(8)], 0)
    assert noise.explains(x).all()
    assert not noise.explains(x * 1.01).all()

    graphed = cgraph.graphed(lambda x: x.sum(1) + x.amax(), sizes=[4])
    with pytest.warns(UserWarning, match="depends on what the padding rows contain"):
        for _ in range(2):
            given = fresh(sim, 3, 8).abs()
            torch.testing.assert_close(graphed(given), given.sum(1) + given.amax())


@pytest.mark.parametrize("seed", range(8))
def test_a_row_that_is_wrong_now_and_then_leaks(
    sim: SimLab, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    replayed, chance, runs = trying._replayed, random.Random(seed), []  # type: ignore[var-annotated]

    def racing(*args: Any) -> Any:
        leaves, spec = replayed(*args)
        runs.append(chance.random() < 0.5 or len(runs) == 4)
        if runs[-1]:
            leaves[0][0] = 0
        return leaves, spec

    monkeypatch.setattr(trying, "_replayed", racing)
    graphed = cgraph.graphed(lambda x: x * 2, sizes=[8])
    with pytest.warns(UserWarning, match="padding to 8 rows is not safe"):
        graphed(fresh(sim, 6, 100) + 9)


def test_padding_that_shows_in_what_is_written_only_for_some_contents_is_refused(
    sim: SimLab,
) -> None:
    class Largest(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("most", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.most.copy_(x.amax().view(1))
            return x * 2

    net = Largest()
    graphed = cgraph.graphed(net, sizes=[4])
    with pytest.warns(UserWarning, match="what the function writes"):
        graphed(fresh(sim, 3, 8).abs() + 1)
    x = -fresh(sim, 3, 8).abs() - 1
    graphed(x)
    assert torch.equal(net.most, x.amax().view(1))


def test_undefined_complex_numbers_hide_no_leak(sim: SimLab) -> None:
    def score(x: Tensor) -> Tensor:
        return torch.complex(x * torch.nan, x + x.sum())

    graphed = cgraph.graphed(score, sizes=[4])
    with pytest.warns(UserWarning, match="padding to 4 rows is not safe"):
        for _ in range(2):
            x = fresh(sim, 3, 8) + 1
            torch.testing.assert_close(graphed(x).imag, score(x).imag)


@pytest.mark.parametrize("seed", range(4))
def test_a_whole_number_that_flips_now_and_then_excuses_no_leak_in_its_row(
    sim: SimLab, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    replayed, chance = trying._replayed, torch.Generator().manual_seed(seed)

    def noisy(*args: Any) -> Any:
        leaves, spec = replayed(*args)
        leaves[0] += torch.rand(len(leaves[0]), generator=chance) < 0.1
        return leaves, spec

    def best(x: Tensor) -> Tensor:
        places = x.argmax(1)
        places[0] += (x[-1, 0] < 0.5).long()
        places[1:2] += torch.randint(1000, (1,))  # so that nobody knows what is right
        return places

    monkeypatch.setattr(trying, "_replayed", noisy)
    graphed = cgraph.graphed(best, sizes=[128])
    with pytest.warns(UserWarning, match="depends on what the padding rows contain"):
        graphed(fresh(sim, 100, 20).abs() + 1)
