"""How code uses the containers that it names: item by item, or as a whole."""

from __future__ import annotations

import dis
import functools
import itertools
import types
from collections.abc import Iterable
from typing import NamedTuple

from cgraph._state.instructions import instructions_of

__all__ = ["Uses", "uses_in"]


class Place(NamedTuple):
    """What code finds by the name of a variable or an attribute, or in a container there.

    Attributes:
        name: The name, with a dot before that of an attribute.
        depth: How many items lead on from there: that of ``self.layers[0]`` is 1.
    """

    name: str
    depth: int


class Uses(NamedTuple):
    """How code uses what it names.

    Attributes:
        named: The names, with a dot before those of attributes.
        wholes: Where it uses something otherwise than by its items, as in a loop.
        filled: Where it assigns something, puts something into a container, or takes it from there.
        computed: Where it looks items up by keys that are no constants.
        sought: Texts by which it asks whether containers have them.
        composed: What the names begin and end with that it makes to ask for attributes.
    """

    named: frozenset[str] = frozenset()
    wholes: frozenset[Place] = frozenset()
    filled: frozenset[Place] = frozenset()
    computed: frozenset[Place] = frozenset()
    sought: frozenset[str] = frozenset()
    composed: frozenset[tuple[str, str]] = frozenset()

    def joined(self, *more: Uses) -> Uses:
        """All of them."""
        return Uses(*(one.union(*rest) for one, *rest in zip(self, *more, strict=True)))

    def is_whole(self, way: Iterable[str | None]) -> bool:
        """Whether code may use a container as a whole that others fill.

        Args:
            way: What leads to it, the last one first: names of variables and attributes, keys that
                are texts, and None for others.
        """
        places = self._places(way)
        return places is None or (
            self.filled.isdisjoint(places) and not self.wholes.isdisjoint(places)
        )

    def is_any_read(self, way: Iterable[str | None]) -> bool:
        """Whether code may look at items of a container that it does not name.

        Args:
            way: As for :meth:`is_whole`.
        """
        places = self._places(way)
        return places is None or not (self.wholes | self.computed).isdisjoint(places)

    def composes(self, name: str) -> bool:
        """Whether code may make a name to ask for an attribute."""
        return any(name.startswith(begin) and name.endswith(end) for begin, end in self.composed)

    def _places(self, way: Iterable[str | None]) -> set[Place] | None:
        """Where code comes by a container, and what it is in; None if it names nothing there."""
        for depth, name in enumerate(way):
            if name is None:
                continue
            # What a way begins with may be either.
            for one in (name,) if name.startswith(".") else (f".{name}", name):
                if one in self.named:
                    return {Place(one, above) for above in range(depth + 1)}
        return None


@functools.lru_cache(maxsize=4096)
def uses_in(code: types.CodeType) -> Uses:
    """How code uses what it names, with the functions defined in it.

    It is followed from one jump to the next: what is loaded before one, and used behind it, counts
    as used as a whole.
    """
    reader = _Reader()
    instructions = instructions_of(code)
    for one, following in itertools.zip_longest(instructions, instructions[1:]):
        reader.read(one, following)
    reader.forget()
    inner = (one for one in code.co_consts if isinstance(one, types.CodeType))
    return reader.uses_of(code).joined(*map(uses_in, inner))


class _Constant(NamedTuple):
    """A constant that code has loaded, or a slice that it has made."""

    value: object


_Value = Place | _Constant | None
"""What is known of something that code has loaded."""


