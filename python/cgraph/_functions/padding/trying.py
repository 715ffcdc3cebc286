"""Serves calls of other numbers of rows than were captured, where padding is known to be safe."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from cgraph import _core, _driver, _torch
from cgraph._captures.busy import busy
from cgraph._functions.keys import Key, Tried
from cgraph._functions.leaving import Leaving
from cgraph._functions.native import entry_of_call, returned
from cgraph._functions.padding.contents import AnyPad, resized, trials
from cgraph._functions.padding.padded import Leak, Padded, cut, cut_leaves, leaks
from cgraph._functions.padding.rows import Fit
from cgraph._functions.padding.writes import Writes
from cgraph._recording.calls import Call, copied
from cgraph._recording.noise import same_rows
from cgraph._recording.options import Options, Pad
from cgraph._recording.recorded import Recorded
from cgraph._recording.refusals import OF_OPEN
from cgraph._recording.training import Trained
from cgraph._recording.undone import Undone
from cgraph._source import levels_to_user
from cgraph._state.gradients import Gradients
from cgraph._state.rollback import Rollback
from cgraph._state.search import Found
from cgraph._state.surroundings import tensors_of
from cgraph._text import first_line
from cgraph._torch import tree_flatten
from cgraph.errors import DriverError, LivenessError, OutOfMemoryError

if TYPE_CHECKING:
    from cgraph._functions.capturing import Capturing
    from cgraph._functions.serving import Request, Serving

__all__ = ["Padding"]

# So many equal replays show how far apart they come, where those with other padding differ.
_REPEATED = 8
# So many calls with other random numbers show what depends on these.
_DRAWN = 8


class Padding:
    """Calls that are padded to a size.

    Args:
        serving: Sees that sizes are captured, and answers calls that cannot be padded.
        capturing: The keys of the sizes.
        options: The function's options.
    """

    def __init__(self, serving: Serving, capturing: Capturing, options: Options) -> None:
        self._serving = serving
        self._capturing = capturing
        self._options = options
        # Whether it was said that sizes have no effect.
        self._has_told = False

    def serve(self, request: Request) -> _core.Entry | Callable[[], Any] | None:
        """What answers a call that has the rows of no size; None for any other call."""
        options, capturing, serving = self._options, self._capturing, self._serving
        call = request.call
        if options.sizes is None:
            return None
        found = capturing.rows.fit(call, options.sizes)
        if found is None:
            self._tell_of_no_effect(call)
            return None
        if found.rows == found.size or serving.is_eager(call):
            return None

        def eagerly(reason: str) -> Callable[[], Any]:
            return serving.eagerly(capturing.key(call), request, reason)

        def refused(reason: str) -> Callable[[], Any]:
            return serving.refused(capturing.key(call), request, reason)

        if found.rows == 0:
            return eagerly("no rows")
        if found.size is None:
            return eagerly(f"larger than all sizes: the largest one is {options.sizes[-1]}")
        try:
            like = call.replaced(_like(call.tensors, found))
            known = capturing.keys.get(capturing.identity(like))
            if known is not None and serving.is_settled(known):
                known.eager_calls += 1
                return request.eagerly(capturing.function)
            tensors = resized(call.tensors, found, found.size, options.pad)
        except (RuntimeError, TypeError) as error:
            if callable(options.pad):
                raise
            return refused(f"padding to {found.size} rows failed: {first_line(error)}")
        whole = call.replaced(tensors)
        large = capturing.free_key(whole, request.is_frozen)
        if large.is_open:
            return serving.once_eagerly(large, request, OF_OPEN)
        instead = serving.ensure(large, request.padded(whole))
        if instead is not None:
            return instead
        identity = capturing.identity(call)
        if identity in large.padded:
            return large.padded[identity]
        try:
            batched, leak = self._shown(large, call, found)
        except _ForgottenError:
            return request.eagerly(capturing.function)
        if batched is None:
            return refused(f"padding to {found.size} rows is not safe: {leak}")
        large.padded[identity] = entry = self._entry(large, call, found, batched)
        capturing.add(call, entry)
        return entry

    def _shown(self, large: Key, call: Call, found: Fit) -> Tried:
        """What trials have shown; they are made where none has.

        Raises:
            _ForgottenError: The function has let the graph go meanwhile.
        """
        known = large.tried.get(found.dims)
        if known is not None:
            return known
        # Trials overwrite what the last call has returned.
        large.release()
        assert large.recorded is not None
        with _apart(large.recorded, call) as apart:
            if self._options.check_padding:
                shown = self._tried(large, apart, found)
            else:
                shown = self._assumed(large, apart, found), None
        # A row that is repeated has the same mean: more rows are to show what that does.
        if found.rows > 1 or self._options.pad != "repeat":
            large.tried[found.dims] = shown
        return shown

    def clear(self) -> None:
        """Forget what was said."""
        self._has_told = False

    def _tell_of_no_effect(self, call: Call) -> None:
        """Say once that no tensor has rows; scalars are not meant to have any."""
        if self._has_told or not any(tensor.dim() for tensor in call.tensors):
            return
        self._has_told = True
        warnings.warn(
            f"sizes= has no effect on ({call}): no tensor of it has the dimension"
            f" dim={self._options.dim!r}, along which rows are counted",
            stacklevel=levels_to_user(),
        )

    def _entry(
        self, large: Key, call: Call, found: Fit, batched: Sequence[int | None]
    ) -> _core.Entry:
        """The entry of calls of this number of rows."""
        recorded, surroundings = large.recorded, large.surroundings
        assert recorded is not None and surroundings is not None
        if isinstance(recorded, Trained):
            run = _PaddedCall(recorded, found, self._options.pad, batched, self._capturing)
            lane = self._capturing.places.lane(_driver.current())
            return entry_of_call(
                run, call, surroundings, surroundings.flags, lane, trained=recorded
            )

        def outputs() -> list[Any]:
            cut = cut_leaves(recorded.outputs, batched, found.rows)
            return [
                # An argument that is returned is the caller's own.
                whole if recorded.argument(whole) is not None else part
                for whole, part in zip(recorded.outputs, cut, strict=True)
            ]

        function, outside = self._capturing.function, surroundings.storages
        # What replays for debugging gives the leaves theirs.
        gradients = Gradients([]) if recorded.debugged else recorded.gradients
        # With the graph's tensors: those of the call are not kept.
        like_call = call.replaced(recorded.statics)
        leaving = Leaving(recorded, function, like_call, outputs, outside, gradients)
        work: Any = Padded(recorded, found, self._options.pad, leaving)
        if (native := work.native()) is not None:
            work, like = native
        else:
            # Calls are compared with dense tensors, as they come; what is copied to may have gaps.
            like = [torch.empty_like(tensor, requires_grad=False) for tensor in call.tensors]
        lane = self._capturing.places.lane(_driver.current())
        return _core.Entry(
            *call.patterns([_torch.signature(one) for one in like]),
            is_in_order=call.is_in_order,
            modes=call.mode,
            flags=surroundings.flags,
            fixed=surroundings.fixed,
            work=work,
            outputs=returned(
                recorded,
                outputs(),
                surroundings,
                copies=self._options.outputs == "clone",
                held=self._capturing.holding,
            ),
            lane=lane,
            turn=surroundings.turn,
            written=recorded.writes,
            has_breaks=bool(recorded.breaks),
        )

    def _assumed(self, large: Key, call: Call, found: Fit) -> list[int | None]:
        """Where the rows of a result are by its shape alone."""
        recorded, pad = large.recorded, self._options.pad
        assert recorded is not None
        if isinstance(recorded, Trained):
            with torch.random.fork_rng(_torch.random_devices()), torch.no_grad():
                leaves = _replayed(recorded, call, found, pad, pad, False)[0]
        else:
            leaves = recorded.outputs
        dim = next(one for one in found.dims if one is not None)
        return [
            dim
            if isinstance(leaf, torch.Tensor) and leaf.dim() > dim and leaf.shape[dim] == found.size
            else None
            for leaf in leaves
        ]

    def _tried(self, large: Key, call: Call, found: Fit) -> Tried:
        """Run the call without padding, and with paddings that differ; what shows."""
        recorded, function = large.recorded, self._capturing.function
        rows, size = found.rows, found.size
        assert recorded is not None and size is not None
        rollback = Rollback(leaves=tensors_of((function, call.arguments(call.tensors))))
        devices = _torch.random_devices()
        dictionaries, here = (
            self._capturing.found(call) if recorded.breaks else ((), Found.nothing())
        )
        python = Undone(dictionaries, here, rollback.makes_or_is_of(()))
        # Replays on any stream may still read what is about to be written.
        _driver.current().synchronize()
        try:
            with busy(), rollback, torch.no_grad():
                # Made in the block: what is written to them is compared as a result.
                gradients = _gradients_of(recorded)

                def run() -> tuple[list[Any], int, Any]:
                    """What the call without padding leaves, the results first, and how many."""
                    tensors = [copied(tensor) for tensor in call.tensors]
                    args, kwargs = call.arguments(tensors)
                    with torch.set_grad_enabled(call.mode.grad):
                        leaves, spec = tree_flatten(function(*args, **kwargs))
                    if large.recorded is not recorded:
                        raise _ForgottenError
                    written = [tensors[place] for place in recorded.mutated]
                    made = [leaf.grad for leaf, _ in gradients]
                    return _copies([*leaves, *written, *made]), len(leaves), spec

                with torch.random.fork_rng(devices):
                    before = _random_states(devices)
                    eager, results, spec = run()
                    now = _random_states(devices)
                    draws = any(not torch.equal(*pair) for pair in zip(before, now, strict=True))
                    draws |= bool(rollback.generators_of(_driver.current().device_type))
                    keeps = draws or rollback.takes_probabilities
                    # Trials write the graph's inputs as well.
                    count = rollback.written
                    writes = Writes(rollback.buffers(count), callable(self._options.pad))
                    is_random = [False] * len(eager)
                    for _ in range(_DRAWN if draws else 0):
                        rollback.rewind()
                        python.put_back()
                        others, _, its_spec = run()
                        if its_spec != spec:
                            return None, "the result is put together in another way each time"
                        for place, pair in enumerate(zip(eager, others, strict=True)):
                            is_random[place] |= not _are_same(*pair)
                        writes.see_again(rollback.buffers(count))
                names = [
                    *(f"output {place}" for place in range(results)),
                    *(call.names[place] for place in recorded.mutated),
                    *(f"the gradient of a tensor {list(leaf.shape)}" for leaf, _ in gradients),
                ]

                def trial(pads: tuple[AnyPad, AnyPad]) -> tuple[list[Any], Any]:
                    rollback.rewind()
                    python.put_back()
                    with torch.random.fork_rng(devices):
                        try:
                            return _replayed(recorded, call, found, *pads, keeps)
                        except _NOT_OF_CONTENT:
                            raise
                        except Exception as error:
                            text = f"{type(error).__name__}: {first_line(error)}"
                            raise _ContentError(text) from error

                def shows(
                    other: list[Any], agreed: dict[int, torch.Tensor]
                ) -> tuple[list[int | None], Leak | None]:
                    return leaks(names, sames, other, eager, rows, size, is_random, agreed)

                first, *rest = trials(self._options.pad, rows)
                result, its_spec = trial(first)
                if its_spec != spec:
                    return None, "the result is put together in another way"
                sames = [result]
                writes.see(rollback.buffers(count))
                batched, leak = shows(result, {})
                for pads in rest:
                    if leak is not None:
                        break
                    agreed: dict[int, torch.Tensor] = {}
                    try:
                        result = trial(pads)[0]
                    except _ContentError:  # what no call has shows nothing
                        continue
                    writes.see(rollback.buffers(count))
                    batched, leak = shows(result, agreed)
                    # Some kernels add up in any order, and now and then come to another result, if
                    # only a little. What the padding contains shows in it each time.
                    for _ in range(_REPEATED):
                        if leak is None or not leak.may_be_noise:
                            break
                        if len(sames) <= _REPEATED:
                            sames.append(trial(first)[0])
                        batched, leak = shows(trial(pads)[0], agreed)
                if leak is None and writes.are_spoilt():
                    leak = Leak("what the function writes is not as without padding")
        except _ContentError as error:
            return None, f"with the padding it raises {error}"
        except torch.OutOfMemoryError as error:
            return None, (
                "there is no memory to try it out: give check_padding=False if padding rows leave"
                f" others alone ({first_line(error)})"
            )
        finally:
            rollback.undo()
            python.put_back()
        if leak is not None:
            return None, leak.text
        return batched[:results], None


class _ForgottenError(Exception):
    """The function has let its own graph go, as by ``reset()``."""


class _ContentError(Exception):
    """A replay raised, as a break or a kernel does that refuses what the padding contains."""


_NOT_OF_CONTENT = (torch.OutOfMemoryError, OutOfMemoryError, DriverError, LivenessError)


class _PaddedCall:
    """A call with gradients, padded and cut by operators that pass them on."""

    def __init__(
        self,
        recorded: Trained,
        found: Fit,
        pad: Pad,
        batched: Sequence[int | None],
        capturing: Capturing,
    ) -> None:
        self._recorded = recorded
        self._found = found
        self._pad = pad
        self._batched = batched
        self._taken = capturing.taken

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Pad, replay and cut."""
        assert self._found.size is not None
        call = self._taken(args, kwargs)
        tensors = resized(call.tensors, self._found, self._found.size, self._pad)
        args, kwargs = call.arguments(tensors)
        whole = self._recorded.call(*args, **kwargs)
        result = cut(whole, self._batched, self._found.rows)
        lent = self._recorded.lent
        return result if lent is None else lent.remember(result)


