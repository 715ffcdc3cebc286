"""What a function must leave as it is among its arguments, since its replays do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from cgraph import _core, _torch
from cgraph._recording.calls import Call
from cgraph._recording.conditions import NotReadyError, WarmupError
from cgraph._recording.noise import same_rows
from cgraph._state.attributes import changes
from cgraph._state.constants import Snapshot
from cgraph.errors import CaptureError

__all__ = ["Training", "Unchanged"]


class Training:
    """Whether modules train, and which tensors require a gradient, as it is now.

    Args:
        flags: Each of the modules, and whether it trains.
        leaves: Tensors of which a function may change whether they require a gradient.

    Attributes:
        is_of_a_break: Tells of a module whether a break lets it train, or not.
    """

    def __init__(
        self, flags: Sequence[tuple[torch.nn.Module, bool]], leaves: Iterable[torch.Tensor]
    ) -> None:
        self.is_of_a_break: Callable[[torch.nn.Module], bool] = lambda _: False
        self._known = flags
        self._leaves = [(leaf, leaf.requires_grad) for leaf in leaves if leaf.is_leaf]
        # Tells at once that nothing has changed.
        self._flags = _core.Flags([vars(part) for part, _ in flags])

    def captures_now(self) -> None:
        """Note that a capture comes next: calls before it may have frozen parameters for good."""
        self._leaves = [(leaf, leaf.requires_grad) for leaf, _ in self._leaves]

    def require_same(self) -> None:
        """Refuse a function that lets modules train, or not.

        Raises:
            NotReadyError: It does.
        """
        if self._flags.are_same():
            return
        for part, flag in self._known:
            if part.training is not flag and not self.is_of_a_break(part):
                raise NotReadyError(changes("training", flag, part.training))

    def after(self, error: type[BaseException] | None, *_: object) -> None:
        """Let it be so again at the end of a block that raises.

        A function may have frozen parameters that it was to thaw at its end.

        Args:
            error: What the block raises; None for nothing.
        """
        if error is not None and not issubclass(error, WarmupError):
            for part, flag in self._known:
                part.training = flag
            for leaf, flag in self._leaves:
                if leaf.requires_grad is not flag and leaf.is_leaf:
                    leaf.requires_grad_(flag)


class Unchanged:
    """The arguments of a call before the function is called.

    Args:
        call: The call.
        statics: What the function is given instead of the tensors that are copied.
        training: Whether the modules train that it reaches.
    """

    def __init__(self, call: Call, statics: Sequence[torch.Tensor], training: Training) -> None:
        self._training = training
        self._call = call
        self._statics = statics
        constants = [leaf for leaf in call.leaves if leaf.kind == "constant"]
        known = [(leaf.name, leaf.value, Snapshot(leaf.value)) for leaf in constants]
        self._constants = [one for one in known if one[2]]
        fixed = [(leaf.name, leaf.value) for leaf in call.leaves if leaf.kind == "fixed"]
        tensors = [*zip(call.names, statics, strict=True), *fixed]
        self._tensors = [(name, one, _torch.place_of(one)) for name, one in tensors]

    def written(self, is_written: Callable[[torch.Tensor], bool]) -> set[int]:
        """The places of copies that have other contents than the call's tensors.

        Whatever has written them: torch's operators, NumPy or kernels that are launched by hand.

        Args:
            is_written: Whether the memory of a tensor of the call was written itself.
        """
        with torch.no_grad(), _torch.without_modes():
            pairs = enumerate(zip(self._statics, self._call.tensors, strict=True))
            return {
                place
                for place, (static, tensor) in pairs
                if not (is_written(tensor) or same_rows(static, tensor, None).all())
            }

    def require(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a function that has changed more of its arguments than what is in tensors.

        Args:
            args: What :meth:`Call.arguments` made of the statics, and the function was given.
            kwargs: Likewise.

        Raises:
            CaptureError: It has; values that are no tensors are as they were again.
            NotReadyError: It lets modules train, or not.
        """
        self._training.require_same()
        changed = [one for one in self._constants if one[2].changed is not None]
        for _, _, snapshot in changed:
            snapshot.put_back()
        for name, value, _ in changed:
            raise CaptureError(
                f"the function changes {name}, a {type(value).__qualname__}, and replays do not:"
                " return what is new"
            )
        for name, static in zip(self._call.names, self._statics, strict=True):
            for attribute in [one for one in vars(static) if not one.startswith("_")]:
                # Who gets the memory next is not to find it.
                delattr(static, attribute)
                raise CaptureError(
                    f"the function sets the attribute {attribute} of {name}, and replays do not:"
                    " return what is new"
                )
        for name, tensor, before in self._tensors:
            if _torch.place_of(tensor) != before:
                raise CaptureError(
                    f"the function changes the shape or the memory of {name} in place, and replays"
                    " do not: return a new tensor"
                )
        if not self._call.consists_of(args, kwargs, self._statics):
            raise CaptureError(
                "the function changes a list, a dictionary or another container among its"
                " arguments, and replays do not: return what is new, or write to the tensors"
                " in place"
            )