class _Reader:
    """Reads instructions, with what is known of the stack of each."""

    def __init__(self) -> None:
        self._named: set[str] = set()
        self._wholes: set[Place] = set()
        self._filled: set[Place] = set()
        self._computed: set[Place] = set()
        self._sought: set[str] = set()
        self._keys: set[str] = set()
        self._composed: set[tuple[str, str]] = set()
        self._stack: list[_Value] = []

    def uses_of(self, code: types.CodeType) -> Uses:
        """What it has read of code."""
        names = code.co_names
        # It may try to get an item.
        sought = self._sought | self._keys if "KeyError" in names else self._sought
        composed = set[tuple[str, str]]() if _ASKING.isdisjoint(names) else self._composed
        return Uses(
            frozenset(self._named),
            frozenset(self._wholes),
            frozenset(self._filled),
            frozenset(self._computed),
            frozenset(sought),
            frozenset(composed),
        )

    def read(self, one: dis.Instruction, following: dis.Instruction | None) -> None:
        """Read an instruction, behind which comes another one."""
        name = one.opname
        if one.is_jump_target:
            self.forget()
        if name in _LOADS:
            self._load(one)
        elif name in _ATTRIBUTES:
            self._load_attribute(one, following)
        elif name in _NOTHING:
            pass
        elif name in _CONSTANTS:
            self._stack.append(_Constant(one.argval))
        elif name == "BINARY_SUBSCR" or (name == "BINARY_OP" and one.argrepr == "[]"):
            self._load_item()
        elif name in _SUBSCRIPTS:
            self._pop()
            _add(self._filled, self._pop())
            self._use(_SUBSCRIPTS[name])
        elif name == "CONTAINS_OP":
            self._seek(self._pop(), self._pop())
            self._stack.append(None)
        elif name in _LOOKING:
            looked_at, pushed = _LOOKING[name]
            del self._stack[-looked_at:]
            self._stack += [None] * pushed
        elif name in ("COPY", "DUP_TOP"):
            self._stack.append(self._at(one.arg or 1))
        elif name == "SWAP":
            self._swap(one.arg or 1)
        else:
            self._use_in(one)
        if one.opcode in _JUMPS:
            self.forget()

    def forget(self) -> None:
        """Take it that what is left on the stack is used in any way."""
        self._use(len(self._stack))

    def _use_in(self, one: dis.Instruction) -> None:
        """Note that an instruction uses all that it takes in any way."""
        if one.opname in _ASSIGNING:
            # There will be another one.
            self._filled.add(Place(_ASSIGNING[one.opname] + str(one.argval), 0))
        effect = dis.stack_effect(one.opcode, one.arg, jump=False)
        if one.opname == "BUILD_STRING" or one.argrepr == "+" or one.opname == "BINARY_ADD":
            self._note_composed(1 - effect)
        pushed = 0 if one.opname.startswith(_PUSHING_NOTHING) else max(1, effect)
        self._use(pushed - effect)
        made = _Constant(slice(None)) if one.opname == "BUILD_SLICE" else None
        self._stack += [made] * pushed

    def _note_composed(self, count: int) -> None:
        """Note what a text begins and ends with that is made of so many values."""
        begin, end = (
            one.value if isinstance(one, _Constant) and isinstance(one.value, str) else ""
            for one in (self._at(count), self._at(1))
        )
        if begin or end:
            self._composed.add((begin, end))

    def _load(self, one: dis.Instruction) -> None:
        names = one.argval if isinstance(one.argval, tuple) else (one.argval,)
        self._named.update(names)
        # Beneath a global there may be room for what it is called on.
        self._stack += [None] * (dis.stack_effect(one.opcode, one.arg) - len(names))
        self._stack += [Place(name, 0) for name in names]

    def _load_attribute(self, one: dis.Instruction, following: dis.Instruction | None) -> None:
        """Load an attribute, or a method and what it is called on."""
        owner, name = self._pop(), str(one.argval)
        pushed = dis.stack_effect(one.opcode, one.arg) + 1
        if name in _FILLING:
            _add(self._filled, owner)
        if name in ("get", "pop", "setdefault"):
            is_known = following is not None and following.opname == "LOAD_CONST"
            self._seek(owner, _Constant(following.argval) if following and is_known else None)
        elif name not in _FILLING and (pushed > 1 or name in _OF_ALL):
            _add(self._wholes, owner)
        self._named.add(f".{name}")
        self._stack += [Place(f".{name}", 0) if pushed == 1 else None] * pushed

    def _load_item(self) -> None:
        key, container = self._pop(), self._pop()
        if isinstance(key, _Constant) and isinstance(key.value, str):
            self._keys.add(key.value)
        if not isinstance(container, Place):
            self._stack.append(None)
        elif isinstance(key, _Constant) and _is_from_the_end(key.value):
            self._wholes.add(container)
            self._stack.append(None)
        else:
            if not isinstance(key, _Constant):
                self._computed.add(container)
            self._stack.append(container._replace(depth=container.depth + 1))

    def _seek(self, container: _Value, key: _Value) -> None:
        """Note that code asks whether a container has something."""
        if isinstance(key, _Constant) and isinstance(key.value, str):
            self._sought.add(key.value)
        else:
            _add(self._wholes, container)

    def _use(self, count: int) -> None:
        """Note that so many values are used in any way."""
        for _ in range(count):
            _add(self._wholes, self._pop())

    def _swap(self, place: int) -> None:
        self._stack[:0] = [None] * (place - len(self._stack))
        last, other = self._stack[-1], self._stack[-place]
        self._stack[-1], self._stack[-place] = other, last

    def _at(self, place: int) -> _Value:
        return self._stack[-place] if place <= len(self._stack) else None

    def _pop(self) -> _Value:
        return self._stack.pop() if self._stack else None


