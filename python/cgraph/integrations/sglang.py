"""SGLang on cgraph: a plugin that SGLang finds by itself, in all of its processes.

With ``CGRAPH_SGLANG=1`` in the environment, all graphs of SGLang are cgraph's, its breakable graphs
are replayed by one native call, and full graphs of the decode phase are those of a
:class:`cgraph.GraphLadder`.
"""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cgraph.graph_ladder import GraphLadder
from cgraph.graphs import capture_scope
from cgraph.integrations.native_replays import NativeReplay, log
from cgraph.patch import Patch, patch_torch

__all__ = ["MIRRORS", "LadderBackend", "register", "unregister"]

MIRRORS = "SGLang 0.5.23"
"""The version whose classes are known here."""

_EXECUTOR = "sglang.srt.model_executor"
_REPLAY = (
    f"{_EXECUTOR}.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph"
    ".BreakableCUDAGraph.replay"
)
_DECODE = f"{_EXECUTOR}.runner_backend.utils.resolve_decode_backend"
_FULL = f"{_EXECUTOR}.runner_backend.full_cuda_graph_backend.FullCudaGraphBackend"
_BASE = f"{_EXECUTOR}.runner_backend.base_cuda_graph_backend.BaseCudaGraphBackend"
_HOOKS = "sglang.srt.plugins.hook_registry"

_SWITCHES = (
    "SGLANG_ENABLE_GRAPH_POOL_BORROW",
    "SGLANG_ENABLE_GRAPH_POOL_PRECARVE",
    "SGLANG_MEMORY_SAVER_CUDA_GRAPH",
)


def register() -> None:
    """Let SGLang's graphs be cgraph's from now on, if ``CGRAPH_SGLANG`` is 1.

    SGLang calls it in each process that it starts, and then applies the hooks that it registers.
    It does not initialise CUDA. A second call does nothing. What is not where it was in SGLang is
    left alone, with one line in the log.
    """
    global _patch
    if os.environ.get("CGRAPH_SGLANG") != "1" or _patch is not None:
        return
    _patch = patch_torch()
    log.info("torch's CUDA graphs are cgraph's, as CGRAPH_SGLANG=1 says")
    native = NativeReplay(MIRRORS, ["_segments", "_break_fns"], lambda segments: segments)
    _hook(_REPLAY, native, "AROUND")
    _hook(_DECODE, _decode_backend, "AFTER")


def unregister() -> None:
    """Let torch's names be torch's again. Hooks that SGLang has applied stay."""
    global _patch
    if _patch is not None:
        _patch.undo()
    _patch = None


class LadderBackend:
    """SGLang's interface of graph backends, on a :class:`cgraph.GraphLadder`.

    Args:
        theirs: SGLang's own backend of full graphs, whose pool and sessions are used.

    Results live as long as SGLang's own: until the next replay of the same shape.
    """

    def __init__(self, theirs: Any) -> None:
        self._theirs = theirs
        self._synchronize: Callable[[], object] = theirs._device_module.synchronize
        self._barrier: Callable[[], object] = theirs._tp_group.barrier
        self._ladder = GraphLadder(weak_outputs=False)
        self._stream: Any = None

    @contextmanager
    def capture_session(self, stream: Any) -> Iterator[None]:
        """Return a context for all captures on a stream."""
        with self._theirs.capture_session(stream), capture_scope(self._theirs._pool):
            self._stream = stream
            try:
                yield
            finally:
                self._stream = None

    def capture_one(
        self,
        shape_key: Any,
        forward_fn: Callable[[], Any],
        capture_inputs: Any = None,
        post_warmup_hook: Callable[[], object] | None = None,
    ) -> None:
        """Warm up twice, and capture a function for a shape, without a first replay.

        Args:
            shape_key: The key of replays.
            forward_fn: The function.
            capture_inputs: Objects that replays read.
            post_warmup_hook: Called after each warm-up, as the function may change state.
        """

        def warm_up() -> None:
            for _ in range(2):
                self._synchronize()
                self._barrier()
                forward_fn()
                if post_warmup_hook is not None:
                    post_warmup_hook()

        self._ladder.capture(
            shape_key,
            forward_fn,
            stream=self._stream,
            pool=self._theirs._pool,
            before=warm_up,
            keep=(capture_inputs,),
            # SGLang registers the buffers of collectives when the session ends.
            run=False,
        )

    def can_run(self, forward_batch: Any, shape_key: Any) -> bool:
        """Return whether a shape was captured."""
        return shape_key in self._ladder

    @contextmanager
    def replay_session(self) -> Iterator[None]:
        """Return a context for replays."""
        with self._theirs.replay_session():
            yield

    def replay(self, shape_key: Any, static_forward_batch: Any, **kwargs: Any) -> Any:
        """Replay the graph of a shape; return its result."""
        return self._ladder(shape_key)

    def cleanup(self) -> None:
        """Drop all graphs."""
        self._ladder.clear()
        self._theirs.cleanup()


_patch: Patch | None = None


def _hook(target: str, hook: Callable[..., Any], kind: str) -> None:
    """Register a hook with SGLang, for a function that is there."""
    try:
        pkgutil.resolve_name(target)
        registry = pkgutil.resolve_name(f"{_HOOKS}.HookRegistry")
        kinds = pkgutil.resolve_name(f"{_HOOKS}.HookType")
        registry.register(target, hook, getattr(kinds, kind))
    except Exception as error:  # an import may fail in any way
        log.warning("%s is left alone: it is not as %s has it (%s)", target, MIRRORS, error)


def _decode_backend(theirs: Any, *args: Any, **kwargs: Any) -> LadderBackend | None:
    """Return a backend in place of SGLang's own for full graphs; None leaves that."""
    try:
        if type(theirs) is not pkgutil.resolve_name(_FULL):
            return None
        runner = theirs._cuda_graph_runner
        if getattr(runner, "enable_profile_cuda_graph", False) or any(map(_is_on, _SWITCHES)):
            return None
        ours = LadderBackend(theirs)
        pkgutil.resolve_name(_BASE).register(LadderBackend)
    except (ImportError, AttributeError) as error:
        log.warning("%s is left alone: it is not as %s has it (%s)", _FULL, MIRRORS, error)
        return None
    return ours


def _is_on(switch: str) -> bool:
    return os.environ.get(switch, "").lower() in ("1", "true", "yes", "y")
