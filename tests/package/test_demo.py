"""The demo's parts on every driver, and its commands."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from cgraph._text import table
from examples import demo
from examples.demo.__main__ import main
from examples.demo.captured import CapturedStep
from examples.demo.check import CheckError, Comparison, require_fall
from examples.demo.generate import generate
from examples.demo.model import Decoder, Size
from examples.demo.text import Text
from examples.demo.train import Trainer, train
from lab import Lab

SIZE = Size(layers=1, heads=2, width=16, context=8, batch=2)
WORDS = "the quick brown fox jumps over the lazy dog; " * 5


def tolerance(lab: Lab) -> float:
    return 0.0 if lab.device == "cpu" else 1e-5


def trainer(lab: Lab, *, seed: int = 1) -> Trainer:
    text = Text(WORDS, device=torch.device(lab.device))
    return Trainer(SIZE, text, learning_rate=1e-2, seed=seed)


def captured(lab: Lab, trained: Trainer) -> CapturedStep:
    return CapturedStep(trained.step, trained.warm_up, device=torch.device(lab.device))


def test_a_captured_training_step_equals_the_eager_one(lab: Lab) -> None:
    ours, eager = trainer(lab), trainer(lab)
    eager.warm_up()
    step = captured(lab, ours)
    comparison = Comparison("loss", tolerance=tolerance(lab))
    losses = train(ours, step, eager, steps=5, comparison=comparison)
    assert len(set(losses)) == 5
    assert comparison.steps == 5
    assert step.nodes() > 50 and step.pool_bytes() > 0


def test_another_seed_fails_the_comparison(lab: Lab) -> None:
    ours, eager = trainer(lab), trainer(lab, seed=2)
    eager.warm_up()
    comparison = Comparison("loss of step", tolerance=tolerance(lab))
    with pytest.raises(CheckError, match=r"loss of step 0: captured differs from eager by"):
        train(ours, captured(lab, ours), eager, steps=2, comparison=comparison)


def test_a_captured_decoder_writes_what_the_eager_one_writes(lab: Lab) -> None:
    text = Text(WORDS, device=torch.device(lab.device))
    model = trainer(lab).model.eval()
    ours, eager = Decoder(model), Decoder(model)
    # With a cache of its own: the text is compared from the first character on.
    step = CapturedStep(ours.step, Decoder(model).step, device=text.device)
    comparison = Comparison("scores", tolerance=tolerance(lab))

    def write(seed: int) -> str:
        return generate(
            ours,
            step,
            eager,
            text,
            prompt="the ",
            characters=20,
            seed=seed,
            comparison=comparison,
        )

    first = write(1)
    assert first == write(1) != write(2)
    assert first.startswith("the ") and len(first) == 24
    assert comparison.steps >= 60


def test_the_cache_gives_the_scores_of_the_whole_piece(lab: Lab) -> None:
    text = Text(WORDS, device=torch.device(lab.device))
    model = trainer(lab).model.eval()
    piece = text.encode("quick br")
    decoder = Decoder(model)
    decoder.begin(piece)
    whole = model(piece.unsqueeze(0))[0].detach()
    for scores in whole:
        torch.testing.assert_close(decoder.step()[0], scores, rtol=1e-4, atol=1e-5)


def test_a_decoder_run_past_its_cache_stays_in_it(lab: Lab) -> None:
    decoder = Decoder(trainer(lab).model.eval())
    for _ in range(SIZE.context + 3):
        decoder.step()
    lab.sync()
    assert decoder.text.numel() == SIZE.context + 1


def test_a_difference_a_nan_and_a_loss_that_stays_are_failures() -> None:
    one = torch.ones(3)
    forgiving = Comparison("step", tolerance=1e-5)
    assert forgiving.add(one, one)
    assert not forgiving.add(one, one + 1e-6)
    assert forgiving.verdict() == "all 2, within 1e-06"
    for wrong in (one + 1e-3, one * torch.nan):
        with pytest.raises(CheckError, match="captured differs"):
            forgiving.add(wrong, one)
    with pytest.raises(CheckError, match="bit by bit"):
        Comparison("step", tolerance=0).add(one, one + 1e-6)
    with pytest.raises(CheckError, match="did not fall"):
        require_fall([3.0] * 40)
    with pytest.raises(CheckError, match="did not fall"):
        require_fall([3.0] * 39 + [float("nan")])
    assert require_fall([3.0] * 20 + [2.0] * 20).startswith("3.00 → 2.00")


def test_the_text_is_a_book_and_batches_are_pieces_of_it() -> None:
    text = Text(device=torch.device("cpu"))
    assert 60 < len(text.alphabet) < 100
    assert text.decode(text.encode("Alice")) == "Alice"
    pieces, following = text.batch(4, 32, seed=3)
    assert pieces.shape == following.shape == (4, 32)
    assert torch.equal(pieces[:, 1:], following[:, :-1])
    assert torch.equal(pieces, text.batch(4, 32, seed=3)[0])


def test_the_whole_demo_prints_a_table_and_writes_its_files(
    lab: Lab,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("examples.demo.program.require_fall", lambda losses: "not looked at")
    plan = replace(demo.ON_SIMULATOR, size=SIZE, steps=3, characters=10)
    demo.run(plan, torch.device(lab.device), tmp_path / "new")
    printed = capsys.readouterr().out
    assert "decode" in printed and "equal to eager" in printed
    written = {path.name for path in (tmp_path / "new").iterdir()}
    assert written == {"decode.svg", "decode.dot", "text.txt"}
    ElementTree.parse(tmp_path / "new" / "decode.svg")
    assert (tmp_path / "new" / "text.txt").read_text().startswith("Alice ")


def test_a_table_is_aligned() -> None:
    lines = table(["step", "µs"], [["train", "12.5"], ["decode", "-"]]).splitlines()
    assert lines == ["step      µs", "──────  ────", "train   12.5", "decode     -"]


def test_the_program_takes_the_simulator_without_a_gpu_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[Any] = []
    monkeypatch.setenv("CGRAPH_DRIVER", "sim")
    monkeypatch.setattr(demo, "run", lambda *arguments: calls.append(arguments))
    main(["--quick", "--seed", "5"])
    [(plan, device, out)] = calls
    assert (plan.steps, plan.seed) == (demo.ON_SIMULATOR.quick_steps, 5)
    assert (device.type, out) == ("cpu", Path("cgraph-demo"))
    assert "simulator" in capsys.readouterr().err


def test_a_failed_check_ends_the_program_and_few_steps_are_wrong_usage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise CheckError("step 3 differs")

    monkeypatch.setenv("CGRAPH_DRIVER", "sim")
    monkeypatch.setattr(demo, "run", fail)
    with pytest.raises(SystemExit, match="check failed: step 3 differs"):
        main([])
    with pytest.raises(SystemExit, match="2"):
        main(["--steps", "3"])
