"""``torch.compile`` under dispatch modes.

A function that torch is to compile and that is called in a dispatch mode runs as it is, so that the
mode sees its operators. torch notes that with its code, and never compiles it again, in no mode
either; ``torch.cond`` cannot be called at all from then on.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Bystander", "Uncompiled"]


class Bystander(TorchDispatchMode):
    """A mode that leaves compiling alone: of compiled code it sees only some operators."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch compile."""
        return True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """The same for older torch."""
        return True


class Uncompiled:
    """A context in which this thread runs as it is what torch is to compile; torch forgets that.

    Attributes:
        has_met: Whether there was such a function.
    """

    def __init__(self) -> None:
        self.has_met = False
        self._entered: list[list[Uncompiled]] = []
        self._was_loaded = False

    def __enter__(self) -> Uncompiled:
        """Compile nothing from now on."""
        contexts = _here.contexts
        self._was_loaded = _stand_in()
        contexts.append(self)
        self._entered.append(contexts)
        return self

    def __exit__(self, *_: object) -> None:
        """Let torch go on, also where another thread leaves than has entered."""
        self._entered.pop().remove(self)
        if not self._was_loaded and _codes():
            # What has loaded the compiler in the block found no stance of ours.
            self.has_met = True
            torch.compiler.reset()


class _Here(threading.local):
    """The contexts of a thread."""

    def __init__(self) -> None:
        self.contexts: list[Uncompiled] = []


_here = _Here()


class _Stance:
    """Stands in for torch's stance, which is one for all threads.

    It is asked whenever a function is called that torch is to compile.
    """

    def __init__(self, real: Any) -> None:
        self._real = real

    @property
    def stance(self) -> Any:
        """``"force_eager"`` on threads that are not to compile."""
        if not _here.contexts:
            return self._real.stance
        # Functions that torch is to leave alone ask as well: they have no callback.
        if callable(sys._getframe(1).f_locals.get("callback")):
            for context in _here.contexts:
                context.has_met = True
        return "force_eager"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def _stand_in() -> bool:
    """See that torch's stance is ours, which otherwise is as the user's; whether there is one."""
    # Whoever compiles has loaded it.
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    real = getattr(frames, "_stance", None)
    if real is not None and not isinstance(real, _Stance):
        frames._stance = _Stance(real)
    return real is not None


def _codes() -> Any:
    """The code that torch has looked at to compile it."""
    frames: Any = sys.modules.get("torch._dynamo.convert_frame")
    return frames and frames.input_codes.seen
