"""The text that the demo learns: characters as numbers, and random pieces of it."""

from __future__ import annotations

from importlib.resources import files

import torch
from torch import Tensor

__all__ = ["Text"]


class Text:
    """A text as a tensor of character numbers.

    Args:
        characters: The text; *Alice's Adventures in Wonderland* if it is left out.
        device: Where the tensors stand.

    Attributes:
        alphabet: Its different characters, sorted; a character's number is its place in here.
    """

    def __init__(self, characters: str | None = None, *, device: torch.device) -> None:
        if characters is None:
            characters = files(__package__).joinpath("alice.txt").read_text(encoding="ascii")
        self.alphabet = "".join(sorted(set(characters)))
        self.device = device
        self._numbers = {character: number for number, character in enumerate(self.alphabet)}
        self._whole = self.encode(characters)

    def encode(self, characters: str) -> Tensor:
        """Characters as numbers: int64 [len(characters)]."""
        numbers = [self._numbers[character] for character in characters]
        return torch.tensor(numbers, dtype=torch.int64, device=self.device)

    def decode(self, numbers: Tensor) -> str:
        """Numbers (int64 [n], any device) as characters."""
        return "".join(self.alphabet[number] for number in numbers.tolist())

    def batch(self, count: int, length: int, *, seed: int) -> tuple[Tensor, Tensor]:
        """Random pieces of the text, and for each character the one after it.

        Args:
            count: How many pieces.
            length: Characters per piece.
            seed: The same seed gives the same pieces, on every device.

        Returns:
            Two int64 tensors [count, length].
        """
        generator = torch.Generator().manual_seed(seed)
        last = self._whole.numel() - length
        starts = torch.randint(last, (count, 1), generator=generator).to(self.device)
        places = starts + torch.arange(length, device=self.device)
        return self._whole[places], self._whole[places + 1]
