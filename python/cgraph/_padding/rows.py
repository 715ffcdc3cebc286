"""The rows of a call: how many it has, and in which dimensions."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from cgraph._graphed.call import Call
from cgraph._graphed.options import Options, root_of
from cgraph.errors import ArgumentError

__all__ = ["Fit", "Rows"]


@dataclass(frozen=True)
class Fit:
    """The rows of a call.

    Attributes:
        rows: Number of rows.
        size: The size that it is padded to; None if it has more rows than any size.
        dims: For each tensor the dimension of the rows; None for a tensor without rows.
        without: The names of tensors that have another length in that dimension.
    """

    rows: int
    size: int | None
    dims: tuple[int | None, ...]
    without: tuple[str, ...] = ()


class Rows:
    """A finder of the rows of a function's calls, which learns which tensors have none."""

    def __init__(self, options: Options) -> None:
        self._sizes = options.sizes
        self._dim = options.dim
        # The names of tensors that are known to have none.
        self._without: set[str] = set()

    def fit(self, call: Call, sizes: Sequence[int]) -> Fit | None:
        """Find the rows of a call; None if no tensor has any.

        The first tensor that has the dimension gives the number of rows. Another tensor has rows
        if it is as long there, and never was of another length.

        Args:
            call: The call.
            sizes: The sizes that it may be padded to, the smallest first.

        Raises:
            ArgumentError: An argument that ``dim`` names does not have the dimension.
        """
        dims: list[int | None] = []
        rows: int | None = None
        others: list[str] = []
        for tensor, name in zip(call.tensors, call.names, strict=True):
            its_dim = self._dim if isinstance(self._dim, int) else self._dim.get(root_of(name))
            if not isinstance(self._dim, int) and name in self._dim:
                if tensor.dim() <= (dim := self._dim[name]):
                    raise ArgumentError(
                        f"the rows of {name} are along dimension {dim}, but it has shape"
                        f" {tuple(tensor.shape)}: name another one in dim, or leave {name} out"
                    )
            if its_dim is None or tensor.dim() <= its_dim or name in self._without:
                dims.append(None)
                continue
            rows = tensor.shape[its_dim] if rows is None else rows
            dims.append(its_dim if tensor.shape[its_dim] == rows else None)
            if tensor.shape[its_dim] != rows:
                others.append(name)
        if rows is None:
            return None
        place = bisect.bisect_left(sizes, rows)
        size = sizes[place] if place < len(sizes) else None
        return Fit(rows, size, tuple(dims), tuple(others))

    def learn(self, call: Call) -> None:
        """Note which tensors have no rows, from a call that was captured."""
        if self._sizes is not None:
            found = self.fit(call, self._sizes)
            self._without.update(() if found is None else found.without)

    def clear(self) -> None:
        """Forget what calls have shown."""
        self._without.clear()
