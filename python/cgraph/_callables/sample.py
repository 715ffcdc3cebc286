"""The arguments that a callable is captured with, and how those of later calls match them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from cgraph import _torch
from cgraph.errors import ArgumentError, CallableError, KeywordError

__all__ = ["Sample"]


class Sample:
    """The sample arguments of a callable, for its capture.

    Attributes:
        args: The positional arguments.
        tensors: The tensors among their leaves, in order.
        is_flat: True if they are just tensors, by position.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Their order is the caller's choice.
        kwargs = dict(sorted(kwargs.items()))
        self.args, self._kwargs = args, kwargs
        self._leaves, self._spec = _torch.tree_flatten((args, kwargs))
        self._paths = _torch.leaf_names((args, kwargs))
        self.tensors = tuple(leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor))
        # True if non-tensor arguments must equal those of the sample.
        self.compares_constants = True
        self.is_flat = not kwargs and all(isinstance(one, torch.Tensor) for one in args)

    def separate(self, others: Iterable[torch.Tensor]) -> None:
        """Give tensors that share memory with others, or within themselves, memory of their own.

        Otherwise they could not hold the values of later calls, and ``autograd.grad`` would count
        the gradient of a tensor that stands for two arguments twice.
        """
        taken = [_extent(other) for other in others]
        for place, leaf in enumerate(self._leaves):
            if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
                continue
            start, end = _extent(leaf)
            overlaps = any(start < last and first < end for first, last in taken)
            if overlaps or _torch.overlaps_itself(leaf):
                own = leaf.detach().clone(memory_format=torch.contiguous_format)
                self._leaves[place] = own.requires_grad_(leaf.requires_grad)
            taken.append((start, end))
        self.tensors = tuple(leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor))
        self.args, self._kwargs = _torch.tree_unflatten(self._leaves, self._spec)

    def call(self, function: Callable[..., Any]) -> Any:
        """Call a function, or the forward of a module, with the arguments."""
        if isinstance(function, torch.nn.Module):
            # The rest of its __call__ runs around the graphed forward.
            return _torch.call_forward(function, self.args, self._kwargs)
        return function(*self.args, **self._kwargs)

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors, with their paths."""
        for path, leaf in zip(self._paths, self._leaves, strict=True):
            if isinstance(leaf, torch.Tensor):
                yield path, leaf

    def matched(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor, ...]:
        """Return the tensors of a later call, in the order of those of the sample.

        Raises:
            ArgumentError: The arguments have another structure, or a constant differs.
        """
        if self.is_flat and not kwargs and len(args) == len(self.tensors):
            for argument in args:
                if not isinstance(argument, torch.Tensor):
                    break
            else:
                return args
        kwargs = dict(sorted(kwargs.items()))
        found, spec = _torch.tree_flatten((args, kwargs))
        if spec != self._spec:
            paths = _torch.leaf_names((args, kwargs))
            missing = [path for path in self._paths if path not in paths]
            surplus = [path for path in paths if path not in self._paths]
            kind = KeywordError if kwargs.keys() - self._kwargs.keys() else ArgumentError
            raise kind(
                f"{name} was called with {len(found)} values in another order or container than"
                f" the {len(self._leaves)} of its sample: missing {', '.join(missing) or 'none'},"
                f" not expected {', '.join(surplus) or 'none'}"
            )
        tensors = []
        for path, constant, value in zip(self._paths, self._leaves, found, strict=True):
            if isinstance(constant, torch.Tensor):
                if not isinstance(value, torch.Tensor):
                    raise ArgumentError(
                        f"argument {path} of {name} is {value!r:.80}, expected a tensor of shape"
                        f" {tuple(constant.shape)} and {constant.dtype}"
                    )
                tensors.append(value)
            elif not self.compares_constants:
                continue
            elif type(value) is not type(constant) or not _equal(value, constant):
                raise CallableError(
                    f"argument {path} of {name} is {value!r:.80}, expected {constant!r:.80}: it is"
                    " not a tensor, so the capture made it a constant"
                )
        return tuple(tensors)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses that a tensor lies between."""
    return _torch.span_of(tensor) if tensor.layout is torch.strided else (0, 0)


def _equal(value: Any, constant: Any) -> bool:
    try:
        return value is constant or bool(value == constant)
    except Exception:  # a type that cannot be compared is equal only to itself
        return False
