"""Random objects, guards on them and a plain comparison. Without torch, for any Python."""

from __future__ import annotations

import collections
import random
import types
from collections.abc import Callable
from typing import Any

MISSING = object()
NAMES = ["a", "b", "c", "d"]
VALUES: list[Any] = [
    0,
    1,
    True,
    None,
    1.0,
    0.0,
    -0.0,
    "x",
    "y" * 30,
    b"z",
    (1, "t"),
    (1.0, "t"),
    2**70,
]


class Plain:
    """An object with attributes of its own, and some of its class."""

    a: Any
    shared: Any = 1


class Derived(Plain):
    """A class with some attributes of its base."""


class Slotted:
    """A class with slots alone."""

    __slots__ = ("a", "b")


class Ours(dict[Any, Any]):
    """A user-defined dictionary."""


def cell_of(value: Any) -> types.CellType:
    return types.CellType(value)


def fresh(value: Any) -> Any:
    """Return an equal object, another one where Python has no common one."""
    if type(value) is tuple:
        return tuple(fresh(item) for item in value)
    if type(value) in (int, float):
        return type(value)(repr(value))
    if type(value) in (str, bytes):
        return value[:1] + value[1:]
    return value


class World:
    """Objects that refer to each other, guards on some, and changes."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.places: list[tuple[int, tuple[Any, ...], tuple[Any, ...]]] = []
        self.changes: list[Callable[[], Callable[[], None]]] = []
        self.objects: list[Any] = []
        for _ in range(3):
            self.look(-1, ("root", made := self.make(3)), made)
        for number in range(2):
            self.objects.append(self.make(2))
            self.look(-1, ("object", number), self.objects[number])

    def make(self, depth: int) -> Any:
        """Return a random object with others in it."""
        pick, some = self.random.choice, self.random.sample
        kind = pick(["plain", "plain", "slotted", "dict", "list", "tuple", "set", "cell", "value"])
        if depth == 0 or kind == "value":
            return pick(VALUES)
        if kind == "plain":
            made: Any = pick([Plain, Derived])()
            for name in some(NAMES, 3):
                setattr(made, name, self.make(depth - 1))
            return made
        if kind == "slotted":
            made = Slotted()
            made.a = self.make(depth - 1)
            return made
        if kind == "dict":
            made = pick([dict, Ours, collections.OrderedDict])()
            for key in some([*NAMES, 1, 2, (1, 2), Key], 3):
                made[key] = self.make(depth - 1)
            return made
        if kind in ("list", "tuple"):
            kinds: list[Any] = [list, collections.deque] if kind == "list" else [tuple]
            return pick(kinds)([self.make(depth - 1) for _ in range(3)])
        if kind == "set":
            return set(some(["p", "q", "r", "s"], 2))
        return cell_of(self.make(depth - 1))

    def look(self, parent: int, step: tuple[Any, ...], found: Any) -> None:
        """Add a place for an object, and for its parts."""
        place = len(self.places)
        kind = type(found)

        def add(check: tuple[Any, ...]) -> None:
            self.places.append((parent, step, check))

        if found is MISSING:
            add(("missing",))
        elif isinstance(found, Plain):
            own = vars(found)
            gone = frozenset(name for name in NAMES if name not in own)
            add(("object", kind, self.random.choice([gone, frozenset()])))
            for name in self.random.sample(NAMES, 3):
                self.look(place, ("attr", name), own.get(name, MISSING))
            self.look(place, ("class", "shared"), kind.shared)
            self.changes += [lambda key=name: self.set_in(own, key) for name in NAMES]
            self.changes.append(lambda: self.set_attribute(found))
        elif kind is Slotted:
            add(("kind", kind))
            for name in ("a", "b"):
                self.look(place, ("slot", kind.__dict__[name]), getattr(found, name, MISSING))
            self.changes.append(lambda: self.set_slot(found))
        elif isinstance(found, dict):
            gone = frozenset(name for name in NAMES if name not in found)
            keys = self.random.choice([None, tuple(found)])
            add(("dict", kind, keys, gone if keys is None else frozenset()))
            for key in [*found, "nowhere"]:
                self.look(place, ("item", key), found.get(key, MISSING))
            self.changes += [lambda key=key: self.set_in(found, key) for key in [*NAMES, *found]]
            self.changes.append(lambda: self.clear(found))
        elif kind in (list, collections.deque, tuple):
            add(("list", kind, len(found)))
            for i, item in enumerate(found):
                self.look(place, ("item", i), item)
            if kind is not tuple:
                self.changes.append(lambda: self.set_item(found))
        elif kind is set:
            add(("set", kind, frozenset(found)))
            self.changes.append(lambda: self.set_member(found))
        elif kind is types.CellType:
            add(("kind", kind))
            self.look(place, ("cell",), found.cell_contents)
            self.changes.append(lambda: self.set_cell(found))
        else:
            add(("plain", found))

    def new(self, before: Any, or_none: bool = True) -> Any:
        """Return an equal value, another one, or none."""
        if type(before) in map(type, VALUES) and self.random.random() < 0.5:
            return fresh(before)
        return self.random.choice([*VALUES, MISSING] if or_none else VALUES)

    def set_in(self, own: Any, key: Any) -> Callable[[], None]:
        before, order = own.get(key, MISSING), list(own)
        put(own, key, self.new(before))

        def undo() -> None:
            put(own, key, before)
            if list(own) != order:
                items = [(one, own[one]) for one in order]
                own.clear()
                own.update(items)

        return undo

    def set_attribute(self, found: Any) -> Callable[[], None]:
        before = vars(found).get("a", MISSING)
        found.a = self.new(1, or_none=False)
        return lambda: put(vars(found), "a", before)

    def set_slot(self, found: Any) -> Callable[[], None]:
        name = self.random.choice(["a", "b"])
        before = getattr(found, name, MISSING)
        put_slot(found, name, self.new(before))
        return lambda: put_slot(found, name, before)

    def clear(self, found: Any) -> Callable[[], None]:
        before = dict(found)
        found.clear()
        return lambda: found.update(before)

    def set_item(self, found: Any) -> Callable[[], None]:
        before = list(found)
        how = self.random.choice(["append", "pop", "set"])
        if how == "append":
            found.append(1)
        elif found:
            last = found.pop()
            if how == "set":
                found.append(self.new(last, or_none=False))

        def undo() -> None:
            found.clear()
            found.extend(before)

        return undo

    def set_member(self, found: set[str]) -> Callable[[], None]:
        member = self.random.choice(["p", "q", "r", "s"])
        found.symmetric_difference_update([member])
        return lambda: found.symmetric_difference_update([member])

    def set_cell(self, found: types.CellType) -> Callable[[], None]:
        before = found.cell_contents
        found.cell_contents = self.new(before, or_none=False)
        return lambda: setattr(found, "cell_contents", before)

    def set_shared(self) -> Callable[[], None]:
        before = vars(Derived).get("shared", MISSING)
        Derived.shared = self.new(1, or_none=False)
        return lambda: put_shared(before)

    def set_object(self) -> Callable[[], None]:
        """Give the calls another object, and then the previous one again."""
        number, before = self.random.randrange(len(self.objects)), list(self.objects)
        self.objects[number] = self.make(2)
        return lambda: self.objects.__setitem__(slice(None), before)

    def change(self) -> Callable[[], None]:
        """Change something at random; return a function that undoes it."""
        common = [self.set_shared, self.set_object]
        return self.random.choice([*self.changes, *common])()

    def run(self, make: Callable[..., Any], rounds: int) -> tuple[int, int]:
        """Compare guards with plain comparison; return the numbers of fitting and other calls."""
        guards, counts = make(self.places), [0, 0]
        undo: list[Callable[[], None]] = []
        for _ in range(rounds):
            for _ in range(self.random.choice([0, 1, 1, 1, 3])):
                if undo and self.random.random() < 0.6:
                    undo.pop()()
                else:
                    undo.append(self.change())
            wanted = differences(self.places, self.objects)
            found = [place for place, *_ in guards.changed(self.objects, all=True)]
            if self.random.random() < 0.5:
                assert found == wanted
            assert guards.fits(self.objects) is (not wanted), (wanted, found)
            assert [place for place, *_ in guards.changed(self.objects)] == wanted[:1]
            counts[not wanted] += 1
        while undo:
            undo.pop()()
        assert guards.fits(self.objects)
        return counts[1], counts[0]


class Key:
    """A key, which is compared by identity."""


def put(own: Any, key: Any, value: Any) -> None:
    if value is MISSING:
        own.pop(key, None)
    else:
        own[key] = value


def put_shared(value: Any) -> None:
    if value is not MISSING:
        Derived.shared = value
    elif "shared" in vars(Derived):
        del Derived.shared


def put_slot(found: Any, name: str, value: Any) -> None:
    if value is not MISSING:
        setattr(found, name, value)
    elif hasattr(found, name):
        delattr(found, name)


def differences(places: list[Any], objects: list[Any]) -> list[int]:
    """Return the places that differ and whose parents do not, found in the plainest way."""
    values: list[Any] = []
    bad: list[bool] = []
    differ = []
    for i, (parent, step, check) in enumerate(places):
        if parent >= 0 and bad[parent]:
            values.append(MISSING)
            bad.append(True)
            continue
        try:
            value = reached(values[parent] if parent >= 0 else None, step, objects)
        except (LookupError, AttributeError, ValueError, TypeError):
            value = MISSING
        values.append(value)
        bad.append(not fits(value, check))
        if bad[i]:
            differ.append(i)
    return differ


def reached(parent: Any, step: tuple[Any, ...], objects: list[Any]) -> Any:
    kind, *rest = step
    if kind == "root":
        return rest[0]
    if kind == "object":
        return objects[rest[0]]
    if parent is MISSING:
        return MISSING
    if kind == "attr":
        return vars(parent)[rest[0]]
    if kind == "class":
        cls = parent if isinstance(parent, type) else type(parent)
        return next(vars(base)[rest[0]] for base in cls.__mro__ if rest[0] in vars(base))
    if kind == "slot":
        return rest[0].__get__(parent)
    return parent[rest[0]] if kind == "item" else parent.cell_contents


def fits(value: Any, check: tuple[Any, ...]) -> bool:
    kind, *rest = check
    if kind == "missing" or value is MISSING:
        return kind == "missing" and value is MISSING
    if kind == "is":
        return value is rest[0]
    if kind == "plain":
        return same(value, rest[0])
    if type(value) is not rest[0]:
        return False
    if kind == "list":
        return len(value) == rest[1]
    if kind == "set":
        return bool(value == rest[1])
    if kind == "dict":
        return rest[1] in (None, tuple(value)) and not rest[2] & set(value)
    return kind == "kind" or not rest[1] & set(vars(value))


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if type(one) is tuple:
        return len(one) == len(other) and all(map(same, one, other))
    return repr(one) == repr(other)
