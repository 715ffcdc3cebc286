"""A function as a module whose passes are captured, and stand-ins for its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch

from cgraph import _torch
from cgraph.errors import CallableError, CaptureError

__all__ = [
    "FunctionModule",
    "NoGradientError",
    "require_in_place",
    "stand_ins",
]


class NoGradientError(Exception):
    """No result has a backward pass to come; if there is one, it is inside the function."""


class FunctionModule(torch.nn.Module):
    """A function as a module that has the parameters the function reaches.

    Args:
        function: The function.
        modules: The modules that it reaches.
        watched: Returns a block in which a call of it is observed.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        modules: Sequence[torch.nn.Module],
        watched: Callable[[], AbstractContextManager[None]],
    ) -> None:
        super().__init__()
        self._watched = watched
        self.reached = torch.nn.ModuleList(modules)
        # As a tuple: a module would become a part of this module.
        self._function = (function,)
        self.__qualname__ = getattr(function, "__qualname__", type(function).__qualname__)

    def let_go(self) -> None:
        """Let the observer of captures go, as no more are to come."""
        self._watched = nullcontext

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function.

        Raises:
            CallableError: ``retain_grad()`` was called on its result.
            NoGradientError: Its result requires no gradient.
        """
        with self._watched():
            result = self._function[0](*args, **kwargs)
        outputs = [one for one in _torch.tree_iter(result) if isinstance(one, torch.Tensor)]
        if not any(one.requires_grad for one in outputs):
            raise NoGradientError
        for one in outputs:
            if not one.is_leaf and one.retains_grad:
                raise CallableError(
                    "retain_grad() was called on a result, but replays do not call it: call it on"
                    " what the function returns"
                )
        return result


@contextmanager
def stand_ins(modules: Sequence[torch.nn.Module]) -> Iterator[dict[int, torch.nn.Parameter]]:
    """Give modules other parameters of the same memory; yield the real ones by the others' ``id``.

    While the result of an earlier call is alive, its parameters have autograd nodes that belong to
    the stream of that call. The nodes of a capture must not wait for them.
    """
    parts = [part for module in modules for part in module.modules()]
    places = [
        (part._parameters, name, real)
        for part in parts
        for name, real in part._parameters.items()
        if real is not None
    ]
    noting = [part for part in parts if _torch.knows_its_weights(part)]
    notes = [dict(vars(part)) for part in noting]
    made: dict[int, torch.nn.Parameter] = {}
    reals = {id(real): real for _, _, real in places}
    for _, _, real in places:
        if id(real) not in made:
            made[id(real)] = _stand_in(real)
    # The function sees whether there are gradients; a gradient that it changes is another object.
    standing = {number: _gradient_of(one, reals[number]) for number, one in made.items()}
    try:
        for owner, name, real in places:
            owner[name] = made[id(real)]
        for part in noting:
            _torch.note_weights(part)
        yield {id(made[id(real)]): real for _, _, real in places}
        if any(made[number].grad is not one for number, one in standing.items()):
            raise CallableError(
                "the function changes gradients, as backward() and zero_grad() do, and its result"
                " has a backward pass to come: do that outside of the call, or all of it"
                " inside"
            )
    finally:
        for owner, name, real in places:
            owner[name] = real
        for part, known in zip(noting, notes, strict=True):
            now = vars(part)
            # A flag that the function has set stays, as after any call.
            plain = {name for name, one in now.items() if isinstance(one, int | float | str)}
            now.update({name: one for name, one in known.items() if name not in plain})


def require_in_place(
    modules: Sequence[torch.nn.Module], parameters: Mapping[int, torch.nn.Parameter]
) -> None:
    """Refuse a function that moved stand-ins to other memory than the parameters'.

    It has then read a copy, in which replays would find the weights of the capture.
    """
    for module in modules:
        for name, made in module.named_parameters():
            real = parameters.get(id(made))
            if real is None or _torch.memory_of(real) is None:
                continue
            if _torch.place_of(made) != _torch.place_of(real):
                raise CaptureError(
                    f"the function moves {name} to other memory, as .data = ... does, where replays"
                    " would not find it: write to it in place, with copy_()"
                )


def _gradient_of(stand_in: torch.nn.Parameter, real: torch.nn.Parameter) -> torch.Tensor | None:
    """Give a stand-in a gradient of one element, not to be changed; None if there is none."""
    if real.grad is None or stand_in.layout is not torch.strided:
        return None
    with suppress(RuntimeError, TypeError):  # a class that requires another gradient
        stand_in.grad = stand_in.detach().new_zeros(()).expand(stand_in.shape)
    return stand_in.grad


def _stand_in(real: torch.nn.Parameter) -> torch.nn.Parameter:
    """Make a parameter of the same memory and class, with the same attributes."""
    made: Any = real.detach()
    if type(made) is not type(real):
        made = _torch.in_class(made, type(real))
    # The same dictionary: an attribute set on one is set on the other.
    made.__dict__ = vars(real)
    return made.requires_grad_(real.requires_grad)  # type: ignore[no-any-return]