@contextmanager
def _apart(recorded: Recorded | Trained, call: Call) -> Iterator[Call]:
    """A call whose tensors no replay overwrites; the given ones are as before at the end.

    They may be views of what the graph, or another one of its pool, has returned.
    """
    driver, pool = _driver.current(), recorded.pool
    lent = [one for one in call.tensors if one.numel() and driver.is_in_pool(one, pool)]
    bytes_of = [_torch.bytes_of(one) for one in lent]
    known = [one.clone() for one in bytes_of]
    copies = {id(one): copied(one) for one in lent}
    try:
        yield call.replaced([copies.get(id(one), one) for one in call.tensors])
    finally:
        for now, before in zip(bytes_of, known, strict=True):
            now.copy_(before)


def _like(tensors: Sequence[torch.Tensor], found: Fit) -> list[torch.Tensor]:
    """Tensors of as many rows as the size has, with nothing in them."""
    assert found.size is not None
    sized = zip(tensors, found.dims, strict=True)
    return [
        one if dim is None else one.new_empty([*one.shape[:dim], found.size, *one.shape[dim + 1 :]])
        for one, dim in sized
    ]


def _replayed(
    recorded: Recorded | Trained,
    call: Call,
    found: Fit,
    pad: AnyPad,
    pad_of_floats: AnyPad,
    keeps: bool,
) -> tuple[list[Any], Any]:
    """The leaves of a replay with this padding, as copies, and how they are put together."""
    assert found.size is not None
    tensors = resized(call.tensors, found, found.size, pad, pad_of_floats, keeps)
    if isinstance(recorded, Trained):
        args, kwargs = call.arguments(tensors)
        leaves, spec = tree_flatten(recorded.replay(*args, **kwargs))
        return _copies(leaves), spec
    for static, tensor in zip(recorded.statics, tensors, strict=True):
        static.copy_(tensor)
    recorded.graph.replay()
    heads = cut_leaves(recorded.statics, found.dims, found.rows)
    written = [heads[place] for place in recorded.mutated]
    computed = [gradient for _, gradient in _gradients_of(recorded)]
    return _copies([*recorded.outputs, *written, *computed]), recorded.spec


def _gradients_of(
    recorded: Recorded | Trained,
) -> Sequence[tuple[torch.Tensor, torch.Tensor | None]]:
    """The leaves that replays give other gradients, and these."""
    return () if isinstance(recorded, Trained) else recorded.gradients.computed


def _are_same(one: Any, other: Any) -> bool:
    """Whether two leaves are equal, NaN where NaN is."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and bool(one == other)
    return one.shape == other.shape and bool(same_rows(one, other, None).all())


def _copies(leaves: Sequence[Any]) -> list[Any]:
    return [one.detach().clone() if isinstance(one, torch.Tensor) else one for one in leaves]


def _random_states(devices: Sequence[int]) -> list[torch.Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]
