"""Tensors that Python spells out inside a capture on a GPU, as in ``torch.tensor(2.0)``."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from cgraph import _torch

__all__ = ["SpelledOut"]

_MAKERS = (torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor)


class SpelledOut(TorchFunctionMode):
    """A mode that makes such tensors outside of the capture, and copies them in each replay.

    torch copies their numbers from the host and waits, which a stream that captures must not.
    Another thread may do so: captures are thread-local.

    Args:
        noted: Called with the numbers of each, and the tensor that the function gets.

    Attributes:
        kept: The tensors that replays copy, which must stay.
    """

    def __init__(self, noted: Callable[[torch.Tensor, torch.Tensor], None] | None = None) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []
        self._noted = noted

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Make such a tensor, or call any other function."""
        given = kwargs or {}
        if func not in _MAKERS or not _are_numbers(args[-1] if args else given.get("data")):
            return func(*args, **given)
        device = torch.cuda.current_device()

        def make() -> tuple[torch.Tensor, torch.Tensor]:
            with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream()):
                made = func(*args, **given)
                return made.detach(), made.detach().cpu()

        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        with ThreadPoolExecutor(1) as pool:
            made, numbers = pool.submit(make).result()
        if made.device.type != "cuda":
            return func(*args, **given)
        self.kept.append(made)
        with _torch.without_modes(), torch.no_grad():
            result = made.clone()
        result.requires_grad_(bool(given.get("requires_grad")) and grad and not inference)
        if self._noted is not None:
            self._noted(numbers, result)
        return result


def _are_numbers(data: Any) -> bool:
    if isinstance(data, list | tuple):
        return all(map(_are_numbers, data))
    return isinstance(data, bool | int | float | complex)
