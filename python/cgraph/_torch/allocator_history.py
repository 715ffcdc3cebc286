"""Torch's record of its allocator's actions."""

from __future__ import annotations

import threading
from typing import Any

import torch

from cgraph._source import is_omitted

__all__ = ["AllocatorHistory", "recorded_frames"]

_MOST_ENTRIES = 1 << 20
_lock = threading.Lock()
_users = 0
_is_ours = False


class AllocatorHistory:
    """A part of one device's record, from construction to :meth:`close`.

    It turns the record on, without stacks, unless the record is already on.

    Args:
        ordinal: The device's number.
    """

    def __init__(self, ordinal: int) -> None:
        global _users, _is_ours
        self._ordinal = ordinal
        with _lock:
            if _users == 0:
                _is_ours = not torch._C._cuda_isHistoryEnabled()
                if _is_ours:
                    _switch("all")
            _users += 1
        self._last: dict[str, Any] | None = None
        try:
            self._last = next(reversed(self._entries()), None)
        except BaseException:
            self.close()
            raise

    def entries(self) -> list[dict[str, Any]] | None:
        """Return the actions since construction, in order; None if the record was too short."""
        entries = self._entries()
        if self._last is None:
            return entries
        for place in reversed(range(len(entries))):
            if entries[place] == self._last:
                return entries[place + 1 :]
        return None

    def close(self) -> None:
        """Turn the record off again if cgraph turned it on and no other part is open."""
        global _users
        with _lock:
            _users -= 1
            if _users == 0 and _is_ours:
                _switch(None)

    def _entries(self) -> list[dict[str, Any]]:
        traces: list[list[dict[str, Any]]]
        traces = torch.cuda.memory._snapshot()["device_traces"]
        return traces[self._ordinal] if self._ordinal < len(traces) else []


def recorded_frames(entry: dict[str, Any]) -> tuple[str, ...]:
    """Return the lines of the user's Python in an entry, the innermost last.

    There are none unless the user has turned on torch's record with stacks.
    """
    return tuple(
        f"{one['filename']}:{one['line']} {one['name']}"
        for one in reversed(entry.get("frames", ()))
        if one["filename"].endswith(".py") and not is_omitted(one["filename"])
    )


def _switch(enabled: str | None) -> None:
    torch.cuda.memory._record_memory_history(
        enabled,  # type: ignore[arg-type]
        context=None,
        stacks="python",
        max_entries=_MOST_ENTRIES,
    )
