"""A decode step of a large language model in bf16: one more token for each item of a batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["SIZES", "Decode"]

SIZES = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
"""The 51 batch sizes that inference servers capture by default."""


class Layer(nn.Module):
    """Grouped-query attention over a static cache, and a gated network."""

    def __init__(self, width: int, heads: int, groups: int, hidden: int, most: int, context: int):
        super().__init__()
        self.depth, self.heads, self.groups = width // heads, heads, groups
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.inward = nn.Linear(width, (heads + 2 * groups) * self.depth, bias=False)
        self.outward = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(most, groups, context, self.depth))

    def forward(self, x: Tensor, place: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """Compute one token for each item of the batch: [batch, width], same out."""
        batch, (cosine, sine) = x.shape[0], turn
        together = self.inward(self.before(x)).view(batch, -1, 1, self.depth)
        query, key, value = together.split([self.heads, self.groups, self.groups], 1)

        def turned(part: Tensor) -> Tensor:
            one, other = part.chunk(2, -1)
            return part * cosine + torch.cat((-other, one), -1) * sine

        keys, values = self.keys[:batch], self.values[:batch]
        keys.index_copy_(2, place, turned(key))
        values.index_copy_(2, place, value)
        mixed = functional.scaled_dot_product_attention(
            turned(query), keys, values, enable_gqa=True
        )
        x = x + self.outward(mixed.reshape(batch, -1))
        normed = self.between(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class Decode(nn.Module):
    """A model of some 390 kernels in 16 layers.

    Args:
        most: The largest batch.
    """

    def __init__(self, most: int = max(SIZES), layers: int = 16, context: int = 256) -> None:
        super().__init__()
        width, words = 2048, 32_000
        self.words = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width, 32, 8, 5632, most, context) for _ in range(layers))
        self.norm, self.score = nn.RMSNorm(width), nn.Linear(width, words, bias=False)
        for name in ("cosine", "sine"):
            self.register_buffer(name, torch.rand(context, width // 32))

    def forward(self, tokens: Tensor, place: Tensor) -> Tensor:
        """Return scores of the next token: int64 [batch], int64 [1] → [batch, words]."""
        x, turn = self.words(tokens), (self.cosine[place], self.sine[place])
        for layer in self.layers:
            x = layer(x, place, turn)
        return self.score(self.norm(x))
