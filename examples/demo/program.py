"""The demo from its first line to its table."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import cgraph
from cgraph import picture
from examples.demo.captured import CapturedStep
from examples.demo.check import Comparison, require_fall
from examples.demo.generate import generate
from examples.demo.measure import measure
from examples.demo.model import Decoder, Size
from examples.demo.text import Text
from examples.demo.train import Trainer, train

__all__ = ["ON_GPU", "ON_SIMULATOR", "Plan", "run"]

PROMPT = "Alice "
# On a GPU the same work may run in kernels that add in another order.
TOLERANCE_ON_GPU = 1e-5


@dataclass(frozen=True)
class Plan:
    """The amount of work that the demo does.

    Attributes:
        size: Of the model and its batches.
        steps: Training steps.
        quick_steps: Training steps where little time is to be spent.
        characters: To be written.
        learning_rate: Of Adam.
        seed: Fixes everything random.
    """

    size: Size
    steps: int
    quick_steps: int
    characters: int
    learning_rate: float
    seed: int = 0


ON_GPU = Plan(
    Size(layers=6, heads=8, width=256, context=128, batch=64),
    steps=500,
    quick_steps=300,
    characters=600,
    learning_rate=1e-3,
)
ON_SIMULATOR = Plan(
    Size(layers=2, heads=4, width=64, context=32, batch=16),
    steps=500,
    quick_steps=250,
    characters=400,
    learning_rate=3e-3,
)


def run(plan: Plan, device: torch.device, out: Path) -> None:
    """Train, write, compare, and print what came of it.

    Args:
        plan: How much to do.
        device: A GPU; or the CPU, with the simulator in force.
        out: Folder for ``decode.svg``, ``decode.dot`` and ``text.txt``; made if it is missing.

    Raises:
        CheckError: A captured step differs from the eager one, or the loss does not fall.
    """
    start = time.perf_counter()
    on_gpu = device.type == "cuda"
    text = Text(device=device)
    tolerance = TOLERANCE_ON_GPU if on_gpu else 0.0
    where = torch.cuda.get_device_name(device) if on_gpu else "simulator"
    print(f"cgraph {cgraph.__version__}, torch {torch.__version__}, {where}")

    captured, eager = (
        Trainer(plan.size, text, learning_rate=plan.learning_rate, seed=plan.seed) for _ in range(2)
    )
    eager.warm_up()
    training = CapturedStep(captured.step, captured.warm_up, device=device)
    parameters = sum(parameter.numel() for parameter in captured.model.parameters())
    print(
        f"Training {parameters:,} parameters on Alice's Adventures in Wonderland: {plan.steps}"
        f" steps, each one graph of {training.nodes()} nodes and once more eagerly."
    )
    losses = Comparison("loss of training step", tolerance=tolerance)
    print(
        "Loss:", require_fall(train(captured, training, eager, steps=plan.steps, comparison=losses))
    )

    captured.model.eval()
    writer, eager_writer = Decoder(captured.model), Decoder(captured.model)
    writing = CapturedStep(writer.step, _thrice(writer), device=device)
    scores = Comparison("scores of decode step", tolerance=tolerance)
    written = generate(
        writer,
        writing,
        eager_writer,
        text,
        prompt=PROMPT,
        characters=plan.characters,
        seed=plan.seed,
        comparison=scores,
    )
    print(f"\n{_framed(written)}\n")

    if on_gpu:
        head, rows = _speed(device, eager, training, losses, eager_writer, writing, scores)
    else:
        head = ["step", "nodes", "pool bytes", "equal to eager"]
        rows = [
            [name, str(step.nodes()), _in_mib(step.pool_bytes()), comparison.verdict()]
            for name, step, comparison in (
                ("train", training, losses),
                ("decode", writing, scores),
            )
        ]
    print(_table(head, rows))

    out.mkdir(parents=True, exist_ok=True)
    picture.save(writing.graph, out / "decode.svg", title="Decode step of the demo")
    writing.graph.debug_dump(str(out / "decode.dot"))
    (out / "text.txt").write_text(written + "\n", encoding="utf-8")
    print(f"\nThe decode graph as a picture: {out / 'decode.svg'} (also decode.dot, text.txt)")
    print(f"All checks hold; {time.perf_counter() - start:.0f} s.")


def _speed(
    device: torch.device,
    trainer: Trainer,
    training: CapturedStep,
    losses: Comparison,
    decoder: Decoder,
    writing: CapturedStep,
    scores: Comparison,
) -> tuple[list[str], list[list[str]]]:
    """The table's head and rows on a GPU. Trains and writes on; the results are not looked at."""
    head = ["step", "how", "µs per step", "host µs", "nodes", "pool", "exec", "equal to eager"]
    rows: list[list[str]] = []
    compared: list[tuple[str, Callable[[], Tensor], Callable[[], None], CapturedStep, str]] = [
        ("train", trainer.step, trainer.warm_up, training, losses.verdict()),
        ("decode", decoder.step, _thrice(decoder), writing, scores.verdict()),
    ]
    for name, step, warm_up, ours, verdict in compared:
        # Timed before torch captures the same object, whose gradients then move into its graph.
        [eager] = measure([step])
        theirs = CapturedStep(step, warm_up, device=device, api=torch.cuda)
        their_times, our_times = measure([theirs.replay, ours.replay])
        times = [("eager", eager), ("torch.cuda.graph", their_times), ("cgraph", our_times)]
        costs = [
            ["-", "-", "-", "-"],
            ["-", _in_mib(theirs.pool_bytes()), _in_mib(theirs.exec_bytes), "-"],
            [str(ours.nodes()), _in_mib(ours.pool_bytes()), _in_mib(ours.exec_bytes), verdict],
        ]
        for (how, took), cost in zip(times, costs, strict=True):
            rows.append([name, how, f"{took.wall:.1f}", f"{took.host:.1f}", *cost])
    return head, rows


def _thrice(decoder: Decoder) -> Callable[[], None]:
    """A warm-up of a decoder."""

    def warm_up() -> None:
        for _ in range(3):
            decoder.step()

    return warm_up


def _framed(written: str) -> str:
    return "\n".join(f"  │ {line}" for line in written.split("\n"))


def _in_mib(count: int | None) -> str:
    return "-" if count is None else f"{count / (1 << 20):.1f} MiB"


def _table(head: list[str], rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [head, ["─" * width for width in widths], *rows]
    cells = ([*map(str.ljust, line, widths)] for line in lines)
    return "\n".join("  ".join(line).rstrip() for line in cells)
