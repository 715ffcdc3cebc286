"""The torch modes that Python code runs under: grad mode, inference mode, autocast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch

__all__ = ["Modes"]


class Modes(NamedTuple):
    """The modes that this thread runs operators under.

    Attributes:
        grad: True if autograd records.
        inference: True if inference mode is on.
        cache: True if autocast keeps its casts.
        autocast: For each type of device, its autocast state and the type that it casts to.
    """

    grad: bool
    inference: bool
    cache: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def now(cls, device_type: str) -> Modes:
        """Return the modes in force, with autocast of a type of device and of the host."""
        types = sorted({device_type, "cpu"})
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_cache_enabled(),
            tuple((t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in types),
        )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Run the ``with`` block under these modes."""
        with ExitStack() as modes:
            modes.enter_context(torch.inference_mode(self.inference))
            modes.enter_context(torch.set_grad_enabled(self.grad))
            for kind, enabled, dtype in self.autocast:
                modes.enter_context(torch.autocast(kind, dtype, enabled, self.cache))
            yield
