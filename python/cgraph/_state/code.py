"""The names that the code of a function has, and that of what it calls."""

from __future__ import annotations

import argparse
import collections
import dis
import functools
import inspect
import random
import sys
import threading
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from cgraph import _core, _torch
from cgraph._state.instructions import ASKING, asked_of_itself, instructions_of
from cgraph._state.stack import uses_in
from cgraph._state.uses import Uses
from cgraph._state.whose import OF_OBJECTS, are_of_users, is_installed, is_users

__all__ = [
    "Loads",
    "Reached",
    "asks_for_gradients",
    "globals_in",
    "imported_in",
    "is_installed",
    "is_looked_into",
    "is_users",
    "loads_in",
    "named_of_module",
    "names_of",
]


class Loads(NamedTuple):
    """Names that code loads the values of.

    Attributes:
        own: Those of attributes of the first argument, as of ``self``.
        others: Those of attributes of anything else.
        variables: Those of globals.
        words: Those in texts, as keys of dictionaries are.
        asked: The same where code asks for attributes by texts.
    """

    own: frozenset[str] = frozenset()
    others: frozenset[str] = frozenset()
    variables: frozenset[str] = frozenset()
    words: frozenset[str] = frozenset()
    asked: frozenset[str] = frozenset()

    def joined(self, *more: Loads) -> Loads:
        """All of them."""
        return Loads(*(one.union(*rest) for one, *rest in zip(self, *more, strict=True)))


