"""What a graphed function does with a call that no native entry fits."""

from __future__ import annotations

import functools
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from cgraph import _core
from cgraph._explanation.findings import is_of_first_use
from cgraph._functions.capturing import Capturing
from cgraph._functions.claims import PoolBusyError
from cgraph._functions.failures import Failure, failure_of
from cgraph._functions.keys import Key
from cgraph._functions.native import entry_of_call
from cgraph._functions.padding.trying import Padding
from cgraph._recording import refusals
from cgraph._recording.arguments import Arguments
from cgraph._recording.calls import Call
from cgraph._recording.conditions import NotReadyError, WarmupError
from cgraph._recording.options import Options
from cgraph._recording.refusals import OF_WAITING
from cgraph._source import user_line
from cgraph._text import first_line
from cgraph.errors import CaptureError, add_note

__all__ = ["Request", "Serving"]

# So often in a row a call may make what a graph would use.
_WAITS = 3
# Behind what the reason says to do.
_ANEW = f"; so it was in {_WAITS + 1} calls, anew each time"


@dataclass(frozen=True)
class Request:
    """A call that is to be answered.

    Attributes:
        call: The call, taken apart.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        is_frozen: Whether captures are forbidden.
        whole: A call of the key whose graph is to serve it, which may have more rows.
    """

    call: Call
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    is_frozen: bool
    whole: Call

    @classmethod
    def of(
        cls, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], is_frozen: bool
    ) -> Request:
        """One that a graph of its own rows is to serve."""
        return cls(call, args, kwargs, is_frozen, call)

    def padded(self, whole: Call) -> Request:
        """The same, to be served by a graph of more rows."""
        return replace(self, whole=whole)

    @property
    def padded_names(self) -> str:
        """The arguments that have more rows in the whole call, in words."""
        pairs = zip(self.call.leaves, self.whole.leaves, strict=True)
        return ", ".join(one.name for one, other in pairs if one.value is not other.value)

    def eagerly(self, function: Callable[..., Any]) -> Callable[[], Any]:
        """The call of a function, to be made."""
        return functools.partial(function, *self.args, **self.kwargs)


