"""The keys of a graphed function, and how they are captured."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from typing import Any, cast

import torch

from cgraph import _core, _driver, _torch
from cgraph._captures.busy import busy
from cgraph._functions.claims import claimed
from cgraph._functions.failures import Failure, failure_of
from cgraph._functions.keys import Identity, Key, modules_in_words, text_of, values_in_words
from cgraph._functions.limits import Limits
from cgraph._functions.native import entry_of_call, entry_of_graph
from cgraph._functions.padding.rows import Rows
from cgraph._functions.places import Places
from cgraph._functions.ready import Ready
from cgraph._functions.together import Together
from cgraph._recording import refusals
from cgraph._recording.arguments import Arguments
from cgraph._recording.calls import Call
from cgraph._recording.capture import record
from cgraph._recording.conditions import NotReadyError, WarmupError
from cgraph._recording.held import Holding
from cgraph._recording.options import Options
from cgraph._recording.plan import Plan
from cgraph._recording.recorded import Recorded
from cgraph._recording.training import Trained, train_or_record
from cgraph._source import user_line
from cgraph._state.holders import Holder
from cgraph._state.reach import Reach, Surroundings
from cgraph._state.reads import Values, key_of
from cgraph._state.search import Found, found_tensors
from cgraph._text import plural
from cgraph.errors import CaptureError, StateError, add_note

__all__ = ["Capturing"]


class Capturing:
    """The keys of a graphed function, and its captures.

    Args:
        dispatcher: Finds native entries. It has this, and is not kept alive.
        function: What is captured.
        arguments: How its arguments are called.
        options: The function's options.
        turn: What lets one thread at a time replay. Who calls a method here has it.

    Attributes:
        function: What is captured.
        name: Its name.
        holding: Who is told of results that a caller still has.
        keys: Those that are remembered, the first one first.
        limits: How many of them are captured and kept.
        ready: Which of them have graphs.
        places: Where captures are made.
        rows: Where calls have rows.
    """

    def __init__(
        self,
        dispatcher: _core.Dispatcher,
        function: Callable[..., Any],
        arguments: Arguments,
        options: Options,
        turn: _core.Turn,
    ) -> None:
        self.keys: dict[Hashable, Key] = {}
        # Who lets a function go wants its memory at once, and not when garbage is collected.
        dispatcher = cast(_core.Dispatcher, weakref.proxy(dispatcher))
        self._dispatcher = dispatcher
        self._arguments = arguments
        self.function = function
        self._options = options
        self.name = getattr(function, "__qualname__", type(function).__qualname__)
        self.holding = None if options.on_held == "ignore" else Holding(self.name, options.on_held)
        self._reach = Reach(function, turn)
        # Leaves to whose gradients calls may add, and which captures have found without any.
        self._without: dict[int, _torch.TensorWeakRef] = {}
        # By the modules among the arguments.
        self._values: dict[tuple[int, ...], Values] = {}
        # Of the call whose key was asked for last.
        self._reached: Surroundings | None = None
        self.rows = Rows(options)
        self.places = Places(options.pool)
        self._copies = options.outputs == "clone"
        self._is_warm = False
        self.limits = Limits(self.keys, dispatcher, options)
        self.ready = Ready(self.name, self.limits, dispatcher, options.max_recording)

    def taken(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """A call, taken apart."""
        return Call(self._arguments, self.surroundings().owned, args, kwargs)

    def fits(self, call: Call) -> bool:
        """Whether the function can be called with the arguments of a call, as far as is known."""
        return self._arguments.fit(*call.arguments(call.tensors))

    @property
    def reached(self) -> Surroundings | None:
        """What is reached by the call whose key was asked for last; None after a reset."""
        return self._reached

    def surroundings(self, call: Call | None = None) -> Surroundings:
        """What the function reaches, as it was at the last capture or is now.

        Args:
            call: A call, among whose arguments there may be modules.
        """
        return self._reach.known(() if call is None else call.modules)

    def ahead(self, call: Call, is_frozen: bool, together: Together | None = None) -> None:
        """Capture the key of a call, unless it is; errors come out.

        Args:
            call: The call.
            is_frozen: Whether captures are forbidden.
            together: What instantiates the graph at its end; None to do so here.
        """
        key = self.key(call)
        if self.ready.has_graph(key, call, is_frozen):
            return
        self.ready.require_thawed(key, is_frozen)
        self.require_no_reason_against(call, key)
        # Its calls may have run eagerly until now.
        self.limits.drop(key, key.state)
        try:
            self.capture(key, call, together)
        except WarmupError as error:
            self.limits.forget_unused(key)
            self.failed_ahead(key, error.cause)
            error.come_out()
        except NotReadyError as error:
            raise self.failed_ahead(key, error.ahead) from None
        except Exception as error:
            self.failed_ahead(key, error)
            raise
        self.rows.learn(call)

    def failed_ahead(self, key: Key, error: Exception) -> Exception:
        """An error that comes out of a capture ahead of time, which then names the key."""
        if key.recorded is None:
            key.has_failed(failure_of(error))
        add_note(error, f"cgraph: {self.name} was being captured for the key ({key.text})")
        return error

    def key(self, call: Call, reached: Surroundings | None = None) -> Key:
        """The key of a call, which may be a new one.

        Args:
            call: The call.
            reached: What is reached by a call just before that differs in its tensors only.
        """
        self._reached = reached or self.surroundings(call)
        identity = self.identity(call, self._reached)
        is_looked_for = reached is None or identity in self.keys
        if is_looked_for and not self._is_settled(identity):
            # Looking for modules that were not there takes time, so only such keys have it done.
            earlier, self._reached = self._reached, self._reach.now(call.modules, self._reached)
            if self._reached is not earlier:
                identity = self.identity(call, self._reached)
        if (known := self.keys.get(identity)) is not None:
            return known
        besides = [modules_in_words(identity.training, identity.requires_grad)]
        if identity.gradients:
            besides.append(f"{plural(len(identity.gradients), 'gradient')} before")
        besides += values_in_words(self._values_of(call).changed())
        besides = [one for one in besides if one]
        text = text_of([*(call.words() or ["no arguments"]), *besides], identity, self.keys)
        words = sorted([*call.words(by_name=False), *besides])
        return self._remember(identity, Key(text, words))

    def _is_settled(self, identity: Identity) -> bool:
        """Whether a key is known, and what its graph reads besides the arguments is in place."""
        key = self.keys.get(identity)
        return key is not None and (key.surroundings is None or key.surroundings.moved is None)

    def free_key(self, call: Call, is_frozen: bool) -> Key:
        """The key of a call, or where that has an open call, another one for the same calls.

        The first one, which is open, where all are and there can be no more.

        Args:
            call: The call.
            is_frozen: Whether captures are forbidden.
        """
        first = self.key(call)
        if not first.is_open:
            return first
        identity = self.identity(call, self._reached)
        for count in range(1, self._options.most_open):
            beside = identity._replace(beside=count)
            key = self.keys.get(beside)
            if is_frozen and (key is None or key.recorded is None):
                break
            if key is None:
                word = f"beside {plural(count, 'call')} before backward"
                key = Key(f"{first.text}, {word}", [*first.words, word], is_beside=True)
                return self._remember(beside, key)
            if not key.is_open:
                return key
        return first

    def _remember(self, identity: Identity, key: Key) -> Key:
        self.keys[identity] = key
        key.has_sizes = self._options.sizes is not None
        self.limits.forget(key)
        return key

    def require_no_reason_against(self, call: Call, key: Key | None = None) -> None:
        """Refuse a call that is better not captured.

        Args:
            call: The call.
            key: Its key, whose report is to say so.

        Raises:
            CaptureError: It is.
        """
        reason = self.reason_against(call)
        if reason is not None:
            if key is not None:
                key.has_failed(Failure(reason, user_line(), None))
            raise CaptureError(f"{self.name} cannot be captured for ({call}): {reason}")

    def reason_against(self, call: Call) -> str | None:
        """Why a call of the key that was asked for last is better not captured."""
        reached = self._reached or self.surroundings(call)
        return refusals.reason_against(call, self.function) or reached.reason_against

    def is_saved_elsewhere(self, call: Call) -> bool:
        """Whether somebody sees what autograd saves in such a call, and would in its warm-up."""
        return refusals.is_saved_elsewhere(call, self._reached or self.surroundings(call))

    def identity(self, call: Call, surroundings: Surroundings | None = None) -> Identity:
        """What all calls of a key have in common, as the modules are now."""
        surroundings = surroundings or self.surroundings(call)
        training = surroundings.training
        requires_grad = surroundings.requires_grad if call.mode.grad else ()
        leaves = ((number, reference()) for number, reference in self._without.items())
        there = (number for number, one in leaves if one is not None and one.grad is not None)
        gradients, values = frozenset(there), key_of(self._values_of(call).changed())
        arguments = call.key(), training, requires_grad, _driver.number()
        return Identity(*arguments, gradients=gradients, values=values)

    def reads_values(self, call: Call) -> bool:
        """Whether a graph of such calls has read numbers, which keys have in common."""
        return self._values_of(call).are_any

    def _values_of(self, call: Call) -> Values:
        given = tuple(map(id, call.modules))
        if given not in self._values:
            # Of others whose graphs are gone nothing is known any more.
            self._values = {one: values for one, values in self._values.items() if values.are_any}
            self._values[given] = Values()
        return self._values[given]

    def capture(self, key: Key, call: Call, together: Together | None = None) -> None:
        """Capture a key that was just asked for; nothing has changed if that fails.

        The key has no graph afterwards if it was forgotten during the capture, as by ``reset()``.
        """
        driver = _driver.current()
        was_evicted = key.state == "evicted"
        surroundings = self._reached
        assert surroundings is not None
        needs_grad = call.mode.grad and (call.needs_grad or surroundings.needs_grad)
        plan = self.plan(call, surroundings, driver, waits=together is not None)
        with busy(), claimed(plan.pool):
            if not plan.only_captures:
                # Replays on any stream may still read what is about to be written.
                driver.synchronize()
            with _torch.without_gradients():
                shares, fills = not needs_grad, not plan.only_captures
                statics = self.places.statics(driver, call.tensors, shares, fills)
            lane = self.places.lane(driver)
            recorded: Recorded | Trained
            if needs_grad:
                of_passes = surroundings.modules, self._copies, self.holding
                recorded = train_or_record(plan, call, statics, driver, *of_passes)
            else:
                recorded = record(plan, call, statics, driver)
                if call.mode.grad:
                    refusals.require_no_gradient(recorded)
                else:
                    refusals.require_none_recorded(recorded)
            surroundings = self.followed(call, recorded, surroundings, not plan.only_captures)
            if self._options.debug:
                self._debug(plan, key, call, recorded, surroundings.storages)
        self.keep(key, call, recorded, surroundings, surroundings.flags, lane, together)
        if was_evicted:
            key.again("evicted", None, user_line())

    def plan(
        self, call: Call, surroundings: Surroundings, driver: _driver.Driver, *, waits: bool
    ) -> Plan:
        """How a call is to be captured.

        Args:
            call: The call.
            surroundings: What its function reaches.
            driver: The driver in force.
            waits: Whether the graph may wait for its exec.
        """
        _torch.keep_from_tracing()
        needs_grad = call.mode.grad and (call.needs_grad or surroundings.needs_grad)
        pool, stream = self.places.place(driver, needs_grad)
        # Replays would write what nothing puts back, and no call has shown.
        may_replay = bool(self._options.preserve_state or self._options.warmup)
        debugs = bool(self._options.debug)
        measures = self._options.measure and not debugs and may_replay
        return Plan(
            function=self.function,
            name=self.name,
            pool=pool,
            stream=stream,
            mode=self._options.capture_error_mode,
            warmup=min(self._options.warmup, 1) if self._is_warm else self._options.warmup,
            preserve=self._options.preserve_state,
            measure=measures,
            keep_template=self._options.keep_templates and not debugs,
            instantiates=not waits or measures or debugs,
            only_captures=not (self._options.warmup or measures or needs_grad or debugs),
            dictionaries=surroundings.dictionaries,
            search=self._search(call, surroundings),
            moved=surroundings.find_displaced,
            # A debugger looks at the operators of what is written.
            compiles=driver.captures_compiled and not debugs,
            debugs=debugs,
        )

    def found(self, call: Call) -> tuple[Sequence[dict[str, Any]], Found]:
        """What holds the attributes that the function may set, and what else it finds."""
        surroundings = self.surroundings(call)
        return surroundings.dictionaries, self._search(call, surroundings)()

    def _search(self, call: Call, surroundings: Surroundings) -> Callable[[], Found]:
        """What finds tensors that the function may find elsewhere than in modules."""
        constants = [(leaf.name, leaf.value) for leaf in call.leaves if leaf.kind == "constant"]
        return functools.partial(found_tensors, self.function, surroundings.modules, constants)

    def followed(
        self, call: Call, recorded: Recorded | Trained, surroundings: Surroundings, has_called: bool
    ) -> Surroundings:
        """What a function reaches, with what a graph of it reads that must still be there.

        Args:
            call: A call of the graph.
            recorded: The graph.
            surroundings: What the function reached before it was captured.
            has_called: Whether something has run besides the capture. Breaks have anyway.
        """
        if isinstance(recorded, Recorded):
            has_called |= bool(recorded.breaks)
        if has_called and not recorded.has_added_hooks:
            surroundings = self._reach.after_call(call.modules, surroundings)
        full: list[Holder] = []
        if not isinstance(recorded, Trained):
            gradients = recorded.gradients
            self._note_without([*gradients.made, *gradients.asked])
            full = [*recorded.states, *gradients.followed()]
        # Where the call itself has moved something, the next one captures anew.
        holders = [*recorded.used, *recorded.reads]
        if (holders or full) and surroundings.moved is None:
            values = self._values_of(call)
            # What was not there at this capture, and is part of the key.
            known = {one.way for one in recorded.reads}
            changed = (pair for pair in values.changed() if pair[0].way not in known)
            holders += [one._replace(value=now) for one, now in changed]
            values.note(recorded)
            return surroundings.with_holders(holders, full)
        return surroundings

    def keep(
        self,
        key: Key,
        call: Call,
        recorded: Recorded | Trained,
        surroundings: Surroundings,
        flags: _core.Flags,
        lane: _core.Lane | None,
        together: Together | None,
    ) -> None:
        """Let a key have a graph, now or when it has an exec.

        Args:
            key: The key.
            call: A call of it.
            recorded: The graph.
            surroundings: What its function reaches.
            flags: Which modules trained at the capture.
            lane: The stream that the pool was used on last.
            together: What instantiates the graph at its end; None if it has an exec.
        """
        # Unless something in the capture has called reset().
        self._is_warm = self.limits.knows(key)

        def hold() -> None:
            """Let calls be replays, while modules train as at the capture."""
            if isinstance(recorded, Trained):
                which = recorded.call, call, surroundings, flags, lane
                entry = entry_of_call(*which, trained=recorded)
            else:
                entry = entry_of_graph(
                    recorded,
                    self.function,
                    call,
                    surroundings,
                    flags,
                    copies=self._copies,
                    held=self.holding,
                    lane=lane,
                )
            key.hold(recorded, entry, call, surroundings)
            self.add(call, entry)
            self.limits.evict(key)

        if together is not None and isinstance(recorded, Recorded) and recorded.is_waiting:
            together.add(key, recorded, hold)
        else:
            self.limits.hold_unless_gone(key, recorded, hold)

    def _note_without(self, leaves: Sequence[torch.Tensor]) -> None:
        """Calls with gradients in these leaves have keys of their own from now on."""
        living = ((number, one) for number, one in self._without.items() if one() is not None)
        self._without = {**dict(living), **{id(one): _torch.TensorWeakRef(one) for one in leaves}}

    def add(self, call: Call, entry: _core.Entry) -> None:
        """Let calls like this one find an entry."""
        if call.is_native:
            self._dispatcher.add(entry)

    def require_idle(self) -> None:
        """Refuse a reset inside a break.

        Raises:
            StateError: A replay is under way.
        """
        if any(key.is_running for key in self.keys.values()):
            raise StateError(
                f"{self.name} was to be reset inside one of its own breaks: call reset() after the"
                " call"
            )

    def reset(self) -> None:
        """Forget everything."""
        with ExitStack() as last:
            # Whatever callbacks of the graphs raise.
            last.callback(self._forget)
            for key in self.keys.values():
                last.callback(self.limits.drop, key, "evicted")

    def _forget(self) -> None:
        self.keys.clear()
        self.limits.clear()
        self._reach.clear()
        self._reached = None
        self._without.clear()
        self._values.clear()
        self.places.clear()
        self.rows.clear()
        self._is_warm = False

    def _debug(
        self,
        plan: Plan,
        key: Key,
        call: Call,
        recorded: Recorded | Trained,
        outside: set[int],
    ) -> None:
        """Let a key be replayed for debugging; captures it in steps of one operator."""
        from cgraph._functions.debug.replays import debugged
        from cgraph._functions.debug.training import debugged_call

        def may_poison() -> bool:
            # A backward pass reads what its forward pass left in memory that counts as free.
            return not any(isinstance(one.recorded, Trained) for one in self.keys.values())

        how = self._options.debug, plan, self.name, key.text, call
        try:
            if isinstance(recorded, Trained):
                recorded.debugged = debugged_call(*how, recorded, self.taken)
            else:
                recorded.debugged = debugged(*how, recorded, outside, may_poison)
        except BaseException:
            recorded.reset()
            raise
