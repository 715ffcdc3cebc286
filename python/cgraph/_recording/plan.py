"""How a key of a graphed function is to be captured."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cgraph._state.search import Found
from cgraph._state.surroundings import modules_of, tensors_of

__all__ = ["Plan"]


@dataclass(frozen=True)
class Plan:
    """How a key is to be captured.

    Attributes:
        function: What is captured.
        name: Its name.
        pool: The pool of the capture.
        stream: The stream that captures without gradients are made on.
        mode: The capture error mode.
        warmup: How often the function is called before.
        preserve: Put back what the calls before, the capture and the timed replays change.
        measure: Take the times of eager calls and of replays.
        keep_template: Keep what the graph can be instantiated from again.
        instantiates: Make the exec as well; otherwise the template waits for it.
        only_captures: Nothing runs but the capture, so that static tensors may have any contents.
        dictionaries: What holds the attributes that the function may set.
        search: Finds tensors that the function may find elsewhere than in modules, and what has
            them.
        moved: Names a tensor of a module that lies elsewhere than when the key was asked for.
        compiles: Whether what torch is to compile is captured compiled.
        debugs: Whether calls are to find a mistake.
    """

    function: Callable[..., Any]
    name: str
    pool: Any
    stream: Any
    mode: str
    warmup: int
    preserve: bool
    measure: bool
    keep_template: bool
    instantiates: bool
    only_captures: bool
    dictionaries: Sequence[dict[str, Any]]
    search: Callable[[], Found]
    moved: Callable[[], str | None]
    compiles: bool
    debugs: bool

    def found(self) -> Found:
        """What the search finds that is to be followed and put back."""
        return self.search() if self.preserve else Found.nothing()

    def parts(self, modules: Sequence[torch.nn.Module], found: Found) -> list[torch.nn.Module]:
        """The modules that the function reaches, with what they consist of.

        Args:
            modules: Those among the arguments of a call.
            found: What :meth:`found` has found.
        """
        held = (one.value for one in found.holders if isinstance(one.value, torch.nn.Module))
        reached = [*modules_of(self.function), *modules, *held]
        return [part for module in reached for part in module.modules()]

    def leaves(self, args: Any, kwargs: Any, found: Found) -> list[torch.Tensor]:
        """Leaves that the function may reach; a backward pass inside gives them gradients.

        Args:
            args: The positional arguments of a call.
            kwargs: Those by name.
            found: What :meth:`found` has found.
        """
        found = found if self.preserve else self.search()
        behind = (one for holder in found.all_holders for one in holder.tensors)
        given = self.function, args, kwargs
        buffers = (one for module in modules_of(given) for one in module.buffers())
        tensors = itertools.chain(tensors_of(given), behind, buffers)
        return [one for one in {id(one): one for one in tensors}.values() if one.is_leaf]
