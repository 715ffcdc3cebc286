"""Reads from the instructions of code how it uses what it names, along its stack."""

from __future__ import annotations

import dis
import functools
import itertools
import types
from collections import defaultdict
from typing import NamedTuple

from cgraph._state.instructions import ASKING, instructions_of
from cgraph._state.uses import Place, Uses

__all__ = ["uses_in"]


@functools.lru_cache(maxsize=4096)
def uses_in(code: types.CodeType) -> Uses:
    """How code uses what it names, with the functions defined in it.

    It is followed from one jump to the next: what is loaded before one, and used behind it, counts
    as used as a whole. What is in a local variable is followed wherever that is loaded.
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


class _Text(NamedTuple):
    """A text that code has put together, by what it begins and ends with."""

    begin: str
    end: str


_Value = Place | _Constant | _Text | None
"""What is known of something that code has loaded."""


class _Reader:
    """Reads instructions, with what is known of the stack of each."""

    def __init__(self) -> None:
        self._named: set[str] = set()
        self._wholes: set[Place] = set()
        self._tested: set[Place] = set()
        self._filled: set[Place] = set()
        self._computed: set[Place] = set()
        self._got: set[Place] = set()
        self._sought: set[str | int] = set()
        self._keys: set[str | int] = set()
        self._composed: set[tuple[str, str]] = set()
        # What local variables have.
        self._locals: defaultdict[str, set[Place | _Text]] = defaultdict(set)
        self._stack: list[_Value] = []

    def uses_of(self, code: types.CodeType) -> Uses:
        """What it has read of code."""
        # It may try to get an item.
        sought = self._sought | self._keys if "KeyError" in code.co_names else self._sought
        return Uses(
            frozenset(self._named),
            self._everywhere(self._wholes),
            self._everywhere(self._tested),
            self._everywhere(self._filled),
            self._everywhere(self._computed),
            self._everywhere(self._got),
            frozenset(sought),
            frozenset(self._composed),
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
        elif name in _LOCAL_STORES:
            self._store_locals(one)
        elif name in _ITEM_STORES:
            self._store_item(*_ITEM_STORES[name])
        elif name == "CONTAINS_OP":
            self._seek(self._pop(), self._pop())
            self._stack.append(None)
        elif name in _TESTING:
            _add(self._tested, self._pop())
            self._stack += [None] * _TESTING[name]
        elif name in _LOOKING:
            looked_at, pushed = _LOOKING[name]
            del self._stack[-looked_at:]
            self._stack += [None] * pushed
        elif name in _MOVING:
            self._move(one)
        else:
            self._use_in(one)
        if one.opcode in _JUMPS:
            self.forget()

    def forget(self) -> None:
        """Take it that what is left on the stack is used in any way."""
        self._use(len(self._stack))

    def _everywhere(self, places: set[Place]) -> frozenset[Place]:
        """The same with where the contents of local variables are from."""
        found, waiting = set(places), list(places)
        while waiting:
            place = waiting.pop()
            for origin in self._locals.get(place.name, ()):
                if isinstance(origin, Place):
                    other = Place(origin.name, origin.depth + place.depth)
                    if other.depth <= _DEEPEST and other not in found:
                        found.add(other)
                        waiting.append(other)
        return frozenset(found)

    def _use_in(self, one: dis.Instruction) -> None:
        """Note that an instruction uses all that it takes in any way."""
        if one.opname in _ASSIGNING:
            # There will be another one.
            self._filled.add(Place(_ASSIGNING[one.opname] + str(one.argval), 0))
        effect = dis.stack_effect(one.opcode, one.arg, jump=False)
        pushed = 0 if one.opname.startswith(_PUSHING_NOTHING) else max(1, effect)
        pushed += one.opname in _TAKING_APART
        count, made = pushed - effect, _made_by(one, self._stack[effect - 1 :])
        if one.opname.startswith(("CALL", "PRECALL")):
            taken = self._stack[-count:]
            called = {value.name for value in taken if isinstance(value, Place)}
            if not called.isdisjoint(ASKING):
                self._note_texts(taken)
            if not called.isdisjoint(_LOOKING_AT):
                del self._stack[-count:]
                count = 0
        self._use(count)
        self._stack += [made] * pushed

    def _note_texts(self, values: list[_Value]) -> None:
        """Note by which names that are put together code asks for attributes."""
        for value in values:
            found: set[Place | _Text] = {value} if isinstance(value, _Text) else set()
            if isinstance(value, Place):
                found = self._locals.get(value.name, found)
            texts = (one for one in found if isinstance(one, _Text))
            self._composed.update((one.begin, one.end) for one in texts)

    def _load(self, one: dis.Instruction) -> None:
        names = one.argval if isinstance(one.argval, tuple) else (one.argval,)
        self._named.update(names)
        # Beneath a global there may be room for what it is called on.
        self._stack += [None] * (dis.stack_effect(one.opcode, one.arg) - len(names))
        self._stack += [Place(name, 0) for name in names]

    def _store_locals(self, one: dis.Instruction) -> None:
        names = one.argval if isinstance(one.argval, tuple) else (one.argval,)
        # The newer instructions store one and load another, or store two.
        loads = one.opname == "STORE_FAST_LOAD_FAST"
        for name in names[:1] if loads else names:
            value = self._pop()
            if isinstance(value, Place | _Text):
                self._locals[name].add(value)
        if loads:
            self._named.add(names[1])
            self._stack.append(Place(names[1], 0))

    def _store_item(self, keys: int, values: int) -> None:
        for _ in range(keys):
            self._pop()
        _add(self._filled, self._pop())
        self._use(values)

    def _load_attribute(self, one: dis.Instruction, following: dis.Instruction | None) -> None:
        """Load an attribute, or a method and what it is called on."""
        owner, name = self._pop(), str(one.argval)
        pushed = dis.stack_effect(one.opcode, one.arg) + 1
        if name in _FILLING:
            _add(self._filled, owner)
        if name in ("get", "get_nowait"):
            _add(self._got, owner)
        if name in ("get", "pop", "setdefault"):
            is_known = following is not None and following.opname == "LOAD_CONST"
            self._seek(owner, _Constant(following.argval) if following and is_known else None)
        elif name not in _FILLING and (pushed > 1 or name in _OF_ALL):
            _add(self._wholes, owner)
        self._named.add(f".{name}")
        is_value = pushed == 1 or name in ASKING
        self._stack += [None] * (pushed - 1)
        self._stack.append(Place(f".{name}" if pushed == 1 else name, 0) if is_value else None)

    def _load_item(self) -> None:
        key, container = self._pop(), self._pop()
        if isinstance(key, _Constant) and isinstance(key.value, str | int):
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

    def _move(self, one: dis.Instruction) -> None:
        """Copy what is on the stack, or let it change places."""
        name, place = one.opname, one.arg or 1
        self._stack[:0] = [None] * (max(place, 4) - len(self._stack))
        stack = self._stack
        if name in ("COPY", "DUP_TOP"):
            stack.append(stack[-place if name == "COPY" else -1])
        elif name == "DUP_TOP_TWO":
            stack += stack[-2:]
        elif name == "SWAP":
            stack[-1], stack[-place] = stack[-place], stack[-1]
        else:
            stack.insert(len(stack) - _ROTATED.get(name, place), stack.pop())

    def _pop(self) -> _Value:
        return self._stack.pop() if self._stack else None


def _made_by(one: dis.Instruction, values: list[_Value]) -> _Value:
    """What an instruction makes of the values that it takes: a slice, or a text."""
    if one.opname == "BUILD_SLICE":
        return _Constant(slice(None))
    is_text = one.opname in ("BUILD_STRING", "BINARY_ADD", "BINARY_MODULO")
    if not values or not (is_text or one.argrepr in ("+", "%")):
        return None
    begin, end = (
        str(one.value) if isinstance(one, _Constant) and isinstance(one.value, str) else ""
        for one in (values[0], values[-1])
    )
    if one.opname == "BINARY_MODULO" or one.argrepr == "%":
        # What is put into it may be anywhere behind.
        begin, end = begin.partition("%")[0], ""
    return _Text(begin, end) if begin or end else None


def _add(places: set[Place], value: _Value) -> None:
    if isinstance(value, Place):
        places.add(value)


def _is_from_the_end(key: object) -> bool:
    """Whether it depends on the length of a list what a key stands for."""
    return isinstance(key, slice) or (isinstance(key, int) and key < 0)


# No way leads further.
_DEEPEST = 8
# What only looks at what something is.
_LOOKING_AT = frozenset({"callable", "id", "isinstance", "type"})
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
_LOCAL_STORES = frozenset(name for name in dis.opmap if name.startswith("STORE_FAST"))
# How many values stand for the key, and how many are stored.
_ITEM_STORES = {"STORE_SUBSCR": (1, 1), "DELETE_SUBSCR": (1, 0), "STORE_SLICE": (2, 1)}
# How many values are left.
_TESTING = {
    **dict.fromkeys(("TO_BOOL", "UNARY_NOT"), 1),
    **{
        name: 0
        for name in dis.opmap
        if name.startswith("POP_JUMP") and name.endswith(("_FALSE", "_TRUE"))
    },
}
# What looks only at what something is: how many values it takes, and how many it leaves.
_LOOKING = {
    "IS_OP": (2, 1),
    "POP_TOP": (1, 0),
    **{name: (1, 0) for name in dis.opmap if name.endswith("_NONE")},
}
# Behind how many others the last value comes.
_ROTATED = {"ROT_TWO": 1, "ROT_THREE": 2, "ROT_FOUR": 3}
_MOVING = frozenset({"COPY", "DUP_TOP", "DUP_TOP_TWO", "ROT_N", "SWAP", *_ROTATED})
# What leaves the stack alone.
_NOTHING = frozenset(
    {
        *("COPY_FREE_VARS", "EXTENDED_ARG", "GEN_START", "KW_NAMES", "MAKE_CELL", "NOP"),
        *("NOT_TAKEN", "RESUME", "SETUP_ANNOTATIONS"),
    }
)
# The others that are used here leave something there.
_PUSHING_NOTHING = (
    *("DELETE_", "DICT_", "END_", "JUMP_", "LIST_APPEND", "LIST_EXTEND", "MAP_ADD", "POP_"),
    *("RAISE_", "RERAISE", "RETURN_", "SET_ADD", "SET_UPDATE", "STORE_"),
)
# What leaves more than it takes, and takes one.
_TAKING_APART = frozenset({"BEFORE_WITH", "UNPACK_EX", "UNPACK_SEQUENCE"})
# What code calls to put something into a container, or to take something out.
_FILLING = frozenset(
    {
        *("add", "append", "appendleft", "clear", "extend", "extendleft", "insert", "pop"),
        *("popitem", "popleft", "remove", "setdefault", "update"),
    }
)
# The same for all that is in it.
_OF_ALL = frozenset({"copy", "count", "index", "items", "keys", "values"})
