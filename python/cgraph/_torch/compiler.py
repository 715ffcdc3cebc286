"""``torch.compile`` and operators of higher order, as ``torch.cond``, under dispatch modes.

A function that torch is to compile and that is called in a dispatch mode runs as it was written, so
that the mode sees its operators. torch notes that with its code and never compiles it again, in no
mode either; ``torch.cond`` cannot be called at all from then on.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import _ops
from torch.utils import _python_dispatch as python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Bystander", "Uncompiled", "is_compiled_code"]


class Bystander(TorchDispatchMode):
    """A mode that torch compiles in as in none. Of compiled code it sees only some operators.

    It sees operators of higher order, as others do.

    Attributes:
        uncompiled: What keeps torch from compiling where the mode has to see all of them, also on
            autograd's threads, which get the modes of the thread that waits for them.
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
        """Keep torch from loading its compiler, which takes seconds, to look away from each call.

        The compiler looks at no code of cgraph's anyway.
        """
        return False

    @classmethod
    def is_infra_mode(cls) -> bool:
        """The same for older torch."""
        return True


# torch 2.8 does not: it refuses such an operator in a mode of a class that it has no rule for.
_ASKS_MODES = hasattr(TorchDispatchMode, "supports_higher_order_operators")


def _show_operators(kind: type[Bystander]) -> None:
    """Let modes of a class see all operators of higher order that there are."""
    for operator in [*_ops._higher_order_ops.values()]:
        operator.python_key_table.setdefault(kind, functools.partial(_shown, operator))


def _shown(operator: Any, mode: Bystander, *args: Any, **kwargs: Any) -> Any:
    return mode.__torch_dispatch__(operator, (), args, kwargs)  # type: ignore[no-untyped-call]


@functools.cache
def is_compiled_code(file: str) -> bool:
    """Whether a file has been written by torch's compiler."""
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    is_there = folder is not None and file.startswith(os.path.join(folder, ""))
    return is_there or f"{os.sep}torchinductor_" in file


class Uncompiled:
    """A context in which what torch is to compile runs as it was written, which torch forgets.

    This holds for the thread that enters, and where a mode is active that has this context.
    """

    def __init__(self) -> None:
        self._has_met = False
        self._entered: list[list[Uncompiled]] = []
        self._was_loaded = True

    @property
    def has_met(self) -> bool:
        """Whether there was something that torch would have compiled."""
        return self._has_met or (bool(self._entered) and not self._was_loaded and bool(_codes()))

    def __enter__(self) -> Uncompiled:
        """Compile nothing from now on."""
        contexts = _here.contexts
        self._was_loaded = _follow()
        contexts.append(self)
        self._entered.append(contexts)
        return self

    def __exit__(self, *_: object) -> None:
        """Let torch go on, also where another thread leaves than has entered."""
        if not self._entered:
            return
        self._has_met = self.has_met
        self._entered.pop().remove(self)
        if not self._was_loaded and _codes():
            # What has loaded the compiler in the block did not ask us.
            torch.compiler.reset()

    @property
    def is_entered(self) -> bool:
        """Whether it holds."""
        return bool(self._entered)

    def meets(self) -> None:
        """Note that there was something."""
        self._has_met = True


class _Here(threading.local):
    """The contexts of a thread."""

    def __init__(self) -> None:
        self.contexts: list[Uncompiled] = []


_here = _Here()


def _contexts() -> list[Uncompiled]:
    """Those that hold for what this thread does."""
    if _here.contexts or not torch._C._len_torch_dispatch_stack():
        return _here.contexts
    modes = python_dispatch._get_current_dispatch_mode_stack()
    contexts = [one.uncompiled for one in modes if isinstance(one, Bystander)]
    # One that is over may have stayed, where another thread has left it.
    return [one for one in contexts if one is not None and one.is_entered]


def _follow() -> bool:
    """See that torch asks us before it runs what it is to compile; whether it can."""
    # Whoever compiles has loaded it.
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    asked = getattr(frames, "_callback_from_stance", None)
    if asked is None:
        return False
    if not isinstance(asked, _Asked):
        frames._callback_from_stance = _Asked(asked)
    return True


class _Asked:
    """Stands in for the function by which torch finds the compiler for a call, or None."""

    def __init__(self, real: Callable[[Any], Any]) -> None:
        self._real = real
        functools.update_wrapper(self, real)

    def __call__(self, callback: Any) -> Any:
        """None where contexts hold."""
        found = self._real(callback)
        contexts = _contexts()
        if not contexts:
            return found
        if callable(callback) and found is not None:
            for context in contexts:
                context.meets()
        return None


def _codes() -> Any:
    """The code that torch has looked at to compile it."""
    frames: Any = sys.modules.get("torch._dynamo.convert_frame")
    return frames and frames.input_codes.seen
