"""The options of ``graphed``, checked."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from cgraph.cudagraph import require_mode
from cgraph.errors import ArgumentError

__all__ = ["OnHeld", "Options", "Pad", "checked_sizes"]

DEBUG = ("sync", "eager", "compare", "poison")
"""What debug replays may do; see :mod:`cgraph._functions.debug.replays`."""

Pad = Literal["zero", "repeat"] | Callable[[torch.Tensor, int], torch.Tensor]
"""What padding rows contain: zeros, the last row again, or what a function of a tensor and a size
returns."""
OnHeld = Literal["warn", "clone", "raise", "ignore"]
"""What happens to a result that is still referenced when the next call is about to overwrite it."""


@dataclass(frozen=True)
class Options:
    """As for :func:`cgraph.graphed`, which says what each one means."""

    sizes: tuple[int, ...] | None = None
    pad: Pad = "zero"
    dim: int | Mapping[str, int] = 0
    outputs: Literal["static", "clone"] = "static"
    on_held: OnHeld = "warn"
    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    max_graphs: int | None = None
    max_bytes: int | None = None
    keep_templates: bool = False
    max_recording: int = 5
    max_open: int = 4
    warmup: int = 3
    pool: Any = None
    on_fail: Literal["eager", "raise"] = "eager"
    check_padding: bool = True
    preserve_state: bool = True
    measure: bool = True
    capture_error_mode: str = "thread_local"
    debug: tuple[str, ...] = ()

    @property
    def most_graphs(self) -> int:
        """How many keys have a graph."""
        return max(64, len(self.sizes or ())) if self.max_graphs is None else self.max_graphs

    @property
    def most_open(self) -> int:
        """How many calls of a key wait for their backward passes, each with a graph."""
        return min(self.max_open, self.most_graphs)

    @property
    def wants_captures_alone(self) -> bool:
        """Whether nothing is to run but captures, and nothing put back, without gradients."""
        return not (self.warmup or self.preserve_state or self.debug)

    @classmethod
    def of(cls, given: dict[str, Any]) -> Options:
        """Checked options.

        Raises:
            ArgumentError: One of them is not what was expected.
        """
        _choose("outputs", given.get("outputs", "static"), "static", "clone")
        _choose("on_fail", given.get("on_fail", "eager"), "eager", "raise")
        _choose("on_held", given.get("on_held", "warn"), "warn", "clone", "raise", "ignore")
        for name, least in (("max_recording", 0), ("max_open", 1), ("warmup", 0)):
            _count(name, given.get(name, least), least)
        for name in ("max_graphs", "max_bytes"):
            if given.get(name) is not None:
                _count(name, given[name], 1)
        if not callable(given.get("pad", "zero")):
            _choose("pad", given.get("pad", "zero"), "zero", "repeat")
        for name in ("preserve_state", "measure", "keep_templates", "check_padding"):
            _flag(name, given.get(name, True))
        _pool(given.get("pool"))
        require_mode(given.get("capture_error_mode", "thread_local"))
        made = replace(cls(), **given)
        if any(place < 0 for place in _all("static_argnums", made.static_argnums, int)):
            raise ArgumentError(
                f"static_argnums is {made.static_argnums!r}, expected places from 0 on"
            )
        return replace(
            made,
            sizes=None if made.sizes is None else checked_sizes(made.sizes),
            dim=_dim(made.dim),
            static_argnums=_all("static_argnums", made.static_argnums, int),
            static_argnames=_all("static_argnames", made.static_argnames, str),
            debug=_debug(given.get("debug")),
        )


def checked_sizes(given: Sequence[int]) -> tuple[int, ...]:
    """Numbers of rows, the smallest first, each once.

    Raises:
        ArgumentError: They are none, or none that rows can have.
    """
    sizes = _all("sizes", given, int)
    if not sizes or min(sizes) < 1:
        raise ArgumentError(f"sizes is {given!r}, expected numbers of rows, each at least 1")
    return tuple(sorted(set(sizes)))


def _choose(name: str, given: object, *choices: str) -> None:
    if not isinstance(given, str) or given not in choices:
        expected = " or ".join(map(repr, choices))
        raise ArgumentError(f"{name} is {given!r}, expected {expected}")


def _count(name: str, given: object, least: int) -> None:
    if not isinstance(given, int) or isinstance(given, bool) or given < least:
        raise ArgumentError(f"{name} is {given!r}, expected a number, at least {least}")


def _flag(name: str, given: object) -> None:
    if not isinstance(given, bool):
        raise ArgumentError(f"{name} is {given!r}, expected True or False")


def _pool(given: Any) -> None:
    is_token = isinstance(given, tuple) and [*map(type, given)] == [int, int]
    if given is not None and not is_token and not hasattr(given, "id"):
        raise ArgumentError(
            f"pool is {given!r}, expected a cgraph.MemPool, graph_pool_handle() or other.pool()"
        )


def _dim(given: int | Mapping[str, int]) -> int | Mapping[str, int]:
    numbers = list(given.values()) if isinstance(given, Mapping) else [given]
    for number in numbers:
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise ArgumentError(
                f"dim is {given!r}, expected the number of a dimension, from 0 on, or such a number"
                " for each name of an argument"
            )
    if not numbers:
        raise ArgumentError("dim is empty, expected the name of an argument that has rows")
    # Nobody changes it from here on.
    return dict(given) if isinstance(given, Mapping) else given


def _debug(given: object) -> tuple[str, ...]:
    """The words of a ``debug`` option, or of the environment where it is None."""
    name = "debug" if given is not None else "CGRAPH_DEBUG"
    text = os.environ.get(name, "") if given is None else given
    words: list[Any] = [text]
    if isinstance(text, str):
        words = [word.strip() for word in text.split(",")]
    if words == [""]:
        return ()
    for word in words:
        if word not in DEBUG:
            expected = ", ".join(DEBUG)
            raise ArgumentError(
                f"{name} is {text!r}, expected one or more of {expected}, joined by commas:"
                f" {word!r} is none of them"
            )
    return tuple(dict.fromkeys(words))


def _all(name: str, given: object, kind: type) -> tuple[Any, ...]:
    """A sequence of one kind; one value stands for itself."""
    if isinstance(given, kind) and not isinstance(given, bool):
        return (given,)
    values = tuple(given) if isinstance(given, Sequence | set | frozenset | range) else None
    if values is None or isinstance(given, str):
        raise ArgumentError(f"{name} is {given!r}, expected a sequence of {kind.__name__}")
    for value in values:
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ArgumentError(
                f"{name} is {given!r}, expected a sequence of {kind.__name__}: {value!r} is none"
            )
    return values
