"""vLLM on cgraph: a plugin that vLLM finds by itself, in all of its processes.

With ``CGRAPH_VLLM=1`` in the environment, all graphs of vLLM are cgraph's: its V1 and V2 runners,
its wrapper for pieces and its breakable graphs look ``torch.cuda.CUDAGraph`` and
``torch.cuda.graph`` up when they capture. Breakable graphs, which vLLM replays in a loop of Python,
are replayed by one native call.
"""

from __future__ import annotations

import functools
import os
from importlib import import_module
from typing import Any

from cgraph.integrations.native_replays import NativeReplay, log
from cgraph.patch import Patch, patch_torch

__all__ = ["MIRRORS", "register", "unregister"]

MIRRORS = "vLLM 0.33.0"
"""The version whose classes are known here."""

_MODULE, _CLASS = "vllm.compilation.breakable_cudagraph", "BreakableCUDAGraphCapture"


def register() -> None:
    """Let vLLM's graphs be cgraph's from now on, if ``CGRAPH_VLLM`` is 1; a second call is nothing.

    vLLM calls it in each process that it starts. It does not initialise CUDA. If vLLM's class of
    breakable graphs is not where it was, that class is left alone, with one line in the log.
    """
    global _patch, _replaced
    if os.environ.get("CGRAPH_VLLM") != "1" or _patch is not None:
        return
    _patch = patch_torch()
    log.info("torch's CUDA graphs are cgraph's, as CGRAPH_VLLM=1 says")
    try:
        captures = getattr(import_module(_MODULE), _CLASS)
        replay = captures.replay
    except Exception as error:  # vLLM would end with it
        log.warning(
            "%s.%s is left alone, and breakable graphs are replayed by vLLM's own loop: it is not"
            " where %s has it (%s)",
            _MODULE,
            _CLASS,
            MIRRORS,
            error,
        )
        return
    native = NativeReplay(MIRRORS, ["segments"], lambda segments: segments.replay)

    @functools.wraps(replay)
    def replay_natively(self: Any) -> Any:
        return native(replay, self)

    captures.replay = replay_natively
    _replaced = captures, replay


def unregister() -> None:
    """Undo :func:`register`: torch and vLLM are as before, for captures to come."""
    global _patch, _replaced
    if _replaced is not None:
        captures, replay = _replaced
        captures.replay = replay
    if _patch is not None:
        _patch.undo()
    _patch = _replaced = None


_patch: Patch | None = None
_replaced: tuple[Any, Any] | None = None
