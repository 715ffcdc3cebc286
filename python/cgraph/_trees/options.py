"""The options of graph trees, checked."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from cgraph import _torch
from cgraph._text import nearest
from cgraph.errors import ArgumentError

__all__ = ["TreeOptions", "unknown"]


@dataclass(frozen=True)
class TreeOptions:
    """The options of a function of a tree, as ``docs/trees.md`` explains them.

    Attributes:
        strict: What cannot be captured raises.
        input_mutation: Functions that write to their inputs are captured.
        held_outputs: Outputs that are held when their step ends get memory of their own, or raise
            at their next use.
        skip_dynamic_graphs: Functions with inputs that are sizes are not captured.
        capture_sizes: The sizes that are captured; all if None.
        max_sizes: How many sizes are captured; any number if None.
        max_rerecords: How often in a row a function may be captured anew in one place because its
            static inputs are elsewhere, while these captures serve fewer than eight replays each.
    """

    strict: bool = False
    input_mutation: bool = True
    held_outputs: Literal["keep", "raise"] = "keep"
    skip_dynamic_graphs: bool = False
    capture_sizes: tuple[tuple[int, ...], ...] | None = None
    max_sizes: int | None = None
    max_rerecords: int = 128

    @classmethod
    def of(cls, given: Mapping[str, Any] | TreeOptions | None) -> TreeOptions:
        """Check options, unless they are; others are those of the environment, or of torch.

        Raises:
            ArgumentError: An option is unknown, or its value is not what was expected.
        """
        if isinstance(given, TreeOptions):
            return given
        rest = dict(given or {})
        found = cls.taken_from(rest)
        for name in rest:
            raise unknown(name, cls.names())
        return found

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of all options."""
        return [one.name for one in fields(cls)]

    @classmethod
    def taken_from(cls, given: dict[str, Any]) -> TreeOptions:
        """Take options out of a dictionary that has others too, and check them.

        Raises:
            ArgumentError: The value of an option is not what was expected.
        """
        values = {}
        for one in fields(cls):
            kind, of_torch = _KINDS[one.name]
            variable = f"CGRAPH_{one.name.upper()}"
            configured = given.get(of_torch, _torch.configured_of_inductor(of_torch))
            if one.name in given:
                values[one.name] = kind(f"the option {one.name}", given.pop(one.name))
            elif os.environ.get(variable):
                values[one.name] = kind(variable, _read(os.environ[variable]))
            elif configured is not None:
                values[one.name] = kind(f"torch's {of_torch}", configured)
        if forced := os.environ.get(_FORCED):
            values["strict"] = _flag(_FORCED, _read(forced))
        return cls(**values)


# torch lets it win over all that a program says.
_FORCED = "TORCHINDUCTOR_CUDAGRAPH_OR_ERROR"


def unknown(name: object, known: Sequence[str], others: Iterable[str] = ()) -> ArgumentError:
    """Return the error of an option that is unknown; it names the nearest, or those known best."""
    near = nearest(name, [*known, *others])
    expected = f"did you mean {near!r}?" if near else f"expected one of {', '.join(known)}"
    return ArgumentError(f"unknown option {name!r:.80}: {expected}")


def _flag(name: str, given: Any) -> bool:
    if type(given) not in (bool, int) or given not in (0, 1):
        raise ArgumentError(f"{name} is {given!r:.80}, expected True or False")
    return bool(given)


def _held(name: str, given: Any) -> str:
    # The other word is torch's.
    given = "keep" if given == "user_visible" else given
    if given not in ("raise", "keep"):
        raise ArgumentError(f"{name} is {given!r:.80}, expected 'keep' or 'raise'")
    return str(given)


def _limit(name: str, given: Any) -> int | None:
    return None if given is None else _count(name, given)


def _count(name: str, given: Any) -> int:
    if type(given) is not int or given < 0:
        raise ArgumentError(f"{name} is {given!r:.80}, expected a number, at least 0")
    return given


def _sizes(name: str, given: Any) -> tuple[tuple[int, ...], ...] | None:
    if given is None:
        return None
    sizes = (given,) if isinstance(given, int) else given
    if isinstance(sizes, (tuple, list, set, frozenset, range)):
        found = [one if isinstance(one, tuple) else (one,) for one in sizes]
        if all(type(size) is int for one in found for size in one):
            return tuple(found)
    raise ArgumentError(
        f"{name} is {given!r:.80}, expected sizes: integers, or tuples of them where calls have"
        " several"
    )


_Kind = Callable[[str, Any], Any]
# The check of each option, and its name in torch's configuration.
_KINDS: dict[str, tuple[_Kind, str]] = {
    "strict": (_flag, "triton.cudagraph_or_error"),
    "input_mutation": (_flag, "triton.cudagraph_support_input_mutation"),
    "held_outputs": (_held, "triton.cudagraph_trees_generation_cloning"),
    "skip_dynamic_graphs": (_flag, "triton.cudagraph_skip_dynamic_graphs"),
    "capture_sizes": (_sizes, "triton.cudagraph_capture_sizes"),
    "max_sizes": (_limit, "triton.cudagraph_dynamic_shape_rerecord_limit"),
    "max_rerecords": (_count, "triton.cudagraph_unexpected_rerecord_limit"),
}


def _read(text: str) -> Any:
    """Return what a variable of the environment says: a flag, a number, sizes or a word."""
    words = {"true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    try:
        sizes = [tuple(int(one) for one in part.split("x")) for part in text.split(",")]
    except ValueError:
        return text
    if len(sizes) > 1:
        return tuple(sizes)
    return sizes[0][0] if len(sizes[0]) == 1 else tuple(sizes)
