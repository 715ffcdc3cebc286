"""Attributes that a function sets while it is captured, which no replay sets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from cgraph import _core
from cgraph._surroundings import attributes_of
from cgraph.errors import CaptureError

__all__ = ["Attributes", "dictionaries_of", "with_registered"]


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

    def put_back_after_error(self, error: object, *_: object) -> None:
        """Set those back that are another tensor now, at the end of a block that raises."""
        if error is None:
            return
        for now, name, before in self._new_tensors():
            if name in before:
                now[name] = before[name]
            else:
                now.pop(name, None)

    def take_back(self) -> None:
        """Take modules and parameters away that were not there, and what their names were is again.

        For a capture that is made anew: nothing has computed them.
        """
        changed = self._contents.changed()
        for now, before in changed:
            for name in now.keys() - before.keys():
                if isinstance(now[name], torch.nn.Module | torch.Tensor):
                    del now[name]
        for now, before in changed:
            now.update({name: one for name, one in before.items() if name not in now})

    def _new_tensors(self) -> Iterator[tuple[dict[str, Any], str, dict[str, Any]]]:
        """Attributes that are another tensor now: what holds them, the name, what that held."""
        for now, before in self._contents.changed():
            for name, value in list(now.items()):
                if isinstance(value, torch.Tensor) and before.get(name) is not value:
                    yield now, name, before


def with_registered(dictionaries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Dictionaries that hold attributes, with those of the modules' own modules and parameters."""
    names = ("_modules", "_parameters")
    return [*dictionaries, *(one[name] for one in dictionaries for name in names if name in one)]


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
