"""Which parts of modules a function may call."""

from __future__ import annotations

import types
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from cgraph._state.code import Reached
from cgraph._state.holders import vars_of

__all__ = ["come_to_parts"]


def come_to_parts(function: object, modules: Sequence[torch.nn.Module], reached: Reached) -> None:
    """Come to the forward of parts of modules, but for those that a method has and does not name.

    Its caller may call these, and count in them what is no affair of the method.

    Args:
        function: What may be a method.
        modules: Its object if that is a module, others that it has, and those from elsewhere.
        reached: What comes to them.
    """
    owner: Any = function.__self__ if isinstance(function, types.MethodType) else None
    is_module = isinstance(owner, torch.nn.Module)
    own = owner._modules if is_module else {} if owner is None else vars_of(owner)
    parts = (part for one in modules for part in one.modules())
    if owner is not None and any(_leads_to(owner, part) for part in parts):
        reached.hand_on(type(owner))
    before: tuple[int, int] | None = None
    while before != reached.size:
        before = reached.size
        is_whole = type(owner) in reached.handed_on or not _WHOLE.isdisjoint(reached.names)
        named = {id(one) for name, one in own.items() if reached.has_name(name)}
        unnamed = {id(one) for one in own.values()} - named
        for one in modules:
            if is_whole or (one is not owner and id(one) not in unnamed):
                reached.call(one.modules())
            elif one is owner:
                parts = (part for part in own.values() if id(part) in named and part is not None)
                reached.call(part for one in parts for part in one.modules())


def _leads_to(owner: object, part: torch.nn.Module) -> bool:
    """Whether a part has a weak reference to an object, which nobody follows."""
    weak = (one for one in vars(part).values() if type(one) is weakref.ref)
    return any(one() is owner for one in weak)


# By these, too, code comes to parts of a module.
_WHOLE = {"_modules", "apply", "children", "modules", "named_children", "named_modules"}
