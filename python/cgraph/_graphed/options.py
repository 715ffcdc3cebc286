"""The options of ``graphed``, checked."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypedDict

import torch

from cgraph import _driver
from cgraph.errors import ArgumentError

__all__ = [
    "GraphedOptions",
    "Guarded",
    "OnePad",
    "Options",
    "Pad",
    "SideEffects",
    "checked_sizes",
    "identifiers_in",
    "root_of",
]

DEBUG = ("sync", "compare", "poison")
"""The words of the option ``debug``."""

OnePad = Literal["repeat", "zero", "first"] | float | Callable[[torch.Tensor, int], torch.Tensor]
"""The contents of padding rows of one tensor: copies of the last row, zeros, a number, or those
that a function of the tensor and a size returns; copies of the first row only to compare."""
Pad = OnePad | Mapping[str, OnePad]
"""The same for all arguments, or by their names."""
Guarded = Callable[..., Any] | str | Sequence[str] | Mapping[str, bool]
"""Guards besides those on names in the code: a function of the arguments, or dotted names."""
SideEffects = Literal["refuse", "ignore"] | Sequence[str]
"""The treatment of changes in Python that replays do not make."""


class GraphedOptions(TypedDict, total=False):
    """The keywords of :func:`cgraph.graphed`, for type checkers."""

    sizes: Sequence[int] | None
    pad: Pad
    dim: int | Mapping[str, int]
    check_padding: bool
    outputs: Literal["fresh", "static"]
    static_args: Sequence[str] | str
    guards: Guarded | None
    side_effects: SideEffects
    warmup: int
    max_graphs: int | None
    pool: _driver.Pool | None
    on_fail: Literal["eager", "raise"]
    debug: str | None
    check_every: int | None


@dataclass(frozen=True)
class Options:
    """The options of one function, as explained at :func:`cgraph.graphed`.

    Attributes:
        guarded_names: The names that ``guards`` adds.
        unguarded: The dotted names that ``guards`` removes.
        guard: The function of the arguments that ``guards`` is, if it is one.
        dotted: The dotted names that ``guards`` and ``side_effects`` have, by the option.
    """

    sizes: tuple[int, ...] | None = None
    pad: Pad = "repeat"
    dim: int | Mapping[str, int] = 0
    check_padding: bool = True
    outputs: Literal["fresh", "static"] = "fresh"
    static_args: tuple[str, ...] = ()
    side_effects: Literal["refuse", "ignore"] | tuple[str, ...] = "refuse"
    warmup: int = 1
    max_graphs: int | None = None
    pool: Any = None
    on_fail: Literal["eager", "raise"] = "eager"
    debug: tuple[str, ...] = ()
    check_every: int = 0
    guard: Callable[..., Any] | None = None
    guarded_names: frozenset[str] = frozenset()
    unguarded: frozenset[str] = field(default=frozenset())
    dotted: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def most_graphs(self) -> int:
        """Number of keys that may have a graph."""
        return max(64, len(self.sizes or ())) if self.max_graphs is None else self.max_graphs

    def pads(self, names: Sequence[str]) -> list[OnePad]:
        """Return the contents of padding rows of the tensors of these names."""
        if not isinstance(self.pad, Mapping):
            return [self.pad] * len(names)
        return [self.pad.get(root_of(name), "repeat") for name in names]

    def ignores(self, name: str) -> bool:
        """Return whether replays need not make a change at a place."""
        if isinstance(self.side_effects, str):
            return self.side_effects == "ignore"
        return any(
            name == one or name.startswith((f"{one}.", f"{one}[")) for one in self.side_effects
        )

    @classmethod
    def of(cls, given: dict[str, Any]) -> Options:
        """Check options.

        Raises:
            ArgumentError: One of them is not what was expected.
        """
        given = dict(given)
        _choose("outputs", given["outputs"], "fresh", "static")
        _choose("on_fail", given["on_fail"], "eager", "raise")
        _count("warmup", given["warmup"], 1)
        if given["max_graphs"] is not None:
            _count("max_graphs", given["max_graphs"], 1)
        pad = given["pad"]
        for one in pad.values() if isinstance(pad, Mapping) else [pad]:
            if not callable(one) and (isinstance(one, bool) or not isinstance(one, int | float)):
                _choose("pad", one, "repeat", "zero")
        if not isinstance(given["check_padding"], bool):
            raise ArgumentError(
                f"check_padding is {given['check_padding']!r}, expected True or False"
            )
        _pool(given["pool"])
        sizes = given["sizes"]
        guards = _guards(given.pop("guards"))
        side_effects = _side_effects(given["side_effects"])
        names = () if isinstance(side_effects, str) else side_effects
        dotted = {"guards": guards.pop("names", ()), "side_effects": names}
        return replace(
            cls(),
            **{
                **given,
                "sizes": None if sizes is None else checked_sizes(sizes),
                "dim": _dim(given["dim"]),
                # A copy, which the caller cannot change.
                "pad": dict(pad) if isinstance(pad, Mapping) else pad,
                "static_args": _names("static_args", given["static_args"]),
                "side_effects": side_effects,
                "dotted": dotted,
                "debug": _debug(given["debug"]),
                "check_every": _check_every(given["check_every"]),
                **guards,
            },
        )


def root_of(name: str) -> str:
    """Return the argument that a tensor of this name belongs to."""
    return name.split("[", 1)[0].split(".", 1)[0]


def checked_sizes(given: Sequence[int]) -> tuple[int, ...]:
    """Check numbers of rows; return them sorted, each once.

    Raises:
        ArgumentError: There are none, or one is not a positive integer.
    """
    sizes = [given] if isinstance(given, int) else given
    is_sequence = isinstance(sizes, Sequence | set | frozenset | range) and not isinstance(
        sizes, str
    )
    are_counts = is_sequence and all(type(one) is int and one >= 1 for one in sizes)
    if not are_counts or not sizes:
        raise ArgumentError(f"sizes is {given!r}, expected numbers of rows, each at least 1")
    return tuple(sorted(set(sizes)))


def _choose(name: str, given: object, *choices: str) -> None:
    if not isinstance(given, str) or given not in choices:
        expected = " or ".join(map(repr, choices))
        raise ArgumentError(f"{name} is {given!r:.80}, expected {expected}")


def _count(name: str, given: object, least: int) -> None:
    if type(given) is not int or given < least:
        raise ArgumentError(f"{name} is {given!r:.80}, expected a number, at least {least}")


def _pool(given: Any) -> None:
    is_token = isinstance(given, tuple) and [*map(type, given)] == [int, int]
    if given is not None and not is_token and not hasattr(given, "id"):
        raise ArgumentError(
            f"pool is {given!r}, expected a cgraph.MemPool, graph_pool_handle() or other.pool()"
        )


def _dim(given: int | Mapping[str, int]) -> int | Mapping[str, int]:
    numbers = list(given.values()) if isinstance(given, Mapping) else [given]
    for number in numbers:
        if type(number) is not int or number < 0:
            raise ArgumentError(
                f"dim is {given!r}, expected the number of a dimension, at least 0, or a mapping of"
                " arguments' names to such numbers"
            )
    if not numbers:
        raise ArgumentError("dim is empty, expected the name of an argument that has rows")
    # A copy, which the caller cannot change.
    return dict(given) if isinstance(given, Mapping) else given


def _names(name: str, given: object) -> tuple[str, ...]:
    names = (given,) if isinstance(given, str) else given
    if not isinstance(names, Sequence | set | frozenset) or not all(
        isinstance(one, str) for one in names
    ):
        raise ArgumentError(f"{name} is {given!r:.80}, expected a name or several")
    return tuple(names)


def identifiers_in(names: Iterable[str]) -> frozenset[str]:
    """Return the names that dotted names are made of."""
    return frozenset(part for name in names for part in re.findall(r"[^\W\d]\w*", name))


def _side_effects(given: object) -> str | tuple[str, ...]:
    if isinstance(given, str) and given in ("refuse", "ignore"):
        return given
    if isinstance(given, str) or not isinstance(given, Sequence | set | frozenset):
        raise ArgumentError(
            f"side_effects is {given!r:.80}, expected 'refuse', 'ignore' or dotted names, as"
            " ['self.step']"
        )
    return _names("side_effects", given)


def _guards(given: object) -> dict[str, Any]:
    if given is None:
        return {}
    if callable(given):
        return {"guard": given}
    items = (
        given.items()
        if isinstance(given, Mapping)
        else [(one, True) for one in _names("guards", given)]
    )
    added: set[str] = set()
    taken_out: set[str] = set()
    for name, is_guarded in items:
        if not isinstance(name, str) or not isinstance(is_guarded, bool):
            raise ArgumentError(
                f"guards is {given!r:.80}, expected a function of the arguments, dotted names, or"
                " a mapping of such names to True, or to False for those not to guard"
            )
        if is_guarded:
            added.update(identifiers_in([name]))
        else:
            taken_out.add(name)
    return {
        "guarded_names": frozenset(added),
        "unguarded": frozenset(taken_out),
        "names": tuple(name for name, _ in items),
    }


def _debug(given: object) -> tuple[str, ...]:
    """Return the words of a ``debug`` option, or of the environment if it is None."""
    name = "debug" if given is not None else "CGRAPH_DEBUG"
    text = os.environ.get(name, "") if given is None else given
    words: list[Any] = [text]
    if isinstance(text, str):
        words = [one.strip() for one in text.split(",")]
    if words == [""]:
        return ()
    for word in words:
        if word not in DEBUG:
            expected = ", ".join(DEBUG)
            raise ArgumentError(
                f"{name} is {text!r}, expected one or more of {expected}, joined by commas:"
                f" {word!r} is not one of them"
            )
    return tuple(dict.fromkeys(words))


def _check_every(given: object) -> int:
    """Return the number of calls of which one is checked, from the option or the environment."""
    if given is not None:
        _count("check_every", given, 1)
        return given  # type: ignore[return-value]
    text = os.environ.get("CGRAPH_CHECK", "")
    if not text:
        return 0
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentError(f"CGRAPH_CHECK is {text!r}, expected a number, at least 1")
    return int(text)
