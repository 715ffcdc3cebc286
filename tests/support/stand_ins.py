"""Stand-ins of what cgraph's plugins replace in engines: vLLM 0.33.0 and SGLang 0.5.23.

Each has what the plugins use of the engine's class, under the same names, and calls it in the same
order.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

__all__ = ["install_sglang", "install_vllm"]


def install_vllm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Install vLLM's module of breakable graphs; return it."""
    return _install(
        monkeypatch,
        "vllm.compilation.breakable_cudagraph",
        BreakableCUDAGraphCapture=_vllm_capture(),
    )


def _vllm_capture() -> type:
    class BreakableCUDAGraphCapture:
        """Captures of a thread, with calls between them."""

        _tls = threading.local()

        def __init__(self, pool: Any = None) -> None:
            self.pool = pool
            self.segments: list[Callable[[], Any]] = []
            self.loops = 0

        @classmethod
        def current(cls) -> Any:
            """Return the open capture of this thread."""
            return getattr(cls._tls, "active", None)

        def __enter__(self) -> Any:
            BreakableCUDAGraphCapture._tls.active = self
            self._begin_segment()
            return self

        def __exit__(self, *error: object) -> None:
            try:
                self._end_segment()
            finally:
                BreakableCUDAGraphCapture._tls.active = None

        def _begin_segment(self) -> None:
            self.graph = torch.cuda.CUDAGraph()
            self.graph.capture_begin(pool=self.pool)

        def _end_segment(self) -> None:
            self.graph.capture_end()
            self.segments.append(self.graph.replay)

        def add_eager(self, fn: Callable[[], Any]) -> Any:
            """Call a function between two captures, now and in replays."""
            self._end_segment()
            result = fn()
            self.segments.append(fn)
            self._begin_segment()
            return result

        def replay(self) -> None:
            """Run all segments."""
            self.loops += 1
            for segment in self.segments:
                segment()

    return BreakableCUDAGraphCapture