class Reached:
    """What the code of a function comes to, with functions and methods of the user's that it names.

    Args:
        function: The function.
        parts: Modules, whose hooks count as well; see :meth:`call_hooks`.

    Attributes:
        names: The names that the code has.
        called: Those that other code has than what only breaks call.
        functions: The functions and methods of the user's that it consists of, by their numbers.
        kinds: The classes of the user's whose methods are among them.
        draws: Whether it names the random numbers that all of Python or NumPy share.
        has_breaks: Whether breaks are among them.
        reads: What functions of the user's may read the value of, but for what breaks call: that
            runs in each call.
        uses: How these use the containers that they name.
        stores: The names of globals and attributes that breaks assign.
        cells: The numbers of the variables that such functions close over, but for libraries.
        handed_on: Classes of which a method does more with its object than to ask for attributes.
    """

    def __init__(self, function: object, parts: Iterable[torch.nn.Module]) -> None:
        self.names: set[str] = set()
        self.called: set[str] = set()
        self.functions: dict[int, Any] = {}
        self.kinds: set[type] = set()
        self.draws = self.has_breaks = False
        self.reads = Loads()
        self.uses = Uses()
        self.stores: set[str] = set()
        self.cells: set[int] = set()
        self.handed_on: set[type] = set()
        self._whole: set[type] = set()
        # What was seen stays alive, as long as it is known by its number.
        self._seen: dict[tuple[int, type | None, bool], object] = {}
        self._members: dict[type, dict[str, list[Any]]] = {}
        parts = [*parts]
        hooks = [hook for one in parts for hook in _hooks_of(vars(one), "")]
        leaves = (leaf for one in parts for leaf in one._parameters.values() if leaf is not None)
        of_leaves = (where[-1] for leaf in leaves for where in _torch.hooks_of_leaf(leaf))
        hooks += [hook for found in of_leaves if isinstance(found, dict) for hook in found.values()]
        hooks += _hooks_of(vars(torch.nn.modules.module), "_global")
        self._hooks = hooks
        self._go([(function, None)])

    def has_name(self, name: str) -> bool:
        """Whether the code has a name, or may make it to ask for an attribute."""
        return name in self.names or self.uses.composes(name)

    @property
    def size(self) -> tuple[int, int]:
        """How much it is by now."""
        return len(self.names), len(self.functions)

    def call(self, modules: Iterable[torch.nn.Module]) -> None:
        """Come to the forward of modules."""
        kinds: dict[Any, None] = dict.fromkeys(map(type, modules))
        self._go([(kind.forward, kind) for kind in kinds])

    def hand_on(self, kind: type) -> None:
        """Somebody else than its own methods may have an object of a class."""
        self.handed_on.add(kind)
        self._whole.add(kind)
        self.go_on((), [kind])

    def call_hooks(self) -> None:
        """Come to the hooks: of these there may be more than are gone through."""
        self._go([(hook, None) for hook in self._hooks])
        # With what the objects have that are hooks, or whose methods are.
        self.functions.update((id(one), one) for one in self._hooks)

    def go_on(self, functions: Iterable[object], kinds: Iterable[type]) -> None:
        """Come to more.

        Args:
            functions: Functions that the code has found.
            kinds: Classes of objects on which it may call the methods that it names, and operators
                but comparisons.
        """
        found: list[tuple[object, type | None]] = [(one, None) for one in functions]
        for kind in kinds:
            for name, values in self._members_of(kind).items():
                is_called = self.has_name(name) or name.startswith("__") or name == "forward"
                if is_called and name not in _NOT_CALLED:
                    found.append((values[0], kind))
        self._go(found)

    def _go(self, functions: Iterable[tuple[object, type | None]]) -> None:
        """Come to functions, each with the class whose method it is, and what they call."""
        # The near ones first: there may be too many. Each with whether only a break calls it.
        waiting = deque((*one, False) for one in functions)
        loads: list[Loads] = []
        uses: list[Uses] = []
        while waiting and len(self.functions) < _MOST_REACHED:
            one, owner, is_in_break = waiting.popleft()
            seen = (id(one), owner, False), (id(one), owner, is_in_break)
            if isinstance(one, _PLAIN) or any(key in self._seen for key in seen):
                continue
            self._seen[seen[1]] = one
            if isinstance(one, types.FunctionType):
                self.names.update(names_of(one.__code__))
                if not is_in_break:
                    self.called.update(names_of(one.__code__))
                if is_users(one.__globals__.get("__name__")):
                    self.functions[id(one)] = one
                    self.kinds.update(() if owner is None else (owner,))
                    if is_in_break:
                        self.stores |= stored_in(one.__code__)
                    else:
                        loads.append(loads_in(one.__code__))
                        uses.append(_uses_of(one.__code__))
                    if not is_in_break and not is_installed(one.__globals__["__name__"]):
                        self.cells.update(map(id, one.__closure__ or ()))
            elif isinstance(one, types.MethodType) and is_users(type(one.__self__).__module__):
                self.functions[id(one)] = one
            is_in_break |= _is_break(one)
            waiting += ((*called, is_in_break) for called in self._called_by(one, owner))
        self.reads = self.reads.joined(*loads)
        self.uses = self.uses.joined(*uses)
        # Whoever gets the object may call what any code names of it.
        if new := self.handed_on - self._whole:
            self._whole |= new
            self.go_on((), new)

    def _called_by(self, one: Any, owner: type | None) -> Iterator[tuple[object, type | None]]:
        """What a function or another callable may call, each with the class whose method it is."""
        # By their types: other objects may stand for these, and raise when they are asked.
        kind = type(one)
        if issubclass(kind, types.MethodType):
            yield one.__func__, type(one.__self__)
        if issubclass(kind, types.MethodType | types.BuiltinMethodType):
            if issubclass(type(one.__self__), type):
                # As `Function.apply`, which calls others of its methods, and is C on newer torch.
                yield from self._called_of(one.__self__, frozenset(self.names))
        elif issubclass(kind, type):
            yield from self._called_of(one, frozenset(self.names))
        elif issubclass(kind, functools.partial):
            given = one.func, *one.args, *one.keywords.values()
            yield from ((value, None) for value in given)
        elif issubclass(kind, _core.Dispatcher):
            yield one.__wrapped__, owner
        elif issubclass(kind, property):
            yield from ((way, owner) for way in (one.fget, one.fset))
        elif issubclass(kind, functools.cached_property | functools.partialmethod):
            yield one.func, owner
        elif issubclass(kind, functools._lru_cache_wrapper):
            yield one.__wrapped__, owner
        elif issubclass(kind, staticmethod | classmethod):
            yield one.__func__, owner
        elif issubclass(kind, functools.singledispatchmethod):
            yield from ((value, owner) for value in one.dispatcher.registry.values())
        elif issubclass(kind, types.FunctionType):
            if not is_users(one.__globals__.get("__name__")):
                self.has_breaks |= _is_break(one)
                self.handed_on.update(() if owner is None else (owner,))
                # That of a decorator, as of `torch.no_grad()`.
                yield vars(one).get("__wrapped__"), owner
                return
            names = names_of(one.__code__)
            for name in globals_in(one.__code__):
                yield from self._called_of(one.__globals__.get(name), names)
            for module in imported_in(one.__code__):
                yield from self._called_of(module, names)
            for cell in (cell for cell in one.__closure__ or () if cell != _UNASSIGNED):
                yield from self._called_of(cell.cell_contents, names)
            for value in (*(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values()):
                yield from self._called_of(value, names)
            if owner is not None:
                members = self._members_of(owner)
                composes = uses_in(one.__code__).composes
                asked = asked_of_itself(one.__code__)
                if asked is not None and not are_of_users(owner, asked):
                    asked = None
                if asked is None:
                    self.handed_on.add(owner)
                named = names if asked is None else asked
                for name in [name for name in members if name in named or composes(name)]:
                    # That of a class that it is derived from is another one's `super()`.
                    values = members[name] if "super" in names else members[name][:1]
                    yield from ((value, owner) for value in values)
        elif issubclass(kind, torch.nn.Module):
            yield kind.forward, kind
        elif is_users(vars(kind).get("__module__")) and not issubclass(kind, type):
            # As a descriptor it may be asked for what others have.
            for name in ("__call__", "__get__"):
                yield inspect.getattr_static(kind, name, None), kind

    def _called_of(self, value: Any, names: frozenset[str]) -> Iterator[tuple[object, type | None]]:
        """What code with these names may call of a value, each with the class of a method."""
        yield value, None
        self.draws |= _is_of_random(value) or (
            value is sys.modules.get("numpy") and "random" in names
        )
        if type(value) in (list, tuple, dict) and len(value) <= _MOST_FUNCTIONS:
            items = value.values() if isinstance(value, dict) else value
            yield from ((one, None) for one in items if isinstance(one, (*_FUNCTIONS, type)))
        elif issubclass(type(value), types.ModuleType):
            yield from ((one, None) for _, _, one in named_of_module(value, names))
        elif issubclass(type(value), type) and is_users(vars(value).get("__module__")):
            of_autograd = issubclass(value, torch.autograd.Function)
            # With those of its own class, which may be one of the user's, too.
            members = {**self._members_of(type(value)), **self._members_of(value)}
            for name, (member, *_) in members.items():
                # Who names a class may make objects, and operators call their methods.
                is_special = name.startswith("__") and name not in _NOT_CALLED - _MAKING
                is_called = name in names or is_special or (of_autograd and name in _OF_AUTOGRAD)
                if is_called and isinstance(member, OF_OBJECTS):
                    yield member, value

    def _members_of(self, kind: type) -> dict[str, list[Any]]:
        """What classes of the user's have by each name, the most derived first."""
        if kind not in self._members:
            found = self._members[kind] = {}
            for base in kind.__mro__:
                if is_users(vars(base).get("__module__")):
                    for name, value in vars(base).items():
                        found.setdefault(name, []).append(value)
        return self._members[kind]


def _uses_of(code: types.CodeType) -> Uses:
    """How code uses what it names; what makes an object fills containers that nobody has yet."""
    uses = uses_in(code)
    return uses._replace(filled=frozenset()) if code.co_name in _MAKING else uses


def _is_break(one: object) -> bool:
    """Whether a function is what a decorator of breaks has made."""
    return (
        isinstance(one, types.FunctionType) and one.__globals__.get("__name__") == "cgraph.breaks"
    )


def _is_of_random(value: Any) -> bool:
    """Whether a value draws random numbers by the generator that all of Python or NumPy share."""
    kind = type(value)
    if issubclass(kind, types.ModuleType):
        return value is random or vars(value).get("__name__") == "numpy.random"
    if issubclass(kind, types.MethodType | types.BuiltinMethodType):
        owner = value.__self__
        return owner is random._inst or type(owner).__name__ == "RandomState"
    return False


def _hooks_of(owner: dict[str, Any], prefix: str) -> list[Any]:
    """The hooks of a module, or of all."""
    found = (owner.get(f"{prefix}{kind}") for kind in _HOOKS)
    return [hook for hooks in found if isinstance(hooks, dict) for hook in hooks.values()]


def named_of_module(
    module: types.ModuleType, names: frozenset[str], depth: int = 2
) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """What code with these names may use of a module of Python's, and of those inside it.

    Each with its name and the dictionary that has it.
    """
    values = vars(module)
    if not is_users(values.get("__name__")):
        return
    for name in names.intersection(values):
        value = values[name]
        if not isinstance(value, types.ModuleType):
            yield values, name, value
        elif depth > 0:
            yield from named_of_module(value, names, depth - 1)


def asks_for_gradients(names: Iterable[str]) -> bool:
    """Whether code with these names may ask which tensors have gradients, or clear them."""
    return not _OF_GRADIENTS.isdisjoint(names)


def is_looked_into(kind: type) -> bool:
    """Whether objects of a class have attributes that a user's code sets, and that count."""
    return issubclass(kind, _NAMESPACES) or is_users(vars(kind).get("__module__"))


@functools.lru_cache(maxsize=4096)
def globals_in(code: types.CodeType) -> tuple[str, ...]:
    """The globals that code names, with that of the functions defined in it; each once."""
    loads = (one for one in instructions_of(code) if one.opname in _LOADS)
    found = {one.argval: None for one in loads}
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            found.update(dict.fromkeys(globals_in(inner)))
    return tuple(found)


def imported_in(code: types.CodeType) -> list[types.ModuleType]:
    """The modules that code imports itself, and that are there."""
    found = (sys.modules.get(name) for name in _imports_in(code))
    return [one for one in found if isinstance(one, types.ModuleType)]


@functools.lru_cache(maxsize=4096)
def _imports_in(code: types.CodeType) -> tuple[str, ...]:
    imports = (one for one in instructions_of(code) if one.opname == "IMPORT_NAME")
    return tuple({str(one.argval): None for one in imports})


@functools.lru_cache(maxsize=4096)
def names_of(code: types.CodeType) -> frozenset[str]:
    """Names of globals, attributes and methods, with those of the functions defined in it.

    Also those in texts, as for ``getattr`` and ``operator.attrgetter``.
    """
    return frozenset(code.co_names).union(_words_in(code), *map(names_of, _inner(code)))


@functools.lru_cache(maxsize=4096)
def loads_in(code: types.CodeType) -> Loads:
    """What code loads as a value, with the functions defined in it."""
    own, others, variables = set[str](), set[str](), set[str]()
    itself = code.co_varnames[:1] if code.co_argcount else ()
    before: dis.Instruction | None = None
    for one in instructions_of(code):
        if one.opname in ("LOAD_GLOBAL", "LOAD_NAME", "IMPORT_FROM"):
            variables.add(str(one.argval))
        elif one.opname in _ATTRIBUTES and not _is_called_or_stored(one, before):
            (own if _loads(before, itself) else others).add(str(one.argval))
        elif one.opname == "MATCH_CLASS" and before is not None and type(before.argval) is tuple:
            others.update(before.argval, ("__match_args__",) if one.arg else ())
        before = one
    words = _words_in(code)
    asked = words if ASKING.intersection(code.co_names) else set[str]()
    if "AttributeError" in code.co_names:
        # It may try to get them.
        asked = {*asked, *own, *others}
    found = Loads(*map(frozenset, (own, others, variables, words, asked)))
    return found.joined(*map(loads_in, _inner(code)))


@functools.lru_cache(maxsize=4096)
def stored_in(code: types.CodeType) -> frozenset[str]:
    """The names of globals and attributes that code assigns."""
    stores = (one for one in instructions_of(code) if one.opname in _STORES)
    names = (str(one.argval) for one in stores)
    return frozenset(names).union(*map(stored_in, _inner(code)))


def _inner(code: types.CodeType) -> list[types.CodeType]:
    """The functions that are defined in code."""
    return [one for one in code.co_consts if isinstance(one, types.CodeType)]


def _words_in(code: types.CodeType) -> set[str]:
    """What texts in code may name."""
    groups = (one for one in code.co_consts if isinstance(one, tuple | frozenset))
    constants = (*code.co_consts, *(one for group in groups for one in group))
    texts = (one for one in constants if isinstance(one, str) and len(one) < _LONG)
    return {word for text in texts for word in text.split(".") if word.isidentifier()}


def _is_called_or_stored(one: dis.Instruction, before: dis.Instruction | None) -> bool:
    """Whether an attribute is loaded to call it as a method, or to be assigned, as by ``+=``."""
    is_method = sys.version_info >= (3, 12) and one.opname == "LOAD_ATTR" and (one.arg or 0) & 1
    return bool(is_method) or (before is not None and before.opname in ("COPY", "DUP_TOP"))


def _loads(one: dis.Instruction | None, names: tuple[str, ...]) -> bool:
    """Whether an instruction loads one of these variables, as the last one of several."""
    if one is None or not one.opname.startswith("LOAD_FAST"):
        return False
    last = one.argval[-1] if isinstance(one.argval, tuple) else one.argval
    return last in names


# What makes an object is called before anybody has it, and what shows and compares one names all
# that it has.
_NOT_CALLED = frozenset(
    {
        *("__init__", "__new__", "__post_init__", "__del__", "__repr__", "__str__", "__eq__"),
        *("__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__getstate__", "__setstate__"),
        *("__reduce__", "__reduce_ex__", "__copy__", "__deepcopy__", "__replace__"),
    }
)
_OF_GRADIENTS = frozenset(
    {"grad", "zero_grad", "clip_grad_norm_", "clip_grad_norm", "clip_grad_value_", "unscale_"}
)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_MAKING = frozenset({"__init__", "__new__", "__post_init__"})
_OF_AUTOGRAD = frozenset({"forward", "setup_context", "backward"})
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
# No more are gone through: there is no end to some libraries.
_MOST_REACHED = 512
_PLAIN = (int, float, str, bytes, type(None))
# Larger containers are of data.
_MOST_FUNCTIONS = 256
# Longer texts are no names.
_LONG = 100
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_SUPER_ATTR")
_STORES = ("STORE_GLOBAL", "STORE_NAME", "STORE_ATTR", "DELETE_ATTR")
_UNASSIGNED = types.CellType()
_NAMESPACES = (
    *(types.SimpleNamespace, argparse.Namespace, threading.local),
    *(torch.distributions.Distribution, torch.distributions.Transform),
    *(collections.ChainMap, collections.UserDict, collections.UserList),
)
