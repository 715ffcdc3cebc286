"""Training in one graph: forward, loss, backward and Adam, beside the same steps done eagerly."""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from examples.demo.captured import CapturedStep
from examples.demo.check import Comparison
from examples.demo.model import Size, Transformer
from examples.demo.text import Text

__all__ = ["Trainer", "train"]

WARM_UPS = 3


class Trainer:
    """A model, its optimiser, and the memory that batches are copied into.

    Args:
        size: Shape of the model and its batches.
        text: What it learns.
        learning_rate: Of Adam.
        seed: Fixes the first weights, the batches and each step's dropout.

    Attributes:
        model: The transformer, on the text's device.
    """

    def __init__(self, size: Size, text: Text, *, learning_rate: float, seed: int) -> None:
        torch.manual_seed(seed)
        self._size = size
        self._text = text
        self._seed = seed
        self.model = Transformer(size, len(text.alphabet)).to(text.device)
        self._optimizer = torch.optim.Adam(
            self.model.parameters(), lr=learning_rate, capturable=True, foreach=True
        )
        shape = (size.batch, size.context)
        self._pieces = torch.zeros(shape, dtype=torch.int64, device=text.device)
        self._following = torch.zeros_like(self._pieces)

    def prepare(self, number: int) -> None:
        """Put a step's batch where the step reads it, and set the random state for its dropout."""
        seed = self._seed + number
        pieces, following = self._text.batch(self._size.batch, self._size.context, seed=seed)
        self._pieces.copy_(pieces)
        self._following.copy_(following)
        torch.manual_seed(seed)

    def step(self) -> Tensor:
        """One training step: float32 [], the loss before it. This is what is captured."""
        self._optimizer.zero_grad(set_to_none=True)
        loss = self.model.loss(self._pieces, self._following)
        loss.backward()
        self._optimizer.step()
        return loss.detach()

    def warm_up(self) -> None:
        """The first steps, which make Adam's state and everything else that is made once."""
        for number in range(WARM_UPS):
            self.prepare(number)
            self.step()
        # The gradients are then made in the capture, from its pool.
        self._optimizer.zero_grad(set_to_none=True)

    def state(self) -> list[Tensor]:
        """All that a step changes: weights and Adam's moments."""
        parameters = [parameter.detach() for parameter in self.model.parameters()]
        moments = [self._optimizer.state[p] for p in self.model.parameters()]
        return [*parameters, *(tensor for state in moments for tensor in state.values())]


def train(
    captured: Trainer, step: CapturedStep, eager: Trainer, *, steps: int, comparison: Comparison
) -> list[float]:
    """Train two equal trainers, one by replays and one eagerly, and compare each step's loss.

    Args:
        captured: The trainer whose step was captured.
        step: Its captured step.
        eager: Another one of the same seed, warmed up too.
        steps: How many steps.
        comparison: Of the losses.

    Returns:
        The captured steps' losses.

    Raises:
        CheckError: A loss differs.
    """
    losses = []
    progress = tqdm(range(steps), "train", unit="step", leave=False, disable=None, file=sys.stderr)
    for number in progress:
        captured.prepare(WARM_UPS + number)
        step.replay()
        eager.prepare(WARM_UPS + number)
        if not comparison.add(step.output, eager.step()):
            # Rounding that the tolerance forgives must not grow from step to step.
            for mine, other in zip(eager.state(), captured.state(), strict=True):
                mine.copy_(other)
        losses.append(step.output.item())
        progress.set_postfix_str(f"loss {losses[-1]:.2f}", refresh=False)
    if not comparison.tolerance:
        weights = Comparison("after training, weight or moment", tolerance=0.0)
        for mine, other in zip(captured.state(), eager.state(), strict=True):
            weights.add(mine, other)
    return losses
