"""The text beside saved graphs: their tensors, and what must be as it was."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import torch

from cgraph.errors import ArgumentError

__all__ = ["GraphNote", "Notes", "TensorNote"]


@dataclass(frozen=True)
class TensorNote:
    """A tensor by its name.

    Attributes:
        memory: The name of the memory that its storage is, or lies in.
        offset: Where the tensor begins in that memory, in bytes.
        is_given: True if it is to be given again; False if it comes with the graphs' pools.
        dtype: As in ``torch.float32``, without ``torch``.
        shape: Its sizes.
        strides: In elements.
        size: The bytes of its storage.
    """

    memory: str
    offset: int
    is_given: bool
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    size: int


@dataclass(frozen=True)
class GraphNote:
    """A graph by its name.

    Attributes:
        step: How far a replay moves the offset of the default generator; 0 if it draws nothing.
    """

    step: int


@dataclass(frozen=True)
class Notes:
    """All that Python keeps.

    Attributes:
        versions: What must be as it was, by name.
        tensors: The named tensors.
        graphs: The graphs.
        pools: The bytes of the memory of pools, by its name.
    """

    versions: dict[str, str]
    tensors: dict[str, TensorNote]
    graphs: dict[str, GraphNote]
    pools: dict[str, int]

    @staticmethod
    def versions_now() -> dict[str, str]:
        """Return what a file is good for."""
        return {"torch": torch.__version__, "CUDA": str(torch.version.cuda)}

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
            tensors = {name: _tensor(**one) for name, one in read["tensors"].items()}
            graphs = {name: GraphNote(**one) for name, one in read["graphs"].items()}
            return cls(read["versions"], tensors, graphs, read["pools"])
        except (ValueError, KeyError, TypeError) as error:
            raise ArgumentError(
                f"the file's notes are {text[:40]!r}, expected those of cgraph.save: files of Rust"
                " programs are loaded by these"
            ) from error


def _tensor(shape: list[int], strides: list[int], **others: Any) -> TensorNote:
    return TensorNote(shape=tuple(shape), strides=tuple(strides), **others)
