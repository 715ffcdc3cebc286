"""Gradients that a backward pass inside a function leaves in ``.grad``."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from cgraph import _torch
from cgraph._state.holders import Holder
from cgraph.errors import CallableError, CaptureError

__all__ = ["AtBreak", "Gradients", "detached", "gradients_there", "noted", "require_left_alone"]


# The gradients that captures add to in place, by their numbers.
_added_to: dict[int, _torch.TensorWeakRef] = {}


class Gradients:
    """What a capture does to the ``.grad`` of leaves, for its replays to do.

    Args:
        leaves: The leaves, before anything was called.

    Attributes:
        added_to: Those whose gradient stays the same tensor, which the graph reads or writes:
            leaf, the attribute's name, and the gradient.
        made: Leaves that had no gradient before the capture and have one since. With one there, a
            call might add to it.
        asked: Those that had none and have none, and of which the function may ask for it.
    """

    def __init__(self, leaves: Sequence[torch.Tensor]) -> None:
        # The gradients that breaks have put there, by the ``id`` of their leaves.
        self._by_breaks: dict[int, list[torch.Tensor]] = {}
        self._old = [(leaf, leaf.grad) for leaf in leaves]
        # The gradients when the last call before the capture began, and their versions.
        self._at_call: list[tuple[torch.Tensor | None, int | None]] = []
        self._before: list[tuple[torch.Tensor | None, int | None]] = []
        self._replaced: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self.added_to: list[Holder] = []
        # Those that a backward pass inside may have given gradients.
        self._in_backward: list[torch.Tensor] = []
        # Those of them that had none before the capture, and have none since.
        self._without: list[torch.Tensor] = []
        self.made: list[torch.Tensor] = []
        self.asked: list[torch.Tensor] = []
        # What the leaves get; made by the first replay.
        self._given: list[torch.Tensor | None] | None = None

    def __bool__(self) -> bool:
        """Whether replays give some leaf another gradient."""
        return bool(self._replaced)

    def followed(self) -> list[Holder]:
        """Where gradients are added to, or none must be, and the leaves' hooks."""
        leaves = [*(leaf for leaf, _ in self._replaced), *(one.owner for one in self.added_to)]
        leaves = [*{id(leaf): leaf for leaf in (*leaves, *self._in_backward)}.values()]
        for number in [number for number, one in _added_to.items() if one() is None]:
            del _added_to[number]
        for one in self.added_to:
            _added_to[id(one.value)] = _torch.TensorWeakRef(one.value)
        hooks = [Holder(*hooks) for leaf in leaves for hooks in _torch.hooks_of_leaf(leaf)]
        without = *self._without, *self.made, *self.asked
        none = [Holder(leaf, "grad", None) for leaf in without]
        return [*self.added_to, *none, *hooks]

    @property
    def computed(self) -> Sequence[tuple[torch.Tensor, torch.Tensor | None]]:
        """The leaves that replays give another gradient, and the one that the graph computes."""
        return self._replaced

    def calls_now(self) -> None:
        """Note that a call begins, before the capture."""
        self._at_call = [(leaf.grad, _version(leaf.grad)) for leaf, _ in self._old]

    def captures_now(self) -> list[torch.Tensor]:
        """Note that calls end here, and that a capture comes next; the gradients that there are.

        Those that the calls have taken away are there again, and the capture shows their use. Those
        that the calls have made, and add to, are not: replays make them.
        """
        at_call = self._at_call or [(None, None)] * len(self._old)
        for (leaf, old), (known, version) in zip(self._old, at_call, strict=True):
            if leaf.grad is None:
                leaf.grad = old
            elif old is None and (
                known is None or (leaf.grad is known and known._version != version)
            ):
                leaf.grad = None
        self._before = [(leaf.grad, _version(leaf.grad)) for leaf, _ in self._old]
        return [gradient for gradient, _ in self._before if gradient is not None]

    def captures_again(self) -> None:
        """Forget a capture, which another one follows."""
        self._by_breaks.clear()
        for (leaf, _), (before, _) in zip(self._old, self._before, strict=True):
            leaf.grad = before

    def at_break(self, notice: Callable[[Iterable[torch.Tensor]], None]) -> AtBreak:
        """The gradients that a break finds, to which the capture comes now.

        Args:
            notice: Lets it be noted whether the capture uses tensors from then on.
        """
        pairs = zip(self._old, self._before, strict=True)
        found = [(leaf, leaf.grad, before) for (leaf, _), (before, _) in pairs]

        def put(leaf: torch.Tensor, gradient: torch.Tensor) -> None:
            self._by_breaks.setdefault(id(leaf), []).append(gradient)
            notice([gradient])

        return AtBreak(found, put)

    def forget_before(self) -> None:
        """Let go of what no replay needs."""
        self._old, self._at_call, self._before = [], [], []
        self._by_breaks.clear()

    def note(
        self,
        statics: Sequence[torch.Tensor],
        names: Sequence[str],
        is_used: Callable[[torch.Tensor], bool],
        gets_gradient: Callable[[torch.Tensor], bool],
        asks: bool,
        stepping: Iterable[Any],
    ) -> None:
        """Note at the end of the capture what it has done.

        Args:
            statics: Tensors that stand for the arguments, which are never theirs.
            names: The names of these.
            is_used: Whether the capture reads or writes one of those that were there before.
            gets_gradient: Whether a backward pass inside may have given a leaf one, which may be
                gone by now.
            asks: Whether the function may ask which leaves have gradients, as an optimizer does.
            stepping: The optimizers that it finds, among others. Also what is frozen there may
                get a gradient later.

        Raises:
            CaptureError: An argument would have another gradient, or the graph would go on with one
                that is there no more: that of a warm-up call, or one that is replaced.
        """
        for made in itertools.chain(*self._by_breaks.values()):
            if is_used(made):
                raise CaptureError(
                    f"the function goes on with a gradient of shape {list(made.shape)} that a break"
                    " puts there, and replays would not find it: let the break write to .grad in"
                    " place"
                )
        arguments = {id(static) for static in statics}
        groups = [one.param_groups for one in stepping if isinstance(one, torch.optim.Optimizer)]
        of_groups = {id(one) for found in groups for group in found for one in group["params"]}
        for (leaf, old), (before, version) in zip(self._old, self._before, strict=True):
            now = leaf.grad
            if leaf.requires_grad and id(leaf) not in arguments and gets_gradient(leaf):
                self._in_backward.append(leaf)
                self._without += [leaf] if now is before is None else []
            elif (
                asks and id(leaf) not in arguments and (leaf.requires_grad or id(leaf) in of_groups)
            ):
                self.asked += [leaf] if now is before is None else []
            if any(now is made for made in self._by_breaks.get(id(leaf), ())):
                continue  # replays of the break do that
            if now is not before:
                has_used = before is not None and (is_used(before) or before._version != version)
                if has_used and now is None:
                    raise CaptureError(
                        f"the function uses the gradient of a tensor of shape {list(leaf.shape)}"
                        " and takes it away: let it be set to zero, as by"
                        " zero_grad(set_to_none=False), call zero_grad() outside of the function,"
                        " or let there be none before the first call"
                    )
                if has_used:
                    raise CaptureError(
                        "the function replaces the gradient of a tensor of shape"
                        f" {list(leaf.shape)} by one that it computes from the one before: add to"
                        " it in place"
                    )
                self._replaced.append((leaf, now))
                self.made += [leaf] if before is None else []
            elif now is not None and now is not old:
                raise CaptureError(
                    f"the function adds to the gradient of a tensor of shape {list(leaf.shape)}"
                    " that has none before the call: give it zeros as .grad, or let the function"
                    " begin with zero_grad()"
                )
            elif now is not None and (_version(now) != version or is_used(now)):
                self.added_to.append(Holder(leaf, "grad", now))
        changed = {id(leaf) for leaf, *_ in (*self._replaced, *self.added_to)}
        for static, name in zip(statics, names, strict=True):
            if id(static) in changed:
                raise CaptureError(
                    f"the function gives its argument {name} a gradient, and replays do not: let"
                    " it return what torch.autograd.grad gives"
                )

    def put(self) -> None:
        """Give the leaves the gradients that a replay has computed.

        As copies: replays of other graphs may overwrite those in the pool.
        """
        if not self._replaced:
            return
        computed = [one for _, one in self._replaced if one is not None]
        with torch.no_grad():
            if self._given is None:
                self._given = [
                    None if one is None else torch.empty_like(one) for _, one in self._replaced
                ]
            for place in _kept(self._given):
                # It keeps its values.
                old = self._given[place]
                self._given[place] = None if old is None else torch.empty_like(old)
            if computed:
                _torch.copy_each([one for one in self._given if one is not None], computed)
        for given, (leaf, _) in zip(self._given, self._replaced, strict=True):
            if leaf.grad is not given:
                leaf.grad = given