class Serving:
    """Answers calls: by a graph, which may have to be captured, or eagerly.

    Args:
        capturing: The keys, and what captures them.
        arguments: How the function's arguments are called.
        options: The function's options.
        turn: What lets one thread at a time replay. Who calls a method here has it.
    """

    def __init__(
        self, capturing: Capturing, arguments: Arguments, options: Options, turn: _core.Turn
    ) -> None:
        self._capturing = capturing
        self._function = capturing.function
        self._arguments = arguments
        self._raises = options.on_fail == "raise"
        self._turn = turn
        # Which is not to keep it alive.
        serving: Any = weakref.proxy(self)
        self._padding = Padding(serving, capturing, options)
        # What was said of calls that run eagerly.
        self._told: set[str] = set()

    def serve(self, request: Request) -> _core.Entry | Callable[[], Any]:
        """What answers a call: an entry whose work is to be done in this turn, or a callable."""
        served = self._padding.serve(request) if request.call.odd_one is None else None
        if served is not None:
            return served
        key = self._capturing.free_key(request.call, request.is_frozen)
        if key.is_open:
            return self.once_eagerly(key, request, refusals.OF_OPEN)
        instead = self.ensure(key, request)
        if instead is not None:
            return instead
        assert key.entry is not None
        return key.entry

    def ensure(self, key: Key, request: Request) -> Callable[[], Any] | None:
        """See that a key is captured; what answers the call where it cannot be."""
        if not self._capturing.ready.has_graph(key, request.whole, request.is_frozen):
            instead = self._captured(key, request)
            if instead is not None:
                return instead
        reason = None if key.recorded is None else request.call.reason_beside(key.recorded.writes)
        if reason is None:
            return None
        if self._raises:
            raise CaptureError(reason)
        return self.once_eagerly(key, request, reason)

    def refused(self, key: Key, request: Request, reason: str) -> Callable[[], Any]:
        """As :meth:`eagerly`, unless failures are to come out.

        Raises:
            CaptureError: They are.
        """
        if self._raises:
            key.has_failed(Failure(reason, user_line(), None))
            self._capturing.limits.forget_unused(key)
            name = self._capturing.name
            raise CaptureError(f"{name} cannot be captured for ({request.call}): {reason}")
        return self.eagerly(key, request, reason)

    def eagerly(self, key: Key, request: Request, reason: str) -> Callable[[], Any]:
        """Let the key of ``request.whole`` run eagerly from now on, and answer this call."""
        self._stay_eager(key, request.whole, reason, user_line())
        return request.eagerly(self._function)

    def once_eagerly(self, key: Key, request: Request, reason: str) -> Callable[[], Any]:
        """Let one call run eagerly, which others of its key need not."""
        if reason not in self._told:
            self._told.add(reason)
            refusals.warn_of_call(self._capturing.name, reason)
        key.once = reason
        key.eager_calls += 1
        return request.eagerly(self._function)

    def is_eager(self, call: Call) -> bool:
        """Whether it is decided that calls of this key run eagerly."""
        key = self._capturing.keys.get(self._capturing.identity(call))
        return key is not None and key.reason is not None

    def is_settled(self, key: Key) -> bool:
        """Whether a key runs eagerly until it is captured ahead."""
        if key.reason is None or key.state != "eager":
            return False
        return not self._capturing.limits.is_of_many(key.reason)

    def clear(self) -> None:
        """Forget what calls have shown and what was said of them."""
        self._padding.clear()
        self._told.clear()

    def _captured(self, key: Key, request: Request) -> Callable[[], Any] | None:
        """The same as :meth:`ensure` for a key that has no graph."""
        capturing, whole = self._capturing, request.whole
        if recurs := capturing.limits.is_recurring(key):
            key.reason = None
        is_of_many = key.reason is not None and capturing.limits.is_of_many(key.reason)
        if key.reason is not None and not (is_of_many and request.is_frozen):
            key.eager_calls += 1
            return request.eagerly(self._function)
        if not self._arguments.fit(request.args, request.kwargs):
            # Python says what is wrong with them.
            capturing.keys.pop(capturing.identity(whole), None)
            return request.eagerly(self._function)
        reason = capturing.reason_against(whole)
        if reason is not None:
            is_empty = reason == refusals.OF_EMPTY
            return (self.eagerly if is_empty else self.refused)(key, request, reason)
        capturing.ready.require_thawed(key, request.is_frozen)
        if not recurs and (reason := capturing.limits.explosion(key)) is not None:
            return self.eagerly(key, request, reason)
        if capturing.is_saved_elsewhere(whole):
            return self.once_eagerly(key, request, refusals.OF_SAVING)
        try:
            capturing.capture(key, whole)
        except WarmupError as error:
            if whole is not request.call or refusals.is_of_old_torch(error.cause):
                # Never called with so many rows by the user, or refused only where a mode looks.
                return self._failed(key, request, error.cause)
            # Nothing of a capture: what the function raises, the caller gets.
            capturing.limits.forget_unused(key)
            self._with_note(error.cause, key)
            error.come_out()
        except PoolBusyError:
            key.once = refusals.OF_BUSY
            key.eager_calls += 1
            return request.eagerly(self._function)
        except NotReadyError as error:
            # It is after this call, unless each one makes something new.
            anew = CaptureError(f"{error}{_ANEW}")
            return self._later(key, request, anew, first_line(error))
        except Exception as error:
            if is_of_first_use(error):
                return self._later(key, request, error, first_line(error))
            return self._failed(key, request, error)
        if not capturing.limits.knows(key) or key.recorded is None:
            # Hooks, or the function itself, have called reset() meanwhile.
            return request.eagerly(self._function)
        capturing.limits.tried(key)
        capturing.rows.learn(request.call)
        return None

    def _later(self, key: Key, request: Request, error: Exception, why: str) -> Callable[[], Any]:
        """Let a call run eagerly, so that the next one may be captured; not too often.

        Args:
            key: The key.
            request: The call.
            error: Why the key is not captured at all, if this was once too often.
            why: Why the call runs eagerly.
        """
        key.waits += 1
        if key.waits > _WAITS:
            return self._failed(key, request, error)
        key.eager_calls += 1
        self._capturing.limits.tried(key)
        key.wait(f"{OF_WAITING}: {why}")
        traceback.clear_frames(error.__traceback__)
        return request.eagerly(self._function)

    def _failed(self, key: Key, request: Request, error: Exception) -> Callable[[], Any]:
        """Go on after a capture that failed; what the function itself raises comes out."""
        reason, where, fix = failure_of(error)
        if fix is None and (padded := request.padded_names):
            fix = (
                f"padded were {padded}: if not all of these have rows, name those that do, as"
                f" dim={{{padded.split(', ')[0]!r}: 0}}"
            )
        if self._raises:
            key.has_failed(Failure(reason, where, fix))
            raise self._with_note(error, key)

        # What the frames still hold of the capture would meet the eager call in autograd.
        traceback.clear_frames(error.__traceback__)

        def run() -> Any:
            # What it raises here is its own affair, and the next call may go well.
            result = self._function(*request.args, **request.kwargs)
            with self._turn:
                # Another thread may have captured or forgotten it meanwhile.
                if self._capturing.limits.knows(key) and key.recorded is None:
                    self._stay_eager(key, request.whole, reason, where, fix)
                    self._capturing.limits.tried(key)
            return result

        return run

    def _with_note(self, error: Exception, key: Key) -> Exception:
        """An error that names the key, where errors are to come out."""
        if self._raises:
            name = self._capturing.name
            add_note(error, f"cgraph: {name} was being captured for the key ({key.text})")
        return error

    def _stay_eager(
        self, key: Key, call: Call, reason: str, where: str | None, fix: str | None = None
    ) -> None:
        entry = None
        capturing = self._capturing
        capturing.limits.drop(key, "eager")
        reached = capturing.surroundings(call)
        # An entry would keep modules that are new in each call, and it does not compare which
        # tensors of those that the function itself reaches require gradients.
        is_same = not call.modules and not (call.mode.grad and reached.requires_grad)
        # It would also come before the entries of the key that this one is beside, and of those
        # with other numbers.
        is_same = is_same and not key.is_beside and not capturing.reads_values(call)
        if call.is_native and is_same and not capturing.limits.is_of_many(reason):
            entry = entry_of_call(self._function, call, reached, reached.flags)
            capturing.add(call, entry)
        is_new = not any(one.reason == reason for one in capturing.keys.values())
        key.run_eagerly(reason, where, entry, fix)
        key.eager_calls += 1
        if is_new:
            key.warn(capturing.name)