def _add(places: set[Place], value: _Value) -> None:
    if isinstance(value, Place):
        places.add(value)


def _is_from_the_end(key: object) -> bool:
    """Whether it depends on the length of a list what a key stands for."""
    return isinstance(key, slice) or (isinstance(key, int) and key < 0)


# What code names that asks for attributes by texts.
_ASKING = frozenset({"__getattribute__", "attrgetter", "getattr", "hasattr"})
# With what is before the names.
_ASSIGNING = {"STORE_ATTR": ".", "STORE_DEREF": "", "STORE_GLOBAL": ""}
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_CONSTANTS = frozenset({"LOAD_CONST", "LOAD_SMALL_INT"})
_JUMPS = frozenset({*dis.hasjrel, *dis.hasjabs})
_LOADS = frozenset(
    {
        *("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF"),
        *(name for name in dis.opmap if name.startswith("LOAD_FAST")),
    }
)
# What looks only at what something is: how many values it takes, and how many it leaves.
_LOOKING = {
    "IS_OP": (2, 1),
    "POP_TOP": (1, 0),
    **{name: (1, 0) for name in dis.opmap if name.endswith("_NONE")},
}
# How many more values it takes.
_SUBSCRIPTS = {"STORE_SUBSCR": 1, "DELETE_SUBSCR": 0}
# What leaves the stack alone.
_NOTHING = frozenset(
    {
        *("CACHE", "COPY_FREE_VARS", "EXTENDED_ARG", "GEN_START", "KW_NAMES", "MAKE_CELL", "NOP"),
        *("NOT_TAKEN", "RESUME", "SETUP_ANNOTATIONS"),
    }
)
# The others leave something there.
_PUSHING_NOTHING = (
    *("DELETE_", "DICT_", "END_", "JUMP_", "LIST_APPEND", "LIST_EXTEND", "MAP_ADD", "POP_"),
    *("RAISE_", "RERAISE", "RETURN_", "SET_ADD", "SET_UPDATE", "STORE_ATTR", "STORE_DEREF"),
    *("STORE_GLOBAL", "STORE_NAME"),
)
# What code calls to put something into a container, or to take something out.
_FILLING = frozenset(
    {
        *("add", "append", "appendleft", "clear", "extend", "extendleft", "insert", "pop"),
        *("popitem", "popleft", "remove", "setdefault", "update"),
    }
)
# The same for all that is in it.
_OF_ALL = frozenset({"copy", "count", "index", "items", "keys", "values"})
