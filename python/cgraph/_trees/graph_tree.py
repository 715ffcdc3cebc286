"""Graph trees of one device: pools, recordings, and what becomes of outputs when a path ends."""

from __future__ import annotations

import collections
import contextlib
import logging
import weakref
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from typing_extensions import Self

from cgraph import _core, _torch
from cgraph._captures.last_stream import last_stream
from cgraph._captures.pool_blocks import PoolBlocks
from cgraph._captures.sim_pools import SimMemPool
from cgraph._captures.turns import Turn
from cgraph._driver import Driver, Handle
from cgraph._reason import Reason
from cgraph._source import forget_locals
from cgraph._trees.function import RESET, Function
from cgraph._trees.node import Node
from cgraph._trees.recording import record
from cgraph._trees.skips import EAGER, skip
from cgraph._trees.steps import follow_torch
from cgraph.causes import Cause
from cgraph.errors import CaptureError, CgraphWarning, StateError
from cgraph.graphs import graph_pool_handle, is_current_stream_capturing

__all__ = ["GraphTree"]

_log = logging.getLogger("cgraph.trees")
# A node, the number of one of its pieces of memory, and where that begins.
_HeldOutput = tuple[Node, int, int]
_Ended = tuple[Sequence[_HeldOutput], bool]


class GraphTree(_core.Tree):
    """The recorded graphs of one device and driver; they share a pool.

    Attributes:
        eager: How often a function has run without the tree, by function and reason.
        rerecords: How often a function was captured anew as static inputs had moved, and which had
            the last time.
        moving: Which static inputs of a function were elsewhere too often, and are copied.
        functions: Its functions that were called since the last reset, by their number.
    """

    eager: collections.Counter[tuple[int, str]]
    rerecords: dict[int, tuple[int, str]]
    moving: dict[int, str]
    functions: weakref.WeakValueDictionary[int, Function]
    _driver: Driver
    _device_index: int
    _last_stream: _core.LastStream
    _owning: list[Node]
    # Storages of static inputs of forward passes, by number.
    _statics: dict[int, _torch.WeakStorage]

    def __new__(cls, driver: Driver, device_index: int, steps: _core.StepSource) -> Self:
        """Make an empty tree of a device."""
        with _device(driver, device_index):
            last = last_stream(driver)
        tree = super().__new__(
            cls,
            _torch.tensor_reader(),
            steps,
            last,
            _torch.set_stale,
            _torch.exchanges_natively(),
            is_current_stream_capturing,
            _torch.is_intercepted,
            _torch.forward_ad,
            _torch.mode_addresses() | _torch.fresh_functions(),
            _torch.interception_keys(),
        )
        tree._driver, tree._device_index, tree._last_stream = driver, device_index, last
        tree.eager = collections.Counter()
        tree.rerecords, tree.moving = {}, {}
        tree.functions = weakref.WeakValueDictionary()
        tree._empty()
        return tree

    @property
    def device_type(self) -> str:
        """The type of its device, as torch names it."""
        return self._driver.device_type

    @property
    def reserved_bytes(self) -> int:
        """The bytes of its pool."""
        return 0 if self._memory is None else self._driver.pool_state(self._memory[0]).reserved

    def reset(self) -> None:
        """Drop all graphs; outputs of the path that somebody holds get memory of their own.

        Raises:
            StateError: A call of the tree is under way.
        """
        with self, self._on_device():
            if self.is_busy:
                raise StateError(
                    "reset() of graph trees inside a call of one of their functions: call it when"
                    " that has returned"
                )
            try:
                self._follow()
                if (ended := self.end_path()) is not None:
                    self._end(None, *ended)
                    self.forget_ended()
                # Replays in flight would keep the pool.
                self._can_wait()
            finally:
                self._start_over()
                self.functions.clear()
                self.moving.clear()
                self._driver.settle()

    def _start_over(self) -> None:
        """Drop all nodes, and begin with a new pool."""
        for _, _, _, node in self.nodes:
            node.graph.reset()
        self.clear()
        self._empty()

    def __del__(self) -> None:
        """Keep the memory of outputs that somebody holds, while they do."""
        ended = self.end_path()
        if ended is None or ended[1]:
            # Nothing is held, or owns its block.
            return
        live: list[_HeldOutput] = ended[0]
        for node, piece, _ in live:
            storage = node.first_prototype(piece).untyped_storage()
            # torch keeps Python's object of a storage as long as the storage.
            end = weakref.finalize(storage, _let_go, self._memory)
            end.atexit = False

    def _empty(self) -> None:
        """Begin without memory."""
        self._memory: tuple[Handle, Any] | None = None
        self._owning = []
        self._statics = {}

    @property
    def _pool(self) -> Handle:
        """The pool of the graphs."""
        return self._pool_and_stream()[0]

    @property
    def _stream(self) -> Any:
        """The stream of the recordings."""
        return self._pool_and_stream()[1]

    def _pool_and_stream(self) -> tuple[Handle, Any]:
        if self._memory is None:
            self._memory = graph_pool_handle(), self._driver.new_stream()
            mem_pool = self._driver.mem_pool(self._memory[0])
            if isinstance(mem_pool, SimMemPool):
                # Inputs are copied before a recording, which may use their blocks again.
                mem_pool.keeps_contents = True
        return self._memory

    def _record(self, function: Function, inputs: list[Any], new: _core.NewNode) -> Sequence[Any]:
        """Record a call as a node; return its result."""
        self.functions[function.id] = function
        with self._on_device():
            self._follow()
            if new.ended is not None:
                self._end_for(function, inputs, new.ended)
            storages = {place: _torch.WeakStorage(inputs[place]) for place in new.statics}
            moving = self._moving(function, storages)
            if written := set(moving).intersection(function.description.mutated):
                return self._run(function, inputs, "mutation", min(written))
            if function.keeps:
                return self._run(function, inputs, "keeps", 0)
            gone = [place for place, one in function.statics.items() if one.is_gone]
            function.statics = storages
            self._note_moved(function, new, new.copy(moving, gone))
            try:
                mine = Turn(self._driver)
            except CaptureError:
                return self._run(function, inputs, "capture elsewhere", 0)
            with mine:
                # A capture of another thread allows no wait.
                if self._can_wait():
                    return self._recorded(function, inputs, new)
            return self._run(function, inputs, "capture elsewhere", 0)

    def _recorded(self, function: Function, inputs: list[Any], new: _core.NewNode) -> Sequence[Any]:
        if new.path and not new.owns:
            self._restore(function, new)
        blocks = PoolBlocks(self._driver, self._pool)
        place = self._driver, blocks, self._stream
        try:
            said = function.description
            node, results = record(
                *place,
                function.run,
                inputs,
                new,
                keeps_held=said.keeps_held,
                described=said.input,
            )
            if node is not None:
                self._owning.append(node)
        except BaseException as error:
            # The locals of the function hold tensors of the pool.
            forget_locals(error)
            # An interrupt may come when the node stands in the tree.
            if blocks.are_left() or len(self.path) > len(new.path):
                self._start_over()
            raise
        if node is None:
            function.keeps = True
            # The pool has a block that belongs to nobody here.
            self._start_over()
            self._note_eager(function, "keeps", 0)
        else:
            _log.info("%s is captured: %d nodes", said.name, node.graph._nodes)
            node.graph.replay()
        return results

    def _can_wait(self) -> bool:
        """Wait for the device; return False if a capture forbids that."""
        try:
            self._driver.synchronize()
        except CaptureError:
            return False
        return True

    def _run(
        self, function: Function, inputs: list[Any], reason: str, detail: int
    ) -> Sequence[Any]:
        """Run a call without the tree."""
        self._note_eager(function, reason, detail)
        return function.run(inputs)

    def _note_eager(self, function: Function, reason: str, detail: int) -> None:
        """Count a call that runs without the tree; tell of it where a graph was wanted."""
        self.functions[function.id] = function
        self.eager[function.id, reason] += 1
        known, said = EAGER[reason], function.description
        is_told = self.eager[function.id, reason] > 1 and not said.options.strict
        if known.fix is None or is_told:
            return
        more = ""
        if reason == "mutation":
            more = f": {said.input(detail)}"
        elif reason == "keeps" and said.operators:
            more = f": perhaps in {', '.join(said.operators)}"
        elif reason == "rerecords" and function.id in self.rerecords:
            more = f": {self.rerecords[function.id][1]}"
        skip(said.name, replace(known, text=f"{known.text}{more}"), said.options)

    def _note_moved(self, function: Function, new: _core.NewNode, moving: list[int]) -> None:
        """Note which static inputs were elsewhere when the function was captured before."""
        said = function.description
        if moved := new.moved:
            text = "; ".join(
                f"{said.input(place)} moved from {before:#x} to {now:#x}"
                for place, before, now in moved
            )
            count, _ = self.rerecords.get(function.id, (0, ""))
            self.rerecords[function.id] = count + 1, text
            _log.info("%s is captured anew: %s", said.name, text)
        if moving:
            is_known = function.id in self.moving
            self.moving[function.id] = ", ".join(map(said.input, moving))
            if not is_known:
                text = _MOVING.format(name=said.name, inputs=self.moving[function.id])
                Reason(Cause.MOVING_WEIGHTS, text, None, _GATHERED).warn(kind=CgraphWarning)

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        """Make the tree's device the current one, and know of steps that torch counts."""
        follow_torch()
        with _device(self._driver, self._device_index):
            yield

    def _follow(self) -> None:
        """Let the current stream wait for replays on others, whose outputs are to be read."""
        self._last_stream.follow()

    def _moving(self, function: Function, storages: dict[int, _torch.WeakStorage]) -> list[int]:
        """Return the places of static inputs that do not stay in place.

        torch calls all tensors static that a forward pass has saved for a backward pass, but only
        those stay in place that were static in a forward pass.
        """
        if function.description.mode != "backward":
            self._statics.update({one.pointer: one for one in storages.values()})
            return []
        return [place for place, one in storages.items() if one.pointer not in self._statics]

    def _restore(self, function: Function, new: _core.NewNode) -> None:
        """Let outputs of the path, which was replayed, own their blocks again."""
        path: list[Node] = new.path
        pool, ready = self._pool, [node.ready_to_own() for node in path]
        owners = dict(zip(path, ready, strict=True))
        dead = [address for _, _, address in new.dead]
        live, kept = [], []
        for node, piece, _ in new.live:
            storage = owners[node].storages[piece]
            # Garbage may go until the nodes hold nothing. From there on these stay.
            kept.append(storage.get())
            live.append(storage)
        try:
            for one in ready:
                one.own()
            self._driver.restore(pool, path[-1].checkpoint, live, dead)
            self._owning = path
            new.own_path()
        except BaseException:
            # Nobody knows what the pool is like.
            for storage in live:
                _torch.make_stale(storage, function.message)
            self._start_over()
            raise

    def _end_for(self, function: Function, inputs: list[Any], ended: _Ended) -> None:
        """End a path with a call, whose inputs may be outputs of it: these stay right."""
        kept = [_torch.start_of(one) for one in inputs if isinstance(one, torch.Tensor)]
        self._end(function, *ended, kept)
        self.forget_ended()

    def _end(
        self,
        function: Function | None,
        live: Sequence[_HeldOutput],
        owns: bool,
        kept: Collection[int] = (),
    ) -> None:
        """Take the outputs of a path that has ended away from those who hold them.

        Outputs get memory of their own if their node says so, as gradients, which are to be added
        to in later steps. So do those that begin at the addresses ``kept``, and all if there is no
        function. What accesses others raises. Wherever it is interrupted, it may be done again.
        """
        message = RESET if function is None else function.message
        keeping = {*kept}
        held = []
        for node, piece, address in live:
            if (storage := node.storage(piece)) is not None:
                keeps = node.keeps_held or function is None or address in keeping
                held.append((node, piece, address, storage, keeps))
        copies = iter(_torch.copied_memory([storage for *_, storage, keeps in held if keeps]))
        ends: dict[Node, dict[int, torch.UntypedStorage | None]] = {}
        for node, piece, address, storage, keeps in held:
            copy = next(copies) if keeps else None
            if copy is not None:
                node.note_kept(copy.nbytes())
            ends.setdefault(node, {})[piece] = copy
            if owns:
                self._free(address, storage, copy, message)
        if owns:
            while self._owning:
                self._owning[-1].hold_prototypes()
                self._owning.pop()
            return
        for node, pieces in ends.items():
            node.end(pieces, message)

    def _free(
        self,
        block: int,
        storage: torch.UntypedStorage,
        copy: torch.UntypedStorage | None,
        message: str,
    ) -> None:
        """Take its block away from a storage that owns it, and give it a copy or an error."""
        if copy is None:
            _torch.set_stale(storage._cdata, message)
            copy = _torch.no_memory(storage.device)
        _torch.hand_over(storage, copy)
        self._driver.give_up(self._pool, [block])

    def _eager(
        self,
        function: Function,
        inputs: list[Any],
        reason: str,
        detail: int,
        ended: _Ended | None,
    ) -> None:
        """Note a call that runs without the tree; the path may have ended with it."""
        if ended is not None:
            with self._on_device():
                self._follow()
                self._end_for(function, inputs, ended)
        if reason == "first run" and self._memory is not None:
            # It takes memory beside the pool: give back what is cached for work before.
            with self._on_device():
                if self._can_wait():
                    self._driver.empty_cache()
        self._note_eager(function, reason, detail)


_MOVING = (
    "each call of {name} copies inputs from here on, as they, or others beside them, were elsewhere"
    " in four captures of few replays: {inputs}"
)
_GATHERED = (
    f"{Cause.MOVING_WEIGHTS.fix}; those that are gathered for each step, as by fully_shard, have to"
    " be copied"
)


def _let_go(_: object) -> None:
    """Do nothing: who calls this has kept an object up to now."""


def _device(driver: Driver, index: int) -> contextlib.AbstractContextManager[object]:
    """Make a device of torch's the current one; the simulator has one only."""
    is_torch = driver.device_type == "cuda"
    return torch.cuda.device(index) if is_torch else contextlib.nullcontext()
