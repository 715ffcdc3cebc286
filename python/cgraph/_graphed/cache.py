"""The keys of a graphed function: the key of each call, and which graphs stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterator
from typing import Any

from cgraph import _core, _driver
from cgraph._graphed.call import Call
from cgraph._graphed.key import Key
from cgraph._graphed.options import Options
from cgraph._graphed.reasons import reason_of_various
from cgraph._python.guards import Change
from cgraph._python.values import as_key
from cgraph._reason import Reason
from cgraph._text import plural, shown
from cgraph.causes import Cause

__all__ = ["Family", "Keys"]

# A place that held a new value in so many calls in a row is not part of keys any longer.
_NEW_IN_A_ROW = 8
# A tensor that had a new shape in so many calls in a row, none of them a replay, is told of.
_SHAPES_IN_A_ROW = 16
# Number of keys without a graph that are remembered.
_WITHOUT_GRAPH = 256
# Number of calls whose backward passes are to come that have a graph each.
_OPEN = 4


class Family:
    """The keys of calls whose arguments are alike; they differ in guarded values.

    Attributes:
        keys: The keys, the one used last first.
        static: The places of leaves that are read where they lie, as calls found them unmoved.
        moved: The places of leaves that have moved since, and are inputs.
        lay: The addresses of the tensors that calls have written, by place.
    """

    def __init__(self) -> None:
        self.keys: list[Key] = []
        self.static: set[int] = set()
        self.moved: set[int] = set()
        self.lay: dict[int, int] = {}

    def with_statics(self, call: Call) -> Call:
        """Return the call with the written tensors that have not moved as statics."""
        for place, at in self.lay.items():
            if place in self.moved:
                continue
            if call.leaves[place].value.data_ptr() == at:
                self.static.add(place)
            elif place in self.static:
                # The next capture makes it an input.
                self.static.discard(place)
                self.moved.add(place)
        return call.with_statics(self.static)

    def note(self, call: Call, written: Collection[str], options: Options) -> None:
        """Note where written tensors lie: a call that finds them there reads them in place."""
        if options.sizes is not None:
            # The rows of padded calls are found in all tensors.
            return
        for place, leaf in enumerate(call.leaves):
            if leaf.kind == "tensor" and leaf.name in written:
                self.lay[place] = leaf.value.data_ptr()

    def first(self, key: Key) -> None:
        """Move a key to the front."""
        if self.keys[0] is not key:
            self.keys.remove(key)
            self.keys.insert(0, key)


class Keys:
    """All keys of one function.

    Attributes:
        various: The names of places and arguments with too many values, with the reason.
        many_shapes: A warning about calls that have only new shapes; None if there is none.
    """

    def __init__(self, options: Options, dispatcher: _core.Dispatcher) -> None:
        self._options = options
        self._dispatcher = dispatcher
        self._families: dict[Hashable, Family] = {}
        self.various: dict[str, Reason] = {}
        self.many_shapes: Reason | None = None
        self._values: dict[str, set[Hashable]] = {}
        self._new_in_a_row: Counter[str] = Counter()
        # The tensors of the last new family, how often in a row they had new shapes, and the
        # replays when that was last looked at.
        self._shapes: dict[str, str] = {}
        self._shapes_in_a_row, self._replays_at_shapes = 0, 0.0
        # The counts of keys that are forgotten.
        self._forgotten: dict[str, float] = {}
        # Keys by the reason.
        self._eager: dict[str, Key] = {}
        # The plain arguments of the last new family, by all else that its calls have in common.
        self._last_arguments: dict[Hashable, dict[str, Any]] = {}

    def eager_key(self, call: Call, reason: Reason) -> Key:
        """Return the key of all calls that run eagerly for a reason, whatever else they have."""
        key = self._eager.get(reason.text)
        if key is None:
            key = self._eager[reason.text] = Key(", ".join(call.words()) or "no arguments")
            key.state, key.reason = "eager", reason
            while len(self._eager) > _WITHOUT_GRAPH:
                self._forget(self._eager.pop(next(iter(self._eager))))
        return key

    @property
    def reported(self) -> Iterator[Key]:
        """All keys, and one for each reason why calls run eagerly whatever their keys are."""
        yield from self
        yield from list(self._eager.values())

    def __iter__(self) -> Iterator[Key]:
        """Iterate over all keys, those beside open calls included."""
        for family in list(self._families.values()):
            for key in list(family.keys):
                yield key
                yield from key.beside

    def family(self, call: Call) -> tuple[Family, str | None]:
        """Return the family of a call, and the name of an argument with too many values, if any.

        A call whose argument has too many values gets a family that is not remembered.
        """
        identity = call.key(), _driver.number()
        found = self._families.get(identity)
        if found is not None:
            return found, None
        loose, plain = call.without_plain(), call.plain
        before = self._last_arguments.get(loose)
        self._last_arguments[loose] = plain
        while len(self._last_arguments) > _WITHOUT_GRAPH:
            del self._last_arguments[next(iter(self._last_arguments))]
        for name, value in plain.items():
            if name in self.various:
                return Family(), name
            if before is None:
                self._values.setdefault(name, set()).add(as_key(value))
            elif as_key(before.get(name)) != as_key(value) and self._is_various(name, value):
                return Family(), name
        found = self._families[identity] = Family()
        self._note_shapes(call)
        self._forget_old()
        return found, None

    def _note_shapes(self, call: Call) -> None:
        """Note the shapes of a new family, and whether only new ones have come for long."""
        if self.many_shapes is not None:
            return
        shapes = {one.name: one.words for one in call.leaves if one.kind in ("tensor", "static")}
        new = [name for name in shapes if self._shapes.get(name, shapes[name]) != shapes[name]]
        self._shapes, self._shapes_in_a_row = shapes, self._shapes_in_a_row + 1 if new else 0
        if self._shapes_in_a_row % _SHAPES_IN_A_ROW:
            return
        before, self._replays_at_shapes = self._replays_at_shapes, self.totals().get("replays", 0)
        if self._shapes_in_a_row and self._replays_at_shapes == before:
            count = f"{_SHAPES_IN_A_ROW} calls in a row (now {shapes[new[0]]})"
            text = f"{new[0]} had a new shape in {count}, and no call was a replay"
            self.many_shapes = Reason(Cause.MANY_SHAPES, text)

    def find(self, family: Family, call: Call) -> tuple[Key | None, list[Change], str | None]:
        """Find the key of a call; None if it needs a new one.

        Returns:
            The key and the changes of what its graph reads; or None, the differences between the
            call and the nearest key, and the name of a place with too many values, if any.
        """
        nearest: list[Change] | None = None
        # A key about to be captured has not noted yet which gradients it begins with.
        for key in sorted(family.keys, key=lambda key: key.recorded is None):
            changes = [] if key.shown is None else key.shown.guards.changes(call.objects)
            if not any(one.makes_key for one in changes):
                family.first(key)
                self._new_in_a_row.clear()
                return key, changes, None
            nearest = nearest or changes
        various = None
        for change in nearest or ():
            if change.makes_key and self._is_various(change.name, change.now):
                various = change.name
        return None, nearest or [], various

    def add(self, family: Family, key: Key) -> None:
        """Remember a new key."""
        key.has_sizes = self._options.sizes is not None
        family.keys.insert(0, key)
        self._forget_old()

    def free(self, key: Key) -> Key | None:
        """Return the key, or one beside it if its last call waits for its backward pass.

        Return None if all of them wait.
        """
        if not key.is_open:
            return key
        for other in key.beside:
            if not other.is_open:
                return other
        if len(key.beside) + 1 >= _OPEN:
            return None
        count = len(key.beside) + 1
        other = Key(f"{key.text}, beside {plural(count, 'open call')}")
        other.shown, other.observed = key.shown, key.observed
        other.has_sizes = key.has_sizes
        key.beside.append(other)
        return other

    def evict(self, served: Key) -> None:
        """Drop the least recently used graphs while there are too many."""
        captured = [key for key in self if key.recorded is not None]
        if len(captured) <= self._options.most_graphs:
            return
        # A replay under way may have called the function in a break.
        captured = [key for key in captured if not key.is_running and key is not served]
        captured.sort(key=lambda key: key.last_use, reverse=True)
        while len(captured) + 1 > self._options.most_graphs and captured:
            oldest = captured.pop()
            oldest.let_go("evicted", None, None)
            self.drop(oldest)

    def drop(self, key: Key) -> None:
        """Drop the graph of a key."""
        # First, so that no call finds a graph that is gone, even if its hooks raise.
        for entry in key.entries:
            self._dispatcher.remove(entry)
        key.drop()

    def clear(self) -> None:
        """Forget everything."""
        keys, known = [*self], [*self.reported]
        self._families.clear()
        self.various.clear()
        self._values.clear()
        self._new_in_a_row.clear()
        self._last_arguments.clear()
        self._eager.clear()
        self.many_shapes, self._shapes_in_a_row = None, 0
        for key in keys:
            self.drop(key)
        for key in known:
            self._forget(key)

    def totals(self) -> dict[str, float]:
        """Return counts of all calls so far, those of forgotten keys included."""
        found = self._forgotten
        for key in self.reported:
            found = _sum(found, _counts_of(key))
        return found

    def _forget(self, key: Key) -> None:
        """Let the counts of a key outlast it."""
        self._forgotten = _sum(self._forgotten, _counts_of(key))

    def _is_various(self, name: str, value: Any) -> bool:
        """Note a value; return whether its place or argument has too many values."""
        if name in self.various:
            return True
        values = self._values.setdefault(name, set())
        try:
            identity: Hashable = as_key(value)
            is_new = identity not in values
            values.add(identity)
        except TypeError:  # it cannot be hashed
            is_new = True
        self._new_in_a_row[name] = self._new_in_a_row[name] + 1 if is_new else 0
        if self._new_in_a_row[name] >= _NEW_IN_A_ROW:
            now = f"(now {shown(value):.40})"
            text = f"{name} had a new value in {_NEW_IN_A_ROW} calls in a row {now}"
            self.various[name] = reason_of_various(name, value, text)
        elif len(values) > self._options.most_graphs:
            text = f"{name} has more values than max_graphs={self._options.most_graphs}"
            self.various[name] = reason_of_various(name, value, text)
        return name in self.various

    def _forget_old(self) -> None:
        """Forget the oldest keys without a graph if there are too many."""
        without = [
            (identity, key)
            for identity, family in self._families.items()
            for key in family.keys
            if key.recorded is None and not key.beside
        ]
        for identity, key in without[: max(0, len(without) - _WITHOUT_GRAPH)]:
            family = self._families[identity]
            family.keys.remove(key)
            self._forget(key)
            if not family.keys:
                del self._families[identity]


def _sum(counts: dict[str, float], others: dict[str, float]) -> dict[str, float]:
    return {name: counts.get(name, 0) + count for name, count in others.items()}


def _counts_of(key: Key) -> dict[str, float]:
    return {
        "replays": key.replays,
        "eager_calls": key.all_eager_calls,
        "captures": key.captures,
        "recaptures": max(key.captures - 1, 0),
        "capture_seconds": key.capture_seconds,
    }
