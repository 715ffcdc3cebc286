"""Compiled pieces on disk, for the next start."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cgraph import _core, _torch
from cgraph._piecewise.config import PiecewiseConfig
from cgraph._piecewise.own_files import make_folder, read_file, write_file
from cgraph._piecewise.size_guards import Guard
from cgraph._reason import Reason
from cgraph.causes import Cause
from cgraph.errors import CgraphWarning

__all__ = ["CompileCache", "StoredPiece", "key_of"]

_log = logging.getLogger("cgraph.piecewise")
_MAGIC = b"cgraph piece 2\n"


@dataclass(frozen=True)
class StoredPiece:
    """A compiled piece.

    Attributes:
        code: torch's bytes.
        guards: The conditions on the open size that its compilation has taken for true.
    """

    code: bytes
    guards: tuple[Guard, ...] = ()


class CompileCache:
    """The compiled pieces of one model, each in a file of its own.

    A file has a line of JSON before torch's bytes: the key, the versions, the guards and a checksum
    of all. It is written beside its place and put there at once, so that processes which write at
    the same time leave one of their files whole. A file that is not as expected is named, and
    written anew. What is read becomes code: others must not be able to write there.

    Args:
        folder: The folder, which is made; None for a cache that holds nothing.
        key: The key of the model; see :func:`key_of`.
        root: The folder above it of all models; the folder itself by default.
    """

    def __init__(self, folder: Path | None, key: str, root: Path | None = None) -> None:
        self.folder, self._key = folder, key
        if folder is not None:
            try:
                make_folder(folder, root or folder)
            except (OSError, ValueError) as error:
                _warn(f"{folder} is not used, so pieces are compiled at each start: {error}")
                self.folder = None

    @classmethod
    def of(cls, config: PiecewiseConfig, graph: torch.fx.GraphModule) -> CompileCache:
        """Return the cache of a model, in the folder of this process's rank.

        ``CGRAPH_DISABLE_COMPILE_CACHE=1`` turns all caches off, ``CGRAPH_CACHE_DIR`` is the folder
        of all, by default ``~/.cache/cgraph``.
        """
        if not config.cache or os.environ.get("CGRAPH_DISABLE_COMPILE_CACHE", "0") not in ("", "0"):
            said = "CGRAPH_DISABLE_COMPILE_CACHE is set" if config.cache else "cache is False"
            _log.info("compiled pieces are not kept, as %s", said)
            return cls(None, "")
        key = key_of(config, graph)
        given = config.cache_dir or os.environ.get("CGRAPH_CACHE_DIR") or "~/.cache/cgraph"
        try:
            root = Path(given).expanduser().absolute()
            folder = root / "pieces" / key[:10] / f"rank_{_torch.rank()}"
        except (RuntimeError, ValueError) as error:
            _warn(f"{given} is not used, so pieces are compiled at each start: {error}")
            return cls(None, "")
        found = cls(folder, key, root)
        if found.folder is not None:
            _log.info("compiled pieces are kept in %s", folder)
        return found

    def get(self, number: int, size: int | None) -> StoredPiece | None:
        """Return a piece compiled for a size, or for any; None if there is none.

        Args:
            number: The number of the piece.
            size: The size; None for any.
        """
        if self.folder is None:
            return None
        path = self._path(number, size)
        try:
            content = read_file(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            _warn(f"{path} cannot be read, and its piece is compiled anew: {error}")
            return None
        try:
            return self._opened(content, number, size)
        except (ValueError, RecursionError) as error:
            self.refuse(number, size, error)
            return None

    def refuse(self, number: int, size: int | None, reason: object) -> None:
        """Tell that a file cannot be used; it is replaced when its piece has been compiled."""
        _warn(f"{self._path(number, size)} is refused, and its piece is compiled anew: {reason}")

    def put(self, number: int, size: int | None, piece: StoredPiece) -> None:
        """Store a piece; where that fails, tell of it."""
        if self.folder is None:
            return
        header = json.dumps(self._head(number, size, piece))
        path = self._path(number, size)
        try:
            write_file(path, _MAGIC + header.encode() + b"\n" + piece.code)
        except OSError as error:
            _warn(f"{path} cannot be written: {error}")

    def _opened(self, content: bytes, number: int, size: int | None) -> StoredPiece:
        """Check the content of a file.

        Raises:
            ValueError: It is not what was stored here.
        """
        if not content.startswith(_MAGIC):
            raise ValueError("it is no file of cgraph's, or of another version of it")
        line, found, code = content[len(_MAGIC) :].partition(b"\n")
        header = json.loads(line) if found else None
        if not isinstance(header, dict):
            raise ValueError("it has no header")
        if not isinstance(guards := header.get("guards"), list):
            raise ValueError(f"its guards are {guards!r:.40}, expected a list")
        piece = StoredPiece(code, tuple(map(Guard.parsed, guards)))
        for name, wanted in self._head(number, size, piece).items():
            if name != "guards" and header.get(name) != wanted:
                raise ValueError(f"its {name} is {header.get(name)!r:.40}, expected {wanted!r:.40}")
        return piece

    def _head(self, number: int, size: int | None, piece: StoredPiece) -> dict[str, Any]:
        guards = json.dumps(piece.guards)
        return {
            "key": self._key,
            "torch": torch.__version__,
            "cgraph": _core.version(),
            "piece": number,
            "size": size,
            "guards": piece.guards,
            "sha256": hashlib.sha256(guards.encode() + b"\n" + piece.code).hexdigest(),
        }

    def _path(self, number: int, size: int | None) -> Path:
        assert self.folder is not None
        return self.folder / f"piece_{number}_{'any' if size is None else size}"


def key_of(config: PiecewiseConfig, graph: torch.fx.GraphModule) -> str:
    """Return a key of all that compiled pieces depend on.

    The split and the options of Inductor, Inductor's own configuration and the modes of torch, the
    versions, the device, the graph with the form of its inputs, and the content of each source file
    that the graph was traced through.
    """
    parts: list[object] = [
        (config.splitting_ops, config.merge_splits, _named(config.inductor_options)),
        (torch.__version__, _core.version(), _torch.device_names()),
        _torch.compiler_state(),
        *_torch.codes_of(graph),
    ]
    parts += map(_torch.form_of_input, _torch.example_inputs(graph.graph))
    files = sorted(_torch.traced_files(graph))
    _log.debug("files of the key of compiled pieces: %s", ", ".join(files))
    for path in files:
        try:
            parts.append((path, hashlib.sha256(Path(path).read_bytes()).hexdigest()))
        except OSError:
            # Code that was typed or made has no file; the graph has what it does.
            parts.append((path, None))
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _named(options: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return options with what is the same in each process: passes by their own identifiers."""
    return [(name, value.uuid() if callable(value) else value) for name, value in options]


def _warn(text: str) -> None:
    Reason(Cause.COMPILE_CACHE, f"cache of compiled pieces: {text}").warn(kind=CgraphWarning)
