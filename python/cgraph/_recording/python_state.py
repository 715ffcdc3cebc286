"""What Python has before the calls of a capture, and whether the function goes on changing it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from cgraph._recording.conditions import (
    NotReadyError,
    WarmupError,
    require_same_numbers,
    require_same_results,
)
from cgraph._state.attributes import (
    Attributes,
    Place,
    changed_numbers,
    changes,
    is_another,
    made_numbers,
    place_of,
)
from cgraph._state.constants import Constant
from cgraph._state.drawing import RandomOfPython
from cgraph._state.hidden import has_any
from cgraph._state.holders import Holder, put_back_numbers, put_back_tensors
from cgraph._state.kept import (
    Before,
    IsMade,
    changed_in,
    has_made_items,
    is_changed,
    items_of,
    len_of,
    put_back_items,
    put_back_kept,
)
from cgraph._state.parts import Parts
from cgraph._state.rollback import Rollback
from cgraph._state.search import Found

__all__ = ["PythonState"]


class PythonState:
    """What Python has before calls: attributes, names, lists, and its random numbers.

    What is made in the first call alone stays, with the objects that are made beside it: numbers
    where there was none, flags of what the function only calls, and lists. What breaks go on
    changing is put back before they run again.

    Args:
        attributes: Those in dictionaries, as they are.
        found: Where else tensors and numbers are, and lists with what they have.
        parts: The modules that the function reaches, as they are.
        is_made: Tells which tensors were made since.
        rollback: What puts tensors back that were there before.
    """

    def __init__(
        self,
        attributes: Attributes,
        found: Found,
        parts: Parts,
        is_made: IsMade,
        rollback: Rollback,
    ) -> None:
        self._attributes = attributes
        self._found = found
        self._parts = parts
        self._dtype = torch.get_default_dtype()
        self._captures = self._has_called = False
        self._has_made = functools.partial(has_any, is_made)
        self._rollback = rollback
        # After the first call.
        self._made: dict[Place, Any] = {}
        self._far: list[Any] = []
        self._first: Attributes | None = None
        self._lists: list[Before] = found.lists
        self._arrays = found.arrays
        self._looks = 0
        self._results: tuple[Sequence[Any], Sequence[Any]] | None = None
        self._random = RandomOfPython.where(shared=found.draws, own=found.generators)
        self._drawn = self._random
        self._draws_on = self._has_drawn = False
        # What a break has changed, and what one has changed again, by places.
        self._of_a_break: set[Place] = set()
        self._of_breaks: set[Place] = set()
        self._has_breaks = self._breaks_exchange = self._undoes_all = False

    def captures_now(self, *, has_called: bool) -> None:
        """Note that a capture comes next, and what calls before it have added for good.

        Args:
            has_called: Whether there were any.
        """
        self._captures, self._has_called = True, has_called
        self._dtype = torch.get_default_dtype()
        self._parts.note_hooks()

    @property
    def _sets_up(self) -> bool:
        """Whether something says that what a first call adds is there."""
        return bool(self._made_now()) or any(is_changed(*one) for one in self._found.lists)

    @contextmanager
    def in_break(self) -> Iterator[None]:
        """A ``with`` block in which a break runs, whose Python code runs in replays as well."""
        self._has_breaks = True
        # What was drawn before it is the function's.
        self._note_drawn()
        attributes, found = self._attributes.again(), self._found
        held = [(one, one.now) for one in (*self._held, *self._assigned)]
        lists = [(one, items_of(one)) for one, _ in found.lists]
        arrays = [(one, one.copy()) for one, _ in found.arrays]
        flags = [(part, part.training) for part, _ in self._parts.flags]
        exchanged = self._parts.exchanged
        try:
            with self._rollback.in_break():
                yield
        finally:
            changed = attributes.others(self._has_made)
            changed |= {place_of(one) for one, then in held if self._is_left(one.now, then)}
            changed |= {
                (id(one), "list")
                for one, then in lists
                if changed_in(one, then, found.takes_items)
                or has_made_items(one, then, self._has_made)
            }
            changed |= {(id(one), "array") for one, then in arrays if _differ(one, then)}
            changed |= {(id(part), "flag") for part, then in flags if part.training is not then}
            self._breaks_exchange |= self._parts.exchanged != exchanged
            # What is changed once is set up.
            self._of_breaks |= changed & self._of_a_break
            self._of_a_break |= changed
            if self._drawn is not None:
                self._drawn = self._drawn.again()

    def _is_left(self, now: object, then: object) -> bool:
        """Whether a break has left something else in a place: a number, a tensor, what it made."""
        is_tensor = isinstance(then, torch.Tensor)
        return now is not then and (is_tensor or is_another(now, then) or self._has_made(now))

    @property
    def _assigned(self) -> list[Holder]:
        """Where tensors are, and tuples with some."""
        kinds = (torch.Tensor, tuple)
        return [one for one in self._found.all_holders if isinstance(one.value, kinds)]

    @property
    def of_breaks(self) -> set[Place]:
        """The places of what breaks have changed."""
        return self._of_a_break

    def is_of_a_break(self, part: torch.nn.Module) -> bool:
        """Whether a break has let a module train, or not."""
        return (id(part), "flag") in self._of_a_break

    @property
    def has_set_up(self) -> bool:
        """Whether the first call, which comes to its end, has set numbers for the others to use."""
        if self._has_breaks:
            # Whose results may be others each time.
            return False
        far = (one for one in self._found.far if is_another(one.now, one.value))
        return bool(self._made_now()) or any(True for _ in far)

    def require_same(self, *, captured: bool = False) -> None:
        """Refuse a function that changes numbers or texts, or takes them away.

        Also one that goes on changing those that it has made itself, those of what it calls or in
        lists, or that goes on drawing random numbers which are not torch's. What breaks change does
        not count.

        Args:
            captured: Whether the capture has run.
        """
        self._require_none_drawn(captured=captured)
        if (reason := self._exchanged) is not None:
            raise NotReadyError(reason)
        require_same_numbers(self._attributes, self._found, self._of_a_break)
        made, far = self._made_now(), [one.now for one in self._found.far]
        self._looks += 1
        if self._looks == _AFTER_FIRST and not captured:
            self._require_none_taken()
            self._made, self._far, self._first = made, far, self._attributes.again()
            self._lists = [(one, items_of(one)) for one, _ in self._found.lists]
            self._arrays = [(one, one.copy()) for one, _ in self._found.arrays]
        if self._looks <= _AFTER_FIRST and not captured:
            return
        but = self._of_a_break
        for place in self._counted(made) - but:
            raise NotReadyError(changes(str(place[-1]), self._made[place], made.get(place)))
        for one, then, now in zip(self._found.far, self._far_before, far, strict=True):
            if is_another(now, then) and place_of(one) not in but:
                raise NotReadyError(changes(one.words, then, now))
        for array, then in self._arrays:
            if _differ(array, then) and (id(array), "array") not in but:
                raise NotReadyError(changes("an array of NumPy's", then, array))
        for kept, before in self._lists:
            reason = changed_in(kept, before, self._found.takes_items)
            if reason is not None and (id(kept), "list") not in but:
                raise NotReadyError(reason)
        if self._results is not None:
            (first, second), self._results = self._results, None
            self._or_undo_all(lambda: require_same_results(first, second))

    def _require_none_taken(self) -> None:
        """Refuse a first call that takes items from a list, which others have put there for it."""
        for kept, before in self._found.lists:
            is_shorter = self._found.takes_items and len_of(kept) < len(before)
            if is_shorter and (id(kept), "list") not in self._of_a_break:
                self._undoes_all = True
                raise NotReadyError(
                    f"the first call takes items from a list of {len(before)}, and replays do not"
                )

    def _require_none_drawn(self, *, captured: bool) -> None:
        """Refuse a function that goes on drawing random numbers which are not torch's."""
        if captured and self._has_breaks:
            # Nobody hears of those of a capture with gradients; calls have shown what it draws.
            self._has_drawn &= self._draws_on
        else:
            self._note_drawn()
        if self._draws_on and (captured or self._has_drawn):
            raise NotReadyError(
                "the function draws random numbers of Python or NumPy, and replays do not: draw"
                " torch's, or pass them as an argument"
            )
        # What the first call draws may be for the others to use.
        self._has_drawn |= self._draws_on
        self._draws_on = False

    def _note_drawn(self) -> None:
        """Note what was drawn since the last look, but for breaks."""
        if self._drawn is not None and self._drawn.has_moved:
            self._draws_on = True
            self._drawn = self._drawn.again()

    def put_back_what_breaks_change(self) -> None:
        """Let what breaks go on changing be as it was, before they run again."""
        but = self._of_breaks
        self._attributes.put_back_in(but)
        put_back_numbers(one for one in (*self._held, *self._assigned) if place_of(one) in but)
        put_back_items(one for one in self._found.lists if (id(one[0]), "list") in but)
        for array, before in self._found.arrays:
            if (id(array), "array") in but:
                array[...] = before
        for part, flag in self._parts.flags:
            if (id(part), "flag") in but:
                part.training = flag
        if self._random is not None and self._has_breaks:
            self._note_drawn()
            self._random.put_back()
            self._drawn = self._random.again()

    def require_same_now(self, attributes: Attributes, found: Found) -> None:
        """Refuse a capture that changes numbers or texts of what calls before it have made.

        Args:
            attributes: Those in dictionaries, as they were when it began.
            found: Where others were.
        """
        self._or_undo_all(lambda: require_same_numbers(attributes, found))

    def note_results(self, first: Sequence[Any], second: Sequence[Any]) -> None:
        """Note what the first call has returned that sets something up, and the next one.

        Args:
            first: The leaves of its result.
            second: Those of the next call's, with the same arguments.
        """
        self._results = first, second

    def _or_undo_all(self, check: Callable[[], None]) -> None:
        """Make a check that refuses what was made by the first call."""
        try:
            check()
        except NotReadyError:
            self._undoes_all = True
            raise

    def after(self, error: type[BaseException] | None, *_: object) -> None:
        """Put it back at the end of a block that raises.

        Numbers that the function has changed before it raised itself stay, as after any call, but
        where tensors that it has written or made are put back as well.

        Args:
            error: What the block raises; None for nothing.
        """
        if error is None:
            return
        is_own = issubclass(error, WarmupError)
        # What says that made tensors are there goes with them, and that some are written.
        has_written = self._rollback.written > 0
        is_undone = has_written and bool(self._made_now() or self._has_changed_numbers)
        is_set_up = self._leaves_tensors or (is_own and is_undone)
        # One after the other, whatever a class of the user's raises.
        with ExitStack() as steps:
            steps.callback(put_back_tensors, self._found.all_holders)
            steps.callback(self._attributes.put_back_others, numbers=False)
            if not is_own:
                if self._random is not None:
                    steps.callback(self._random.put_back)
                first = {id(one): items for one, items in self._lists} if self._first else {}
                steps.callback(put_back_kept, self._found.lists, self._has_made, first)
                steps.callback(self.put_back_what_breaks_change)
                if self._captures and (self._has_called or not self._sets_up):
                    # What was added for the time of the call, which has not come to its end.
                    steps.callback(self._parts.put_back_hooks)
                    steps.callback(torch.set_default_dtype, self._dtype)
            if is_set_up or (not is_own and self._has_changed_numbers):
                self._put_back_all(steps, with_far=is_set_up or self._undoes_all)
            elif not is_own:
                self._put_back_counted(steps)

    def _put_back_all(self, steps: ExitStack, *, with_far: bool) -> None:
        """Let what calls have changed be as before them: another one makes and counts it again.

        Args:
            steps: Takes what is to be done, the last first.
            with_far: Also flags of what the function only calls, which may be set up for good.
        """
        found = self._found
        made = set(self._made) if self._undoes_all else self._counted(self._made_now())
        held = [*found.numbers, *found.empty, *found.holders]
        steps.callback(self._put_back_arrays, found.arrays)
        steps.callback(self._put_back_lists, found.lists)
        steps.callback(self._put_back_far, with_far=with_far)
        steps.callback(put_back_numbers, held)
        steps.callback(self._parts.put_back, self._has_made)
        steps.callback(self._attributes.put_back_others, numbers=True, made=made)
        steps.callback(self._attributes.put_back_new, self._has_made, self._first)

    def _put_back_counted(self, steps: ExitStack) -> None:
        """Let what goes on changing be as before calls, but not what only the first one makes."""
        found = self._found
        counted = self._counted(self._made_now())
        held = [*found.numbers, *(one for one in found.empty if place_of(one) in counted)]
        steps.callback(self._put_back_arrays, self._arrays)
        steps.callback(self._put_back_lists, self._lists)
        steps.callback(self._put_back_far, with_far=False)
        steps.callback(put_back_numbers, held)
        if counted:
            steps.callback(self._parts.put_back, self._has_made)
            steps.callback(self._attributes.put_back_new, self._has_made, self._first)
        steps.callback(self._attributes.put_back_others, numbers=True, made=counted)

    def _put_back_far(self, *, with_far: bool) -> None:
        """Let numbers of what the function calls be as before calls; only counts, or all."""
        far = zip(self._found.far, self._far_before, strict=True)
        put_back_numbers(one for one, then in far if with_far or is_another(one.now, then))

    def _put_back_arrays(self, arrays: Iterable[tuple[Any, Any]]) -> None:
        """Let those that are others now have what they had."""
        for (array, then), (_, before) in zip(arrays, self._found.arrays, strict=True):
            if _differ(array, then):
                array[...] = before

    def _put_back_lists(self, lists: Iterable[Before]) -> None:
        """Let those whose numbers are others now, and which are as long, have what they had."""
        before = {id(one): items for one, items in self._found.lists}
        takes = self._found.takes_items
        changed = (one for one, then in lists if changed_in(one, then, takes))
        put_back_items((one, before[id(one)]) for one in changed)

    @property
    def _has_changed_numbers(self) -> bool:
        """Whether some are others that must not be, or were drawn, but in breaks."""
        but = self._of_a_break
        numbers = self._attributes.changed(but), changed_numbers(self._found.numbers, but)
        has_drawn = self._draws_on or self._has_drawn
        return has_drawn or self._undoes_all or any((*numbers, self._exchanged))

    @property
    def _exchanged(self) -> str | None:
        """Why a function is not captured that exchanges modules, but in breaks."""
        return None if self._breaks_exchange else self._parts.exchanged

    @property
    def _held(self) -> list[Holder]:
        """Where numbers and texts are, or None, besides dictionaries."""
        return [*self._found.numbers, *self._found.empty, *self._found.far]

    @property
    def _leaves_tensors(self) -> bool:
        """Whether there are tensors that were made where there was nothing."""
        values = [*self._attributes.new, *(one.now for one in self._found.empty)]
        return any(map(self._has_made, values)) or any(
            has_made_items(*one, self._has_made) for one in self._found.lists
        )

    @property
    def _far_before(self) -> list[Any]:
        """Those of what the function calls, after its first call."""
        return self._far or [one.value for one in self._found.far]

    def _made_now(self) -> dict[Place, Any]:
        """Numbers where there was none, or None."""
        return {**self._attributes.made, **made_numbers(self._found.empty)}

    def _counted(self, made: dict[Place, Any]) -> set[Place]:
        """The places of those that were another number after the first call."""
        known = self._made.items()
        return {place for place, then in known if is_another(made.get(place), then)}


def _differ(array: Any, then: Any) -> bool:
    return Constant(array) != Constant(then)


# The first look comes before the first call.
_AFTER_FIRST = 2
