"""The text beside saved graphs: their tensors, and what must be as it was."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from cgraph import _core
from cgraph.errors import ArgumentError

__all__ = ["CallNote", "GraphNote", "Leaf", "Notes", "TensorNote"]


@dataclass(frozen=True)
class TensorNote:
    """A tensor by its name.

    Attributes:
        memory: The name of the memory that its storage is, or lies in.
        offset: Where the tensor begins in that memory, in bytes.
        begin: Where its storage begins there.
        is_given: True if it is to be given again; False if it comes with the graphs' pools.
        dtype: As in ``torch.float32``, without ``torch``.
        shape: Its sizes.
        strides: In elements.
        size: The bytes of its storage.
    """

    memory: str
    offset: int
    begin: int
    is_given: bool
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    size: int


@dataclass(frozen=True)
class Leaf:
    """One value of a result.

    Attributes:
        tensor: The tensor that it is, if it is one.
        value: Otherwise the value: None, a bool, an int, a float or a text.
    """

    tensor: TensorNote | None
    value: Any = None


@dataclass(frozen=True)
class CallNote:
    """The calls that a graph serves.

    Attributes:
        reads: The number of what its function reads, among those of :attr:`Notes.reads`.
        arguments: The arguments, torch's settings and the ladder's in words, as names and words.
        leaves: The leaves of the result.
        spec: Their structure, as pytree writes it.
        fresh: The places of the leaves that replays copy to new tensors; None if all of the
            capture's own are returned.
    """

    reads: int
    arguments: list[Any]
    leaves: list[Leaf]
    spec: str
    fresh: list[int] | None


@dataclass(frozen=True)
class GraphNote:
    """A graph by its name.

    Attributes:
        step: How far a replay moves the offset of the default generator; 0 if it draws nothing.
        call: The calls that it serves, if it is one of a ladder.
    """

    step: int
    call: CallNote | None = None


@dataclass(frozen=True)
class Notes:
    """All that Python keeps.

    Attributes:
        versions: What must be as it was, by name.
        tensors: The named tensors.
        graphs: The graphs.
        pools: The bytes of the memory of pools, by its name.
        reads: What functions read: the names of places, and words.
        files: Digests of the source files of these functions, by their paths.
        refused: The reasons why other graphs of the ladder are not in the file, by their names.
    """

    versions: dict[str, str]
    tensors: dict[str, TensorNote]
    graphs: dict[str, GraphNote]
    pools: dict[str, int]
    reads: list[Any] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def versions_now() -> dict[str, str]:
        """Return what a file is good for."""
        versions = {"torch": torch.__version__, "CUDA": str(torch.version.cuda)}
        return {**versions, "cgraph": _core.version(), "Python": platform.python_version()}

    def text(self) -> str:
        """Return them as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> Notes:
        """Read them.

        Raises:
            ArgumentError: Another program wrote the file.
        """
        try:
            read: dict[str, Any] = json.loads(text)
            read["tensors"] = {name: _tensor(one) for name, one in read["tensors"].items()}
            read["graphs"] = {name: _graph(**one) for name, one in read["graphs"].items()}
            return cls(**read)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ArgumentError(
                f"the file's notes are {text[:40]!r}, expected those of cgraph.save: files of Rust"
                " programs are loaded by these"
            ) from error


def _tensor(read: Mapping[str, Any]) -> TensorNote:
    shape, strides = tuple(read["shape"]), tuple(read["strides"])
    return TensorNote(**{**read, "shape": shape, "strides": strides})


def _graph(step: int, call: Mapping[str, Any] | None) -> GraphNote:
    if call is None:
        return GraphNote(step)
    pairs = ((one["tensor"], one["value"]) for one in call["leaves"])
    leaves = [Leaf(None if tensor is None else _tensor(tensor), value) for tensor, value in pairs]
    return GraphNote(step, CallNote(**{**call, "leaves": leaves}))
