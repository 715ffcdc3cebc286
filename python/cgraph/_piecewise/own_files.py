"""Folders and files that only this user can have written: what is read from them becomes code."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

__all__ = ["make_folder", "read_file", "write_file"]


def make_folder(folder: Path, root: Path) -> None:
    """Make a folder, with those above it, and require that only this user writes there.

    Args:
        folder: The folder.
        root: A folder above it, or itself: from here on it matters who may write.

    Raises:
        OSError: A folder cannot be made or written, is another user's, or others may write to it.
    """
    for one in (*reversed(folder.parents), folder):
        if not one.exists():
            one.mkdir(mode=0o700, exist_ok=True)
        if one == root or root in one.parents:
            _require_own(one, os.stat(one))
    with tempfile.TemporaryFile(dir=folder):
        pass


def read_file(path: Path) -> bytes:
    """Return the content of a file that only this user can have written.

    Raises:
        FileNotFoundError: There is none.
        OSError: It cannot be read, is no plain file or another user's, or others may write to it.
    """
    # A pipe would wait for a writer, and a link may lead anywhere.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(path, flags), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError("it is no plain file")
        _require_own(path, found)
        return file.read()


def write_file(path: Path, content: bytes) -> None:
    """Put a file in its place, whole or not at all.

    Raises:
        OSError: It cannot be written; what was there before stays.
    """
    handle, name = tempfile.mkstemp(dir=path.parent)
    try:
        with open(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _require_own(path: Path, found: os.stat_result) -> None:
    if found.st_uid not in (os.geteuid(), 0):
        raise OSError(f"{path} belongs to user {found.st_uid}, expected {os.geteuid()}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = oct(stat.S_IMODE(found.st_mode))
        raise OSError(f"others may write to {path}, whose mode is {mode}: chmod go-w")
