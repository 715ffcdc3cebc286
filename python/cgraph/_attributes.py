"""Attributes that a function sets while it is captured, which no replay sets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from cgraph import _core
from cgraph._constants import Constant
from cgraph._surroundings import PLAIN, attributes_of
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
    def changed(self) -> str | None:
        """Why a function is not captured that changes a number or text; None if it changes none."""
        for now, name, before in self._changes():
            if not isinstance(now[name], torch.Tensor):
                there = f" from {before[name]!r:.40}" if name in before else ""
                return (
                    f"the function changes {name}{there} to {now[name]!r:.40}, and replays do not:"
                    " do it around the call, or let it be a tensor that is written in place"
                )
        return None

    @property
    def has_new_tensor(self) -> bool:
        """Whether there is a tensor where there was none."""
        new = self._new_tensors()
        return any(not isinstance(before.get(name), torch.Tensor) for _, name, before in new)

    def put_back_after_error(self, error: object, *_: object) -> None:
        """Set those back that are others now, at the end of a block that raises."""
        if error is None:
            return
        for now, name, before in self._changes():
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
        return (one for one in self._changes() if isinstance(one[0][one[1]], torch.Tensor))

    def _changes(self) -> Iterator[tuple[dict[str, Any], str, dict[str, Any]]]:
        """The same with those that are another number or text, where there was one or nothing."""
        for now, before in self._contents.changed():
            # A dictionary of the user's may have items of its own making.
            for name, value in list(dict.items(now)):
                there = before.get(name)
                if name == "training":
                    continue  # calls in another mode have keys of their own
                if isinstance(value, torch.Tensor):
                    is_other = there is not value
                else:
                    is_plain = isinstance(value, PLAIN) and isinstance(there, PLAIN)
                    is_other = is_plain and Constant(value) != Constant(there)
                if is_other:
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
