"""The differences between the effects of a replay and of eager, as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from cgraph import _torch
from cgraph._debug.steps import Wrong
from cgraph._torch import tree_flatten
from cgraph.errors import CompareError

__all__ = [
    "Leaf",
    "ValueDifference",
    "difference",
    "is_tensor",
    "named",
    "put",
    "wrong_nan",
    "wrong_value",
]


class Leaf(NamedTuple):
    """One value of a result.

    Attributes:
        name: The path to it, such as ``result[0]``.
        value: The value.
    """

    name: str
    value: Any


class ValueDifference(NamedTuple):
    """The first leaf that differs.

    Attributes:
        name: Its name.
        text: Name and values as text.
    """

    name: str
    text: str


def difference(
    found: Sequence[Leaf],
    expected: Sequence[Leaf],
    check: Callable[[torch.Tensor, torch.Tensor], Wrong | None],
) -> ValueDifference | None:
    """Find the first leaf that differs from eager.

    Args:
        found: The leaves that a replay left.
        expected: The leaves that eager left.
        check: Compares two tensors.
    """
    names, right = [one.name for one in found], [one.name for one in expected]
    if names != right:
        return ValueDifference(
            "result", f"it has {', '.join(names)}, but eager has {', '.join(right)}"
        )
    for (name, value), (_, wanted) in zip(found, expected, strict=True):
        wrong: str | None
        if is_tensor(value) and is_tensor(wanted):
            problem = check(value, wanted)
            wrong = None if problem is None else problem.text
        else:
            is_same = type(value) is type(wanted) and _equal(value, wanted)
            wrong = None if is_same else f"it is {value!r:.80}, in eager {wanted!r:.80}"
        if wrong is not None:
            return ValueDifference(name, f"{name}: {wrong}")
    return None


def wrong_value(found: torch.Tensor, expected: torch.Tensor) -> Wrong | None:
    """Describe how a tensor differs from the right one, beyond rounding. NaN equals NaN.

    >>> wrong_value(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0])).text
    'it is 2 at [1], in eager 4; 1 of 2 elements differ, by 2 at most'
    """
    with torch.no_grad(), _torch.without_modes():
        found, expected = _comparable(found), _comparable(expected)
        nan = wrong_nan(found, expected)
        if nan is not None:
            return nan
        try:
            torch.testing.assert_close(found, expected, equal_nan=True)
        except AssertionError as error:
            return Wrong(_words(found, expected) or " ".join(str(error).split()), False)
    return None


def wrong_nan(found: torch.Tensor, expected: torch.Tensor) -> Wrong | None:
    """Describe where a tensor has NaN and the right one does not.

    >>> wrong_nan(torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 4.0])).text
    'it is NaN at [1], in eager 4; 1 of 2 elements are NaN that should not be'
    """
    with torch.no_grad(), _torch.without_modes():
        found, expected = _comparable(found), _comparable(expected)
        if found.shape != expected.shape or not (_has_nan(found) and _has_nan(expected)):
            return None
        new = found.isnan() & ~expected.isnan()
        count = int(new.sum())
        if count == 0:
            return None
        place = tuple(new.nonzero()[0].tolist())
        return Wrong(
            f"it is NaN{_at(place)}, in eager {_number(expected[place])}; {count} of"
            f" {new.numel()} elements are NaN that should not be",
            True,
        )


def put(leaves: Sequence[Any], outputs: Sequence[Any], title: str) -> None:
    """Copy results to a graph's own results.

    Raises:
        CompareError: Their number, shapes or types differ.
    """
    if len(leaves) != len(outputs):
        raise CompareError(
            f"{title} returned {len(leaves)} values, but at the capture {len(outputs)}, which a"
            " graph cannot do. Return as many each time, or call it without a graph"
        )
    with torch.no_grad():
        for leaf, own in zip(leaves, outputs, strict=True):
            if not is_tensor(own) or leaf is own:
                continue
            if not is_tensor(leaf) or (leaf.shape, leaf.dtype) != (own.shape, own.dtype):
                raise CompareError(
                    f"{title} returned {_brief(leaf)}, but at the capture {_brief(own)}, which a"
                    " graph cannot do. Return tensors of fixed shape, or call it without a graph"
                )
            # Elements that a stride of zero repeats are written once.
            strides = own.stride() if own.layout is torch.strided else own.shape
            for dim, (size, stride) in enumerate(zip(own.shape, strides, strict=True)):
                if size > 1 and stride == 0:
                    own, leaf = own.narrow(dim, 0, 1), leaf.narrow(dim, 0, 1)
            own.detach().copy_(leaf)


def named(result: Any) -> list[Leaf]:
    """Copy a result's leaves, with their names."""
    leaves = tree_flatten(result)[0]
    names = _torch.names_in("result", result)
    copies = [one.detach().clone() if is_tensor(one) else one for one in leaves]
    return [Leaf(name, value) for name, value in zip(names, copies, strict=True)]


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor."""
    return isinstance(value, torch.Tensor)


def _words(found: torch.Tensor, expected: torch.Tensor) -> str | None:
    """Describe the element that differs most; None if elements cannot be compared."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"it is {_brief(found)}, in eager {_brief(expected)}"
    if found.layout is not torch.strided or found.numel() == 0:
        return None
    wide = torch.complex128 if found.is_complex() else torch.float64
    gap = (found.to(wide) - expected.to(wide)).abs().nan_to_num(nan=torch.inf)
    gap[(found == expected) | (found.isnan() & expected.isnan())] = 0
    place = tuple(int(one) for one in torch.unravel_index(gap.argmax(), gap.shape))
    count, most = int((gap > 0).sum()), _number(gap[place])
    return (
        f"it is {_number(found[place])}{_at(place)}, in eager {_number(expected[place])};"
        f" {count} of {gap.numel()} elements differ, by {most} at most"
    )


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that operators can compare: they cannot for floats of one byte."""
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor


def _has_nan(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's type has NaN, in a layout that can be read."""
    return tensor.layout is torch.strided and (tensor.is_floating_point() or tensor.is_complex())


def _at(place: tuple[int, ...]) -> str:
    return f" at {list(place)}" if place else ""


def _number(value: torch.Tensor) -> str:
    number = value.item()
    return f"{number:.6g}" if isinstance(number, float) else str(number)


def _brief(value: Any) -> str:
    if not is_tensor(value):
        return f"{value!r:.80}"
    return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"


def _equal(value: Any, wanted: Any) -> bool:
    try:
        return value is wanted or bool(value == wanted)
    except Exception:  # a type that cannot be compared is equal only to itself
        return False
