"""A mode that notes writes of operators, in a block with calls of a function and its capture."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from cgraph import _torch
from cgraph._autograd.pool_order import PoolOrder
from cgraph._operators.facts import facts_of
from cgraph._operators.operator_mode import OperatorMode, Run
from cgraph._operators.schemas import tensors_of, written_by
from cgraph._operators.snapshots import StorageSnapshot, TensorSnapshot, storage_snapshot

__all__ = ["WriteRecorder"]


class WriteRecorder(OperatorMode):
    """A mode that notes the earlier state of what operators write.

    Attributes:
        tensors: The earlier states of tensors, by ``id``.
        storages: The earlier states of storages, by number.
        generators: The generators that operators got, with their earlier states.
        over: True if the block has ended; a mode that could not be left then does nothing.
    """

    def __init__(self, is_capturing: Callable[[], bool]) -> None:
        super().__init__()
        self.tensors: dict[int, TensorSnapshot] = {}
        self.storages: dict[int, StorageSnapshot] = {}
        self.generators: list[tuple[torch.Generator, torch.Tensor]] = []
        self.over = False
        self._is_capturing = is_capturing
        # A weak reference releases the memory, but not the number: no other storage gets it.
        self._fresh: dict[int, _torch.WeakStorage] = {}
        # Autograd has a thread for each GPU.
        self._lock = threading.Lock()

    def seen(self, func: Any, args: Any, kwargs: dict[str, Any], run: Run) -> Any:
        """Note what an operator may change, which ``run`` runs or captures; return its result."""
        if self.over:
            return run(func, args, kwargs)
        facts = facts_of(func)
        given = [*tensors_of(args), *tensors_of(kwargs)]
        written = [] if facts.writes_nothing else [*written_by(func, args, kwargs)]
        with self._lock:
            for tensor in given:
                if tensor.requires_grad and tensor.is_leaf:
                    self.note(tensor)
            if written:
                self._note_written(written)
            if facts.takes_generator:
                generator = _torch.generator_among(args, kwargs)
                if generator is not None:
                    self._note_generator(generator)
        result = run(func, args, kwargs)
        self._note_fresh(given, result)
        return result

    def note(self, tensor: torch.Tensor) -> None:
        """Note the state of a tensor, unless it is known or was made in the block."""
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
                PoolOrder.save(tensor)
            self.tensors[id(tensor)] = TensorSnapshot(tensor, like)

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
            if not is_capturing and number not in self._fresh and number not in self.storages:
                self.storages[number] = storage_snapshot(memory, tensor.dtype)

    def _note_content(self, tensor: torch.Tensor) -> None:
        """Note the contents of a sparse tensor, which shares memory with others until written."""
        known = self.tensors[id(tensor)]
        is_sparse = tensor.layout is not torch.strided
        if is_sparse and known.like is None and not self._is_capturing():
            with _torch.without_modes():
                known.like = tensor.detach().clone()

    def _note_generator(self, generator: torch.Generator) -> None:
        defaults = (torch.default_generator, *torch.cuda.default_generators)
        known = (*defaults, *(one for one, _ in self.generators))
        if not self._is_capturing() and not any(_torch.is_same(generator, one) for one in known):
            self.generators.append((generator, generator.get_state()))

    def _note_fresh(self, given: list[torch.Tensor], result: Any) -> None:
        """Note the storages that an operator made: its results' storages that it did not get."""
        is_given = {id(tensor) for tensor in given}
        made = [tensor for tensor in tensors_of((result,)) if id(tensor) not in is_given]
        if not made:
            return
        memories = [memory for memory in map(_torch.memory_of, given) if memory is not None]
        old = {_torch.storage_id(memory) for memory in memories}
        for tensor in made:
            memory = _torch.memory_of(tensor)
            if memory is not None and (number := _torch.storage_id(memory)) not in old:
                if number not in self.storages and number not in self._fresh:
                    self._fresh[number] = _torch.WeakStorage(tensor)