class AtBreak:
    """The gradients that a break finds, in the capture and in each replay.

    What the graph has computed before is in the memory that it goes on with.

    Args:
        found: Each leaf, its gradient now, and the one when the capture began.
        put: Called with each leaf that gets another one, and that.
    """

    def __init__(
        self,
        found: Sequence[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]],
        put: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> None:
        self._put = put
        self._found = [(leaf, now) for leaf, now, _ in found]
        self._made = [(leaf, now) for leaf, now, before in found if now is not before]

    def work(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The break, which finds them in each replay as well."""
        made = self._made
        if not made:
            return fn

        @functools.wraps(fn, updated=())
        def call(*args: Any, **kwargs: Any) -> Any:
            for leaf, one in made:
                if leaf.grad is not one:
                    leaf.grad = one
            try:
                return fn(*args, **kwargs)
            except BaseException:
                # Nobody else is going to: replays would overwrite them.
                for leaf, one in made:
                    if leaf.grad is one and one is not None:
                        with suppress(RuntimeError):  # what comes out is the user's
                            leaf.grad = one.clone()
                raise

        return call

    def end(self) -> None:
        """Note what the break has put in their places in the capture."""
        for leaf, known in self._found:
            if leaf.grad is not None and leaf.grad is not known:
                self._put(leaf, leaf.grad)


def detached(result: Any) -> Any:
    """A result with tensors without history in the places of those whose history is spent."""
    leaves, spec = _torch.tree_flatten(result)
    spent = [isinstance(one, torch.Tensor) and _torch.is_spent(one) for one in leaves]
    if not any(spent):
        return result
    pairs = zip(leaves, spent, strict=True)
    return _torch.tree_unflatten([one.detach() if gone else one for one, gone in pairs], spec)


Noted = tuple[torch.Tensor, torch.Tensor | None, int | None]
"""A leaf, its gradient, and the version of that."""


@contextmanager
def gradients_there(leaves: Iterable[torch.Tensor]) -> Iterator[None]:
    """A block in which leaves have gradients, zeros where there are none.

    Whether a function clears those that are not there, nobody would see.
    """
    made: list[tuple[torch.Tensor, torch.Tensor | None]] = []
    try:
        for leaf in leaves:
            if leaf.grad is None and leaf.requires_grad and leaf.layout is torch.strided:
                with suppress(RuntimeError, TypeError):  # a class that wants others
                    leaf.grad = torch.zeros_like(leaf, requires_grad=False)
                made.append((leaf, leaf.grad))
        yield
    finally:
        for leaf, zeros in made:
            if leaf.grad is zeros:
                leaf.grad = None


def noted(leaves: Iterable[torch.Tensor]) -> list[Noted]:
    """The gradients of leaves as they are now."""
    return [(leaf, leaf.grad, _version(leaf.grad)) for leaf in leaves]


def require_left_alone(before: Iterable[Noted]) -> None:
    """Refuse a function that changes gradients, and returns what has a backward pass to come.

    Raises:
        CallableError: It does: the graph of its forward pass would not.
    """
    for leaf, gradient, version in before:
        if leaf.grad is not gradient or _version(gradient) != version:
            raise CallableError(
                f"the function changes the gradient of a tensor of shape {list(leaf.shape)}, as by"
                " backward() or zero_grad(), and returns what a backward pass is still to come"
                " for: do that around the call, or all of it inside and return the loss detached"
            )


def _version(gradient: torch.Tensor | None) -> int | None:
    return None if gradient is None else gradient._version


def _kept(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    """The places of tensors of a list that somebody else has as well, but for torch.

    Not of those that calls add to in place: their keys have them.
    """
    (usual,) = _references([object()])
    counts = enumerate(_references(tensors))
    more = ((place, count - usual) for place, count in counts if count > usual)
    return [place for place, count in more if _is_kept(tensors[place], count)]


def _references(items: Sequence[object]) -> list[int]:
    return [sys.getrefcount(one) for one in items]


def _is_kept(tensor: torch.Tensor | None, references: int) -> bool:
    """Whether of so many references some are neither torch's nor those of keys that add to it."""
    if tensor is None or references <= _torch.references_of_torch(tensor):
        return False
    return id(tensor) not in _added_to or _added_to[id(tensor)]() is not tensor


def with_own_memory(
    gradients: Sequence[torch.Tensor | None], others: Iterable[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Gradients, of which none shares memory with another one or with other tensors.

    Autograd passes one tensor on as several gradients, and copies it where it becomes the ``.grad``
    of several leaves. It could not see that here.
    """
    storages = {_storage(other) for other in others if other.layout is torch.strided}
    own: list[torch.Tensor | None] = []
    for gradient in gradients:
        if gradient is not None and gradient.layout is not torch.strided:
            gradient = gradient.clone()
        elif gradient is not None:
            if _storage(gradient) in storages:
                gradient = gradient.clone(memory_format=torch.contiguous_format)
            storages.add(_storage(gradient))
        own.append(gradient)
    return own


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
