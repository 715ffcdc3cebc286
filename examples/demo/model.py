"""A small decoder-only transformer over characters, and its decode step over a static cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Cache", "Decoder", "Size", "Transformer"]


@dataclass(frozen=True)
class Size:
    """The numbers that fix every shape in the demo.

    Attributes:
        layers: Blocks of the transformer.
        heads: Attention heads per block.
        width: Numbers per character inside the transformer; a multiple of ``heads``.
        context: Characters that it looks back on, itself included.
        batch: Pieces of text per training step.
        dropout: Probability that dropout sets a number to zero.
    """

    layers: int
    heads: int
    width: int
    context: int
    batch: int
    dropout: float = 0.1


class Cache:
    """Keys and values of one block for the characters read so far.

    Attributes:
        keys: float32 [1, heads, context, width / heads].
        values: The same shape.
    """

    def __init__(self, size: Size, device: torch.device) -> None:
        shape = (1, size.heads, size.context, size.width // size.heads)
        # Places not written yet are masked, but a NaN in them would come through the mask.
        self.keys = torch.zeros(shape, device=device)
        self.values = torch.zeros(shape, device=device)


class Block(nn.Module):
    """Attention and a two-layer network, each on a normalised copy of the stream it adds to."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.dropout = size.dropout
        self.norm_attention = nn.LayerNorm(size.width)
        self.query_key_value = nn.Linear(size.width, 3 * size.width)
        self.project = nn.Linear(size.width, size.width)
        self.norm_network = nn.LayerNorm(size.width)
        self.widen = nn.Linear(size.width, 4 * size.width)
        self.narrow = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        """All characters of all pieces at once: float32 [batch, time, width], same out."""
        query, key, value = self._split(x)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        return self._finish(x, mixed)

    def decode(self, x: Tensor, cache: Cache, place: Tensor, mask: Tensor) -> Tensor:
        """One character more.

        Args:
            x: float32 [1, 1, width].
            cache: Of the characters before; gets this one's key and value.
            place: int64 [1], where in the cache they go.
            mask: bool [1, context], true for the places that exist by now.

        Returns:
            float32 [1, 1, width].
        """
        query, key, value = self._split(x)
        cache.keys.index_copy_(2, place, key)
        cache.values.index_copy_(2, place, value)
        mixed = functional.scaled_dot_product_attention(
            query, cache.keys, cache.values, attn_mask=mask
        )
        return self._finish(x, mixed)

    def _split(self, x: Tensor) -> list[Tensor]:
        """Query, key and value, each [batch, heads, time, width / heads]."""
        together = self.query_key_value(self.norm_attention(x))
        return [
            part.transpose(1, 2) for part in together.unflatten(2, (3, self.heads, -1)).unbind(2)
        ]

    def _finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        x = x + self._drop(self.project(mixed.transpose(1, 2).flatten(2)))
        hidden = functional.gelu(self.widen(self.norm_network(x)))
        return x + self._drop(self.narrow(hidden))

    def _drop(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout, self.training)


class Transformer(nn.Module):
    """Predicts the next character from the ones before it.

    Args:
        size: Its shape.
        characters: How many different characters there are.
    """

    def __init__(self, size: Size, characters: int) -> None:
        super().__init__()
        self.size = size
        self.characters = nn.Embedding(characters, size.width)
        self.places = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.score = nn.Linear(size.width, characters, bias=False)
        for embedding in (self.characters, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, pieces: Tensor) -> Tensor:
        """Scores of the next character: int64 [batch, context] → float32 [batch, context, n]."""
        x = self.characters(pieces) + self.places.weight
        x = functional.dropout(x, self.size.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.score(self.norm(x))
        return scores

    def loss(self, pieces: Tensor, following: Tensor) -> Tensor:
        """Mean cross-entropy of the characters that follow, in nats: float32 []."""
        return functional.cross_entropy(self(pieces).flatten(0, 1), following.flatten())


class Decoder:
    """Writes text one character per :meth:`step`, wholly on the device.

    A step names the same memory and shapes each time and never asks the device for a value, so it
    can be captured once and replayed for every character: the position is a tensor that the step
    itself increments, and what is not written yet is masked.

    Args:
        model: The transformer, shared and not copied.
        temperature: 1 samples as the model predicts, less makes it more certain.

    Attributes:
        text: int64 [context + 1], the characters given and written.
        scores: float32 [1, n], those of the last step.
    """

    def __init__(self, model: Transformer, *, temperature: float = 0.8) -> None:
        self._model = model
        self._temperature = temperature
        size, device = model.size, model.score.weight.device
        self._caches = [Cache(size, device) for _ in range(size.layers)]
        self._order = torch.arange(size.context, device=device)
        self._position = torch.zeros((), dtype=torch.int64, device=device)
        self._given = torch.zeros((), dtype=torch.int64, device=device)
        self.text = torch.zeros(size.context + 1, dtype=torch.int64, device=device)
        self.scores = torch.zeros(1, model.score.out_features, device=device)

    def begin(self, prompt: Tensor) -> None:
        """Start again with a prompt, int64 [1 … context], that the next steps read."""
        self._position.zero_()
        self._given.fill_(prompt.numel())
        self.text[: prompt.numel()].copy_(prompt)

    def state(self) -> list[Tensor]:
        """All that steps change."""
        caches = [tensor for cache in self._caches for tensor in (cache.keys, cache.values)]
        return [self._position, self._given, self.text, self.scores, *caches]

    @torch.no_grad()
    def step(self) -> Tensor:
        """Read the character at the position, write the next one unless it is given, move on.

        Returns:
            :attr:`scores`.
        """
        place = self._position.view(1)
        character = self.text.index_select(0, place)
        model = self._model
        x = (model.characters(character) + model.places(place)).unsqueeze(0)
        mask = (self._order <= self._position).unsqueeze(0)
        for block, cache in zip(model.blocks, self._caches, strict=True):
            assert isinstance(block, Block)
            x = block.decode(x, cache, place, mask)
        self.scores.copy_(model.score(model.norm(x)).squeeze(0))

        following = place + 1
        written = torch.where(
            following < self._given, self.text.index_select(0, following), self._sample()
        )
        self.text.index_copy_(0, following, written)
        # One replay too many must not write behind the cache.
        self._position.add_(1).clamp_(max=self._model.size.context - 1)
        return self.scores

    def _sample(self) -> Tensor:
        """A character drawn with the scores' probabilities: int64 [1].

        The largest of the probabilities over exponential random numbers is such a draw. Unlike
        ``multinomial`` this checks nothing on the host.
        """
        probabilities = torch.softmax(self.scores / self._temperature, dim=-1)
        return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(dim=-1)
