"""The random state of captured CUDA work: where its kernels read it, and how far a replay moves it.

torch gives captured kernels the addresses of two words for each generator, the seed and the offset,
and fills them with two kernels before each replay. cgraph stores them with a node of the graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from cgraph import _core, _torch

__all__ = ["Draw", "draws"]


class Draw(NamedTuple):
    """The draws of a capture from one generator.

    Attributes:
        generator: A generator with the captured state. The user's may get another state.
        step: The distance by which a replay moves the offset.
        words: The addresses of seed and offset.
    """

    generator: torch.Generator
    step: int
    words: tuple[int, int]


def draws(
    device: _core.Device,
    drawn: list[tuple[torch.Generator, int]],
    side: torch.cuda.Stream,
) -> list[Draw] | None:
    """Return the places where the kernels of a capture read the state of each generator.

    Args:
        device: The device of the capture.
        drawn: Each generator that the capture drew from, and how far that moved its offset. A graph
            that registered them is alive, and stays so as long as the result is used: torch keeps
            the words where they are.
        side: A stream that does not capture.

    Returns:
        The draws; None if this torch keeps its state in another way, or another replay has just
        changed it.
    """
    found = []
    for generator, step in drawn:
        words = _words(device, generator, side)
        if words is None:
            return None
        found.append(Draw(generator.graphsafe_get_state(), step, words))
    return found


def _words(
    device: _core.Device, generator: torch.Generator, side: torch.cuda.Stream
) -> tuple[int, int] | None:
    """Capture a kernel that draws, and examine its parameters."""
    with torch.cuda.stream(side):
        out = torch.empty(1, device=generator.device)
        graph = _torch.captured_draw(generator, out)
    # A capture begins by filling the words: the offset with zero.
    side.synchronize()
    template = _core.Template.from_raw(device, graph.raw_cuda_graph(), graph)
    # In the order of its parameters: seed and offset stand side by side.
    named = [one.address for one in template.addresses() if one.address != out.data_ptr()]
    values = [device.word(address) for address in named]
    offsets = (0, generator.get_offset())
    pairs = [
        (named[i], named[i + 1])
        for i in range(len(named) - 1)
        if values[i] == generator.initial_seed() and values[i + 1] in offsets
    ]
    return pairs[0] if len(pairs) == 1 else None