def install_sglang(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Install SGLang's modules of hooks, breakable graphs and backends; return their contents."""
    executor = "sglang.srt.model_executor"
    hooks = _sglang_hooks()
    registry = _install(monkeypatch, "sglang.srt.plugins.hook_registry", **hooks)
    breakable = _install(
        monkeypatch,
        f"{executor}.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph",
        **_sglang_breakable(),
    )
    base = _sglang_base()
    full = _sglang_full(base)
    _install(
        monkeypatch,
        f"{executor}.runner_backend.base_cuda_graph_backend",
        BaseCudaGraphBackend=base,
    )
    _install(
        monkeypatch,
        f"{executor}.runner_backend.full_cuda_graph_backend",
        FullCudaGraphBackend=full,
    )

    def resolve_decode_backend(cuda_graph_runner: Any) -> Any:
        return full(cuda_graph_runner)

    utils = _install(
        monkeypatch,
        f"{executor}.runner_backend.utils",
        resolve_decode_backend=resolve_decode_backend,
    )
    return SimpleNamespace(
        registry=registry, breakable=breakable, base=base, full=full, utils=utils
    )


def _sglang_hooks() -> dict[str, Any]:
    class HookType(Enum):
        """The kinds of hooks."""

        AFTER = "after"
        AROUND = "around"

    class HookRegistry:
        """Hooks of functions, applied when all plugins have registered theirs."""

        hooks: ClassVar[list[tuple[str, Any, HookType]]] = []

        @classmethod
        def register(cls, target: str, hook: Any, hook_type: HookType = HookType.AFTER) -> None:
            """Note a hook."""
            cls.hooks.append((target, hook, hook_type))

        @classmethod
        def apply_hooks(cls) -> None:
            """Replace the functions."""
            for target, hook, kind in cls.hooks:
                path, name = target.rsplit(".", 1)
                owner: Any = sys.modules.get(path)
                if owner is None:
                    module, holder = path.rsplit(".", 1)
                    owner = getattr(sys.modules[module], holder)
                before = getattr(owner, name)
                after = cls._wrapped(before, hook, kind)
                for module in (owner, *sys.modules.values()):
                    for found in [key for key, one in vars(module).items() if one is before]:
                        setattr(module, found, after)

        @staticmethod
        def _wrapped(original: Any, hook: Any, kind: HookType) -> Any:
            def around(*args: Any, **kwargs: Any) -> Any:
                return hook(original, *args, **kwargs)

            def after(*args: Any, **kwargs: Any) -> Any:
                result = original(*args, **kwargs)
                changed = hook(result, *args, **kwargs)
                return result if changed is None else changed

            return around if kind is HookType.AROUND else after

    return {"HookRegistry": HookRegistry, "HookType": HookType}


def _sglang_breakable() -> dict[str, Any]:
    present: ContextVar[Any] = ContextVar("present", default=None)
    capturing: ContextVar[Any] = ContextVar("capturing", default=None)

    class BreakableCUDAGraph:
        """Segments, and functions between them."""

        def __init__(self) -> None:
            self._segments: list[Any] = []
            self._break_fns: list[Callable[[], Any]] = []

        def replay(self) -> None:
            """Run all, with the stream noted for the functions."""
            token = present.set(object())
            try:
                for place, segment in enumerate(self._segments):
                    segment.replay()
                    if place < len(self._break_fns):
                        self._break_fns[place]()
            finally:
                present.reset(token)

    class BreakableCUDAGraphCapture:
        """A context whose work is captured but for breaks."""

        def __init__(self, cuda_graph: Any, pool: Any = None) -> None:
            self.cuda_graph, self._pool = cuda_graph, pool

        def __enter__(self) -> Any:
            capturing.set(self)
            self._begin()
            return self

        def __exit__(self, *error: object) -> None:
            capturing.set(None)
            self._end()

        def _begin(self) -> None:
            self._graph = torch.cuda.CUDAGraph()
            self._graph.capture_begin(pool=self._pool)

        def _end(self) -> None:
            self._graph.capture_end()
            self.cuda_graph._segments.append(self._graph)

    def eager_on_graph(fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            capture = capturing.get()
            if capture is None:
                return fn(*args)
            capture._end()
            result = fn(*args)
            capture.cuda_graph._break_fns.append(lambda: fn(*args))
            capture._begin()
            return result

        return call

    return {
        "BreakableCUDAGraph": BreakableCUDAGraph,
        "BreakableCUDAGraphCapture": BreakableCUDAGraphCapture,
        "eager_on_graph": eager_on_graph,
        "present": present,
    }


def _sglang_base() -> Any:
    class BaseCudaGraphBackend(ABC):
        """The methods that a runner calls."""

        @abstractmethod
        def capture_session(self, stream: Any) -> Any: ...

        @abstractmethod
        def capture_one(
            self,
            shape_key: Any,
            forward_fn: Any,
            capture_inputs: Any = None,
            post_warmup_hook: Any = None,
        ) -> None: ...

        @abstractmethod
        def can_run(self, forward_batch: Any, shape_key: Any) -> bool: ...

        @abstractmethod
        def replay_session(self) -> Any: ...

        @abstractmethod
        def replay(self, shape_key: Any, static_forward_batch: Any, **kwargs: Any) -> Any: ...

        @abstractmethod
        def cleanup(self) -> None: ...

    return BaseCudaGraphBackend


def _sglang_full(base: Any) -> Any:
    class FullCudaGraphBackend(base):  # type: ignore[misc]
        """One graph for each shape."""

        def __init__(self, cuda_graph_runner: Any) -> None:
            self._cuda_graph_runner = cuda_graph_runner
            self._device_module = cuda_graph_runner.device_module
            self._tp_group = SimpleNamespace(barrier=lambda: None)
            self._pool: Any = None

        @contextlib.contextmanager
        def capture_session(self, stream: Any) -> Iterator[None]:
            """Have a pool."""
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            yield

        def capture_one(self, *args: Any, **kwargs: Any) -> None:
            """Be replaced."""
            raise AssertionError("SGLang's own backend captures")

        def can_run(self, forward_batch: Any, shape_key: Any) -> bool:
            """Be replaced."""
            raise AssertionError("SGLang's own backend is asked")

        @contextlib.contextmanager
        def replay_session(self) -> Iterator[None]:
            """Do nothing."""
            yield

        def replay(self, *args: Any, **kwargs: Any) -> Any:
            """Be replaced."""
            raise AssertionError("SGLang's own backend replays")

        def cleanup(self) -> None:
            """Drop the pool."""
            self._pool = None

    return FullCudaGraphBackend


def _install(monkeypatch: pytest.MonkeyPatch, path: str, **contents: Any) -> ModuleType:
    """Make a module and its packages importable, as long as the test runs."""
    names = path.split(".")
    for count in range(1, len(names) + 1):
        name = ".".join(names[:count])
        if name not in sys.modules:
            made = ModuleType(name)
            made.__path__ = []
            monkeypatch.setitem(sys.modules, name, made)
            if count > 1:
                package = sys.modules[".".join(names[: count - 1])]
                monkeypatch.setattr(package, names[count - 1], made, raising=False)
    vars(sys.modules[path]).update(contents)
    return sys.modules[path]
