"""``torch.compile`` and higher-order operators, as ``torch.cond``, under dispatch modes.

A function to be compiled that is called in a dispatch mode runs uncompiled, so that the mode sees
its operators. torch notes that with the function's code and never compiles it again, even without a
mode; from then on ``torch.cond`` cannot be called at all.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch

from cgraph._torch.private_names import TorchDispatchMode, of_modes, of_operators, of_torch

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Bystander", "Uncompiled", "around_compilations", "is_compiled_code"]


class Bystander(TorchDispatchMode):
    """A mode that does not keep torch from compiling; it sees only some operators of compiled code.

    It sees higher-order operators, as other modes do.

    Attributes:
        uncompiled: The context that keeps torch from compiling where the mode must see all
            operators, also on autograd's threads, which get the modes of the thread that waits for
            them.
    """

    supports_higher_order_operators = True
    uncompiled: Uncompiled | None = None

    def __enter__(self) -> Self:
        """Enter the mode."""
        if not _ASKS_MODES:
            _show_operators(type(self))
        return super().__enter__()  # type: ignore[no-any-return,no-untyped-call]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch compile."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from loading its compiler, which takes seconds, only to skip each call.

        The compiler skips cgraph's code anyway.
        """
        return False

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Let older torch compile."""
        return True


# False in torch 2.8, which refuses such an operator in a mode of a class without a rule for it.
_ASKS_MODES = hasattr(TorchDispatchMode, "supports_higher_order_operators")


def _show_operators(kind: type[Bystander]) -> None:
    """Let modes of a class see all existing higher-order operators."""
    for operator in [*of_operators._higher_order_ops.values()]:
        operator.python_key_table.setdefault(kind, functools.partial(_shown, operator))


def _shown(operator: Any, mode: Bystander, *args: Any, **kwargs: Any) -> Any:
    return mode.__torch_dispatch__(operator, (), args, kwargs)  # type: ignore[no-untyped-call]


def is_compiled_code(file: str, scope: Mapping[str, Any]) -> bool:
    """Return whether torch's compiler wrote code, by its file and its globals."""
    if file == "<string>" and "__name__" not in scope:
        # The launcher of a Triton kernel, or a guard on shapes.
        return {"runner", "launcher"} <= scope.keys() or scope.keys() - {"__builtins__"} == {"G"}
    return _is_compiled_file(file)


@functools.cache
def _is_compiled_file(file: str) -> bool:
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    is_there = folder is not None and file.startswith(os.path.join(folder, ""))
    return is_there or f"{os.sep}torchinductor_" in file


@contextmanager
def around_compilations(block: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Enter a block around each compilation of Dynamo's on this thread in a ``with`` block."""
    module: Any = sys.modules.get("torch._dynamo.callback")
    if module is None:
        yield
        return
    handler, thread, entered = module.callback_handler, threading.get_ident(), ExitStack()

    def begin(given: Any) -> None:
        # torch's own graphs are recorded by a call of the function.
        is_recording = "RECORDING" in str(getattr(given, "callback_trigger", ""))
        if threading.get_ident() == thread and not is_recording:
            entered.enter_context(block())

    def end(_: Any) -> None:
        if threading.get_ident() == thread:
            entered.close()

    handler.register_start_callback(begin)
    handler.register_end_callback(end)
    try:
        yield
    finally:
        entered.close()
        with suppress(ValueError):  # somebody has cleared them
            handler.remove_start_callback(begin)
            handler.remove_end_callback(end)


class Uncompiled:
    """A context in which functions to be compiled run uncompiled; torch forgets that later.

    It holds for the thread that enters it, and where a mode with this context is active.
    """

    def __init__(self) -> None:
        self._has_met = False
        self._entered: list[list[Uncompiled]] = []
        self._was_loaded = True

    @property
    def has_met(self) -> bool:
        """True if there was something that torch would have compiled."""
        return self._has_met or (bool(self._entered) and not self._was_loaded and bool(_codes()))

    def __enter__(self) -> Uncompiled:
        """Compile nothing from now on."""
        contexts = _here.contexts
        self._was_loaded = _follow()
        contexts.append(self)
        self._entered.append(contexts)
        return self

    def __exit__(self, *_: object) -> None:
        """Let torch compile again, even if another thread leaves than the one that entered."""
        if not self._entered:
            return
        self._has_met = self.has_met
        self._entered.pop().remove(self)
        if not self._was_loaded and _codes():
            # The compiler was loaded inside the block, and did not ask us.
            torch.compiler.reset()

    @property
    def is_entered(self) -> bool:
        """True if the context is in force."""
        return bool(self._entered)

    def meets(self) -> None:
        """Note that there was something that torch would have compiled."""
        self._has_met = True


class _Here(threading.local):
    """The contexts of a thread."""

    def __init__(self) -> None:
        self.contexts: list[Uncompiled] = []


_here = _Here()


def _contexts() -> list[Uncompiled]:
    """Return the contexts that hold for this thread."""
    if _here.contexts or not of_torch._len_torch_dispatch_stack():
        return _here.contexts
    modes = of_modes._get_current_dispatch_mode_stack()
    contexts = [one.uncompiled for one in modes if isinstance(one, Bystander)]
    # A context that is over may remain where another thread has left it.
    return [one for one in contexts if one is not None and one.is_entered]


def _follow() -> bool:
    """Make torch ask us before it runs a function to be compiled; return whether it can."""
    # Code that compiles has loaded it.
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    asked = getattr(frames, "_callback_from_stance", None)
    if asked is None:
        return False
    if not isinstance(asked, _Asked):
        frames._callback_from_stance = _Asked(asked)
    return True


class _Asked:
    """A replacement for the function by which torch finds the compiler of a call, or None."""

    def __init__(self, real: Callable[[Any], Any]) -> None:
        self._real = real
        functools.update_wrapper(self, real)

    def __call__(self, callback: Any) -> Any:
        """Return the compiler; None where contexts hold."""
        found = self._real(callback)
        contexts = _contexts()
        if not contexts:
            return found
        if callable(callback) and found is not None:
            for context in contexts:
                context.meets()
        return None


def _codes() -> Any:
    """Return the code that torch has examined to compile it."""
    frames: Any = sys.modules.get("torch._dynamo.convert_frame")
    return frames and frames.input_codes.seen
