"""Writing text with a captured decode step, beside the same steps done eagerly."""

from __future__ import annotations

import sys

import torch
from tqdm import tqdm  # type: ignore[import-untyped]

from examples.demo.captured import CapturedStep
from examples.demo.check import Comparison
from examples.demo.model import Decoder
from examples.demo.text import Text

__all__ = ["generate"]


def generate(
    captured: Decoder,
    step: CapturedStep,
    eager: Decoder,
    text: Text,
    *,
    prompt: str,
    characters: int,
    seed: int,
    comparison: Comparison,
) -> str:
    """Write with two equal decoders, one by replays and one eagerly, and compare each step.

    When the cache is full, both start again with the last half of it as the prompt.

    Args:
        captured: The decoder whose step was captured.
        step: Its captured step.
        eager: Another one of the same model.
        text: Gives characters their numbers.
        prompt: The first characters, at least one.
        characters: How many to write.
        seed: Fixes what is drawn.
        comparison: Of the scores.

    Returns:
        The prompt and what was written.

    Raises:
        CheckError: Scores differ.
    """
    context = captured.text.numel() - 1
    written = prompt
    number = 0
    goal = len(prompt) + characters
    with tqdm(total=characters, desc="write", leave=False, disable=None, file=sys.stderr) as bar:
        while len(written) < goal:
            given = written[-(context // 2) :]
            for decoder in (captured, eager):
                decoder.begin(text.encode(given))
            for _ in range(context):
                torch.manual_seed(seed + number)
                step.replay()
                torch.manual_seed(seed + number)
                number += 1
                if not comparison.add(step.output, eager.step()):
                    # Rounding that the tolerance forgives must not choose another character.
                    for mine, other in zip(eager.state(), captured.state(), strict=True):
                        mine.copy_(other)
            written += text.decode(captured.text[len(given) :])
            bar.update(context + 1 - len(given))
    drawn = Comparison("after writing, state", tolerance=comparison.tolerance)
    for mine, other in zip(captured.state(), eager.state(), strict=True):
        drawn.add(mine, other)
    return written[:goal]
