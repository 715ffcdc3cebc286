"""Sees what operators do, in a block with calls of a function and its capture."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import torch

from cgraph import _torch
from cgraph._autograd.order import Order
from cgraph._operators.before import StorageBefore, TensorBefore, bytes_of
from cgraph._operators.schemas import tensors_in, written_by
from cgraph._operators.watching import OperatorWatch

__all__ = ["Watch"]

_OF_PROBABILITIES = {torch.ops.aten.binary_cross_entropy.default}


class Watch(OperatorWatch):
    """Sees the operators.

    Attributes:
        tensors: How tensors were before, by ``id``.
        storages: How storages were before, by number.
        captured: What captured operators write: the numbers of storages, and the addresses of the
            first byte and of the one after the last.
        made: The numbers of storages that operators made before the capture.
        is_state_made: Whether one of these was written since.
        noticed: The numbers of storages of which it is noted whether they are used.
        used: Those that captured operators get.
        noticed_tensors: The ``id`` of tensors of which that is noted as well.
        used_tensors: Those of them that captured operators get as they are.
        outside: All memory that captured operators get and that was there before, by number.
        computed: Those of the storages that operators made before.
        devices: The GPUs whose tensors captured operators get.
        captures_backward: Whether a captured operator is of a backward pass.
        generators: Those that operators got, with their states before.
        takes_probabilities: Whether one takes only numbers from 0 to 1, and draws none by them.
        over: The block has ended; where the mode could not be left, it does nothing.
        has_unseen: A capture writes storages that it has not made and that were not written before.
    """

    def __init__(self, is_capturing: Callable[[], bool]) -> None:
        super().__init__()
        self.tensors: dict[int, TensorBefore] = {}
        self.storages: dict[int, StorageBefore] = {}
        self.captured: dict[int, list[tuple[int, int]]] = {}
        self.made: frozenset[int] = frozenset()
        self.is_state_made = False
        self.noticed: set[int] = set()
        self.used: set[int] = set()
        self.noticed_tensors: set[int] = set()
        self.used_tensors: set[int] = set()
        self.outside: dict[int, torch.UntypedStorage] = {}
        self.devices: set[torch.device] = set()
        self.captures_backward = False
        self.generators: list[tuple[torch.Generator, torch.Tensor]] = []
        self.over = False
        self.takes_probabilities = False
        self.has_unseen = False
        self._is_capturing = is_capturing
        # A weak reference lets the memory go, but not the number: no other storage gets it.
        self._fresh: dict[int, _torch.WeakStorage] = {}
        # Of these, what was made while nothing was captured.
        self.computed: set[int] = set()
        # Autograd has a thread for each GPU.
        self._lock = threading.Lock()

    def seen(self, func: Any, args: Any, kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
        """Note what an operator may change that ``run`` runs or captures; its result."""
        if self.over:
            return run()
        given = list(tensors_in((args, kwargs)))
        written = list(written_by(func, args, kwargs))
        self.takes_probabilities |= func in _OF_PROBABILITIES
        with self._lock:
            for tensor in given:
                if tensor.requires_grad and tensor.is_leaf:
                    self.note(tensor)
            if written:
                self._note_written(written)
            if (generator := _torch.generator_among(args, kwargs)) is not None:
                self._note_generator(generator)
            if self._is_capturing():
                self.devices |= {one.device for one in given if one.is_cuda}
                self.captures_backward |= _torch.backward_pass() != -1
                self._note_used(given)
        result = run()
        self._note_fresh(given, result)
        return result

    def is_fresh(self, number: int) -> bool:
        """Whether a storage was made in the block."""
        return number in self._fresh

    def note(self, tensor: torch.Tensor) -> None:
        """Remember how a tensor is, unless it is known or was made in the block."""
        known = self.tensors.get(id(tensor))
        if known is not None and known.tensor() is tensor:
            return
        memory = _torch.memory_of(tensor)
        if memory is not None and _torch.storage_id(memory) in self._fresh:
            return
        with _torch.without_modes():
            like = None if memory is None else tensor.detach()
            if tensor.is_leaf and tensor.grad is not None and not self._is_capturing():
                # A replay in the block would give it other contents.
                Order.save(tensor)
            self.tensors[id(tensor)] = TensorBefore(tensor, like)

    def has_displaced(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor that was noted lies elsewhere now."""
        known = self.tensors.get(id(tensor))
        return known is not None and known.tensor() is tensor and known.has_moved

    def captured_writes(self, but: set[int]) -> list[tuple[int, int]]:
        """What captured operators write in storages that no capture has made, but for some.

        In order, and no two overlap.
        """
        pieces: list[tuple[int, int]] = []
        storages = self.captured.items()
        found = (spans for one, spans in storages if not (one in but or self._is_of_capture(one)))
        for begin, end in sorted(itertools.chain.from_iterable(found)):
            if begin == end:
                continue
            if pieces and begin <= pieces[-1][1]:
                begin, end = pieces[-1][0], max(end, pieces.pop()[1])
            pieces.append((begin, end))
        return pieces

    def _note_written(self, written: list[torch.Tensor]) -> None:
        is_capturing = self._is_capturing()
        for tensor in written:
            for one in (tensor, _torch.base_of(tensor)):
                self.note(one)
            memory = _torch.memory_of(tensor)
            if memory is None:
                self._note_content(tensor)
                continue
            number = _torch.storage_id(memory)
            self.is_state_made |= number in self.made
            if is_capturing:
                self.captured.setdefault(number, []).append(_torch.span_of(tensor))
                is_own = self._is_of_capture(number)
                self.has_unseen |= not is_own and number not in self.storages
                continue
            if number not in self._fresh and number not in self.storages:
                nbytes = memory.nbytes()
                with _torch.without_modes():
                    copy = bytes_of(memory).clone()
                    self.storages[number] = StorageBefore(memory, nbytes, copy, tensor.dtype)

    def _note_content(self, tensor: torch.Tensor) -> None:
        """Remember what a sparse tensor holds, which shares memory with others until written."""
        known = self.tensors[id(tensor)]
        is_sparse = tensor.layout is not torch.strided
        if is_sparse and known.like is None and not self._is_capturing():
            with _torch.without_modes():
                known.like = tensor.detach().clone()

    def _is_of_capture(self, number: int) -> bool:
        """Whether a captured operator has made a storage."""
        return number in self._fresh and number not in self.computed

    def _note_generator(self, generator: torch.Generator) -> None:
        defaults = (torch.default_generator, *torch.cuda.default_generators)
        known = (*defaults, *(one for one, _ in self.generators))
        if not self._is_capturing() and not any(_torch.is_same(generator, one) for one in known):
            self.generators.append((generator, generator.get_state()))

    def _note_used(self, given: list[torch.Tensor]) -> None:
        found = [memory for memory in map(_torch.memory_of, given) if memory is not None]
        memories = {_torch.storage_id(memory): memory for memory in found}
        self.used |= self.noticed & memories.keys()
        self.used_tensors |= self.noticed_tensors & {id(tensor) for tensor in given}
        for number in memories.keys() - self.outside.keys():
            if not self._is_of_capture(number):
                self.outside[number] = memories[number]

    def _note_fresh(self, given: list[torch.Tensor], result: Any) -> None:
        """Note the storages that an operator made: those of its results that none was given."""
        is_given = {id(tensor) for tensor in given}
        made = [tensor for tensor in tensors_in(result) if id(tensor) not in is_given]
        if not made:
            return
        is_capturing = self._is_capturing()
        memories = [memory for memory in map(_torch.memory_of, given) if memory is not None]
        old = {_torch.storage_id(memory) for memory in memories}
        for tensor in made:
            memory = _torch.memory_of(tensor)
            if memory is not None and (number := _torch.storage_id(memory)) not in old:
                if number not in self.storages and number not in self._fresh:
                    self._fresh[number] = _torch.WeakStorage(tensor)
                    if not is_capturing:
                        self.computed.add(number)
