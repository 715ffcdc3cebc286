"""Rollback of a function's effects on tensors, their gradients and random state.

A dispatch mode sees each operator before it runs and copies the memory that it is about to write.
It relies on two facts. Operators get a parameter as the very object that the module holds, in
forward, backward and optimiser alike, so that its ``.grad`` can be noted there. And an operator's
results are new: their storage needs no copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from cgraph import _torch
from cgraph._autograd.history import leaves_behind
from cgraph._operators.snapshots import StorageSnapshot, storage_snapshot
from cgraph._operators.writes import WriteRecorder

__all__ = ["Rollback"]


class Rollback:
    """A record of a function's changes in a ``with`` block, to undo them.

    >>> x = torch.tensor([1.0, 2.0])
    >>> with Rollback() as rollback:
    ...     _ = x.mul_(3)
    >>> rollback.undo()
    >>> x
    tensor([1., 2.])

    It restores, bit by bit: the contents of storages that operators wrote, and their sizes; the
    places of tensors in them, and that a tensor had no autograd history; ``.grad`` of leaves, to
    the very object, except for one in the memory of a graph, which gets its own; the states of the
    default generators of the CPU and of the current CUDA device, and of those that operators get
    outside a capture.

    It does not restore: anything of Python's own, such as counters, ``requires_grad`` flags, and
    entries that an optimiser makes in its ``state`` at its first step (they stay, with the contents
    of that step); version counters; the history of a tensor that had another one, or of a view that
    now has one; writes that torch's dispatcher does not see: through NumPy, ``untyped_storage()``,
    a kernel launched by hand, the replay of a graph, an operator whose schema hides them, another
    thread than the block's (those of autograd are seen). A tensor made inside without an operator,
    as from a literal or from NumPy, counts as made before: writes to it are undone too.

    While a capture is open, nothing is computed, so nothing is copied. A capture on the simulator
    takes operators before they are seen here: a leaf that nothing has read before the capture must
    be given.

    Args:
        leaves: Tensors whose ``.grad`` is noted at once. For others, it is noted when an operator
            first gets them, which is too late if ``zero_grad()`` comes first. For one with a
            history, the leaves behind it are noted.
        is_capturing: Returns whether a capture is open; called at each operator that writes.
    """

    def __init__(
        self,
        *,
        leaves: Iterable[torch.Tensor] = (),
        is_capturing: Callable[[], bool] = lambda: False,
    ) -> None:
        self._leaves = list(leaves)
        self._is_capturing = is_capturing
        self._watch = WriteRecorder(is_capturing)
        self._uncompiled = _torch.Uncompiled()
        self._is_entered = False
        self._states: list[tuple[torch.Generator, torch.Tensor]] = []

    def __enter__(self) -> Rollback:
        """Note the leaves and the random state, and watch operators from now on."""
        generators = [torch.default_generator]
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
        self._states = [(generator, generator.get_state()) for generator in generators]
        self._watch = WriteRecorder(self._is_capturing)
        self._watch.uncompiled = self._uncompiled
        for leaf in (*self._leaves, *leaves_behind(self._leaves)):
            self._watch.note(leaf)
        self._uncompiled.__enter__()
        _torch.enter_mode(self._watch)
        self._is_entered = True
        return self

    def __exit__(self, *_: object) -> None:
        """Stop watching; nothing is put back yet."""
        self._is_entered = False
        self._watch.over = True
        _torch.leave_mode(self._watch)
        self._uncompiled.__exit__()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Watch no operators in a block; storages that were written before are still restored."""
        if not self._is_entered:
            yield
            return
        _torch.leave_mode(self._watch)
        try:
            self._uncompiled.__exit__()
            try:
                yield
            finally:
                self._uncompiled.__enter__()
        finally:
            _torch.enter_mode(self._watch)

    @property
    def has_uncompiled(self) -> bool:
        """True if something ran uncompiled that torch compiles elsewhere."""
        return self._uncompiled.has_met

    def generators_of(self, device_type: str) -> list[torch.Generator]:
        """Return the generators of a kind of device that operators got, except the default ones."""
        found = (generator for generator, _ in self._watch.generators)
        return [generator for generator in found if generator.device.type == device_type]

    def is_written(self, tensor: torch.Tensor) -> bool:
        """Return whether the storage of a tensor was written."""
        memory = _torch.memory_of(tensor)
        return memory is not None and _torch.storage_id(memory) in self._watch.storages

    @property
    def storages(self) -> list[StorageSnapshot]:
        """The storages that were written, in their earlier state."""
        return list(self._watch.storages.values())

    def renew(self) -> None:
        """Note the present contents of the storages that were written, to restore them again."""
        storages = self._watch.storages
        for number, one in storages.items():
            storages[number] = storage_snapshot(one.storage, one.dtype)

    def rewind(self) -> None:
        """Restore the contents of storages, and go on."""
        with torch.no_grad(), _torch.without_modes():
            for storage in reversed(self._watch.storages.values()):
                storage.rewind()

    def rewind_generators(self) -> None:
        """Restore the states of the generators that operators got, and go on."""
        for generator, state in self._watch.generators:
            generator.set_state(state)

    def undo(self) -> None:
        """Restore everything, at most once. No capture may be open.

        It waits for the CUDA devices that it copies to, before and after.
        """
        watch = self._watch
        devices = {one.storage.device for one in watch.storages.values()}
        on_gpu = [device for device in devices if device.type == "cuda"]
        with torch.no_grad(), _torch.without_modes(), _torch.without_functions():
            for device in on_gpu:
                torch.cuda.synchronize(device)
            for tensor in watch.tensors.values():
                tensor.undo_place()
            # Two storages may lie on the same memory: the first copy is restored last.
            for storage in reversed(watch.storages.values()):
                storage.undo()
            for tensor in watch.tensors.values():
                tensor.undo_autograd()
            self.rewind_generators()
            for generator, state in self._states:
                generator.set_state(state)
            for device in on_gpu:
                torch.cuda.synchronize(device)
        watch.tensors.clear()
        watch.storages.clear()
        watch.generators.clear()
