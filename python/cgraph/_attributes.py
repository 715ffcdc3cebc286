"""Attributes that a function sets while it is captured, which no replay sets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from cgraph import _core
from cgraph._surroundings import attributes_of
from cgraph.errors import CaptureError

__all__ = ["Attributes", "dictionaries_of", "registered_in"]


class Attributes:
    """Attributes and buffers, as they are now.

    Args:
        dictionaries: Those that hold them; see :func:`dictionaries_of`.
    """

    def __init__(self, dictionaries: Sequence[dict[str, Any]]) -> None:
        self._contents = _core.Contents(dictionaries)

    def require_no_new_tensor(self) -> None:
        """Refuse a function that keeps a tensor where no replay puts one.

        Raises:
            CaptureError: An attribute is another tensor now.
        """
        for _, name, _ in self._new_tensors():
            raise CaptureError(
                f"the function sets the attribute {name} to a tensor, and replays do not: write to"
                " it in place, or make it an argument and a result"
            )

    @property
    def has_new_tensor(self) -> bool:
        """Whether there is a tensor where there was none."""
        new = self._new_tensors()
        return any(not isinstance(before.get(name), torch.Tensor) for _, name, before in new)

    def put_back_after_error(self, error: object, *_: object) -> None:
        """Set those back that are another tensor now, at the end of a block that raises."""
        if error is None:
            return
        for now, name, before in self._new_tensors():
            if name in before:
                now[name] = before[name]
            else:
                now.pop(name, None)

    def put_back(self) -> None:
        """Let the dictionaries hold what they held, after a capture that is made anew.

        What it has made, as a module, nothing has computed.
        """
        for now, before in self._contents.changed():
            now.clear()
            now.update(before)

    def _new_tensors(self) -> Iterator[tuple[dict[str, Any], str, dict[str, Any]]]:
        """Attributes that are another tensor now: what holds them, the name, what that held."""
        for now, before in self._contents.changed():
            # A dictionary of the user's may have items of its own making.
            for name, value in list(dict.items(now)):
                if isinstance(value, torch.Tensor) and before.get(name) is not value:
                    yield now, name, before


def registered_in(parts: Iterable[torch.nn.Module]) -> list[dict[str, Any]]:
    """What holds the modules and parameters of modules."""
    return [one for part in parts for one in (part._modules, part._parameters)]


def dictionaries_of(
    function: Callable[..., Any], parts: Iterable[torch.nn.Module]
) -> list[dict[str, Any]]:
    """What holds the attributes and buffers of a function's object and of modules, each once.

    Args:
        function: The function, a method or a callable object.
        parts: The modules, with those that they consist of.
    """
    attributes = attributes_of(function)
    found = {id(attributes): attributes}
    for part in parts:
        # torch's own write to their buffers in place.
        if not type(part).__module__.startswith("torch.nn."):
            found[id(vars(part))] = vars(part)
            found[id(part._buffers)] = part._buffers
    return list(found.values())
