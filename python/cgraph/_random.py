"""The random state of captured CUDA work: where its kernels read it, and how far a replay moves it.

torch gives captured kernels the addresses of two words for each generator, the seed and the offset,
and fills them with two kernels before each replay. cgraph stores them with a node of the graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from cgraph import _core, _torch

__all__ = ["Draw", "draws"]

# No offset that a program comes to by drawing; a multiple of four, as all offsets are.
_MARK = 0x5CA1AB1E << 8


class Draw(NamedTuple):
    """What a capture draws from one generator.

    Attributes:
        generator: A generator with the state that was captured. The user's may get another one.
        step: How far a replay moves the offset.
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
    """Where the kernels of a capture read the state of each generator.

    Args:
        device: The device of the capture.
        drawn: Each generator that the capture drew from, and how far that moved its offset. A graph
            that registered them is alive, and stays so as long as the result is used: torch then
            keeps the words where they are.
        side: A stream that does not capture.

    Returns:
        None where this torch keeps its state in another way.
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
    """Capture a kernel that draws, replay it with a marked offset, and look at what it got."""
    before = generator.get_offset()
    with torch.cuda.stream(side):
        out = torch.empty(1, device=generator.device)
        graph = _torch.captured_draw(generator, out)
        template = _core.Template.from_raw(device, graph.raw_cuda_graph())
        named = {address for _, address, _, _ in template.addresses()} - {out.data_ptr()}
        generator.set_offset(_MARK)
        try:
            graph.replay()
            side.synchronize()
        finally:
            generator.set_offset(before)
    values = {address: device.word(address) for address in named}
    seed = generator.initial_seed()
    seeds = [address for address, value in values.items() if value == seed]
    offsets = [address for address, value in values.items() if value == _MARK]
    if seed == _MARK or len(seeds) != 1 or len(offsets) != 1:
        return None
    return seeds[0], offsets[0]
