"""A diffusion network: it guesses the noise in an image at a time of the process."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, scaled_dot_product_attention, silu

__all__ = ["UNet"]

GROUPS = 8
HEADS = 4


class UNet(nn.Module):
    """A UNet of two resolutions, with attention at the lower one, and skip connections.

    Args:
        channels: Channels of the image.
        width: Channels of the first block; the lower resolution has twice as many.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        timed = 4 * width
        self._width = width
        self.time = nn.Sequential(nn.Linear(width, timed), nn.SiLU(), nn.Linear(timed, timed))
        self.first = nn.Conv2d(channels, width, 3, padding=1)
        self.high = Residual(width, width, timed)
        self.down = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.low = Residual(width, 2 * width, timed)
        self.attention = Attention(2 * width)
        self.middle = Residual(2 * width, 2 * width, timed)
        self.up_low = Residual(4 * width, 2 * width, timed)
        self.up = nn.Conv2d(2 * width, width, 3, padding=1)
        self.up_high = Residual(2 * width, width, timed)
        self.norm = nn.GroupNorm(GROUPS, width)
        self.last = nn.Conv2d(width, channels, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Return the noise in images ``[n, channels, height, width]`` at times ``[n]``."""
        t = self.time(waves(time, self._width))
        high = self.high(self.first(x), t)
        low = self.attention(self.low(self.down(high), t))
        y = self.middle(low, t)
        y = self.up_low(torch.cat([y, low], 1), t)
        y = self.up(interpolate(y, scale_factor=2.0, mode="nearest"))
        y = self.up_high(torch.cat([y, high], 1), t)
        return self.last(silu(self.norm(y)))


class Residual(nn.Module):
    """Two convolutions that know the time, added to their input."""

    def __init__(self, given: int, made: int, timed: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(GROUPS, given)
        self.conv1 = nn.Conv2d(given, made, 3, padding=1)
        self.time = nn.Linear(timed, made)
        self.norm2 = nn.GroupNorm(GROUPS, made)
        self.conv2 = nn.Conv2d(made, made, 3, padding=1)
        self.past = nn.Identity() if given == made else nn.Conv2d(given, made, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """Return ``[n, made, height, width]``."""
        y = self.conv1(silu(self.norm1(x))) + self.time(silu(t))[:, :, None, None]
        return self.past(x) + self.conv2(silu(self.norm2(y)))


class Attention(nn.Module):
    """A layer in which each place of an image attends to all others."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(GROUPS, width)
        self.looked = nn.Conv2d(width, 3 * width, 1)
        self.out = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[n, width, height, width]``, like the input."""
        n, width, *size = x.shape
        parts = self.looked(self.norm(x)).view(n, 3, HEADS, width // HEADS, -1).transpose(-1, -2)
        y = scaled_dot_product_attention(*parts.unbind(1))
        return x + self.out(y.transpose(-1, -2).reshape(n, width, *size))


def waves(time: Tensor, width: int) -> Tensor:
    """Return sines and cosines of times ``[n]``, at falling frequencies: ``[n, width]``."""
    half = width // 2
    steps = torch.arange(half, device=time.device, dtype=torch.float32)
    angles = time[:, None].float() * torch.exp(steps * (-math.log(10_000.0) / half))
    return torch.cat([angles.sin(), angles.cos()], -1)
