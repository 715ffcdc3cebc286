"""The names of a function's arguments, and which of them are declared static."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

from cgraph._text import nearest
from cgraph.errors import ArgumentError

__all__ = ["Arguments"]

_ANY = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


class Arguments:
    """The names of a function's arguments.

    Args:
        function: The function, bound if it is a method.
        static: The names of arguments whose tensors are not copied.

    Raises:
        ArgumentError: The function has no such argument.
    """

    def __init__(self, function: Callable[..., Any], static: Collection[str]) -> None:
        # Parameters that may be given by place come first.
        self._names: list[str] = []
        self._places = 0
        self._rest = "args"
        self._signatures = _signatures_of(function)
        parameters = self._signatures[0].parameters.values() if self._signatures else ()
        self._takes_any = not parameters
        for parameter in parameters:
            if parameter.kind == parameter.VAR_POSITIONAL:
                self._rest = parameter.name
            self._takes_any |= parameter.kind in _ANY
            if parameter.kind not in _ANY:
                self._names.append(parameter.name)
                self._places += parameter.kind != parameter.KEYWORD_ONLY
        # Of a wrapper its own, not those of the wrapped one.
        own = self._signatures[-1].parameters.values() if self._signatures else ()
        kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
        self._keywords = {one.name for one in own if one.kind in kinds}
        self._static = frozenset(static)
        self.require_names("static_args", static)

    def fit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether the function can be called with these arguments, as far as is known."""
        for signature in self._signatures:
            with suppress(TypeError):
                signature.bind(*args, **kwargs)
                return True
        return not self._signatures

    def require_names(self, option: str, given: Collection[str]) -> None:
        """Refuse an option that names arguments that the function does not have."""
        if self._takes_any:
            return
        for name in given:
            if name not in self._names:
                near = nearest(name, self._names)
                hint = f"the nearest one is {near!r}, and " if near else ""
                raise ArgumentError(
                    f"{option} is {given!r}, expected names of arguments, and {name!r} is not one:"
                    f" {hint}it has {', '.join(self._names) or 'no arguments'}"
                )

    def are_in_order(self, names: Collection[str]) -> bool:
        """Return whether the function sees the order of these keywords, as in ``**kwargs``."""
        return sum(name not in self._keywords for name in names) > 1

    def name(self, place: int) -> str:
        """Return the name of a positional argument."""
        count = self._places
        return self._names[place] if place < count else f"{self._rest}[{place - count}]"

    def is_static(self, name: str) -> bool:
        """Return whether the tensors of an argument are read where they lie."""
        return name in self._static


def _signatures_of(function: Callable[..., Any]) -> list[inspect.Signature]:
    """Return the signatures of a function, the one with names first; empty if none is known.

    A wrapper that takes anything passes it to the wrapped function, perhaps with more of its own.
    """
    try:
        own = inspect.signature(function, follow_wrapped=False)
        wrapped = inspect.signature(function)
    except (TypeError, ValueError):  # some functions of C have none
        return []
    takes_any = any(one.kind in _ANY for one in own.parameters.values())
    return [wrapped, own] if takes_any and own != wrapped else [own]
