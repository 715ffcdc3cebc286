"""The places in Python that a function reads, found by the names that stand in code that ran.

A walk begins at the function, its object, the objects among its arguments and the globals of the
code that ran, and goes on through attributes, cells, containers and modules. The values found are
compared before each replay; see ``docs/graphed.md``.
"""

from __future__ import annotations

import builtins
import contextvars
import functools
import gc
import importlib.util
import os
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from types import CodeType
from typing import Any, NamedTuple

import torch

from cgraph import _core, _torch
from cgraph._python.libraries import is_library, is_library_class, is_library_module
from cgraph._python.names import imports_in, names_in, stored_in
from cgraph._python.steps import (
    NOTHING,
    OF_MODULE,
    found_at,
    has_parts,
    items_of,
    keys_of,
    name_of_item,
    slots_of,
)
from cgraph._python.values import (
    ATOMS,
    attributes_of,
    form_in_words,
    has_no_parts,
    is_array,
    is_plain,
)

__all__ = ["MOST_PLACES", "Place", "Places"]

MOST_PLACES = 4096
"""The most places that are compared; one warning says where a walk stopped."""

_CONTAINERS = (dict, list, tuple, deque, set, frozenset)
# Their parts are looked at, and not their settings.
_AROUND = (staticmethod, classmethod, functools._lru_cache_wrapper, _core.Dispatcher)
_OF_OTHERS = (types.ModuleType, functools.partial, *_AROUND[2:])


class Place(NamedTuple):
    """A place, and the value that was found there.

    Attributes:
        parent: The number of the place that it is found in; -1 for a root.
        step: The way to find it there.
        check: The condition on the value; see ``cgraph._core.Guards``.
        name: Its readable name, as ``self.layers[0].scale``.
        value: The value that was there; of a tensor that may be exchanged its form in words.
    """

    parent: int
    step: tuple[Any, ...]
    check: tuple[Any, ...]
    name: str
    value: Any

    @property
    def is_of_key(self) -> bool:
        """True if another value here makes another key."""
        return bool(self.check[0] in ("plain", "form", "input") or self.step[0] == "grad")


class Places:
    """A walk through the places that a function reads.

    Args:
        names: The names and literal strings that stand in code that ran.
        codes: The code that ran, and its globals.
        gradients: The gradients, when the call began, of the leaves whose gradients matter, by the
            ``id`` of the leaf. None for the present gradients of all leaves.
        but: The dotted names of places that do not count.
        copied: The names of the places of tensors that replays copy.

    Attributes:
        names: The names that count.
        codes: The user's code that ran, and its globals.
        found: The places, each after the one that it is found in.
        stopped: The name of the first place that was left out because there are too many.
        addresses: The names of tensors, by the addresses of their storages.
        tensors: Places of tensors that no operator took, or that replays copy: the holder, the
            step, and the name.
        modules: The modules that were found.
        leaves: The tensors that may get gradients.
        room: How many more places are compared.
        refused: The name of an array, whose contents nothing compares; None if there is none.
    """

    def __init__(
        self,
        names: frozenset[str],
        codes: Mapping[CodeType, dict[str, Any]],
        gradients: Mapping[int, torch.Tensor | None] | None,
        but: Collection[str] = (),
        copied: Collection[str] = (),
    ) -> None:
        self.found: list[Place] = []
        self.stopped: str | None = None
        self.addresses: dict[int, str] = {}
        self.tensors: list[tuple[Any, tuple[Any, ...], str]] = []
        self.modules: list[torch.nn.Module] = []
        self.leaves: list[torch.Tensor] = []
        self.refused: str | None = None
        self.names = names
        self.codes = {
            code: scope for code, scope in codes.items() if not is_library(code.co_filename)
        }
        # Of libraries only what the user's code names counts.
        self._own_names = names & (names_in(self.codes) | (names - names_in(codes)))
        # A name that is only assigned to need not be absent.
        self._read = names - stored_in(codes)
        self._ran = {id(code) for code in self.codes}
        self._gradients = gradients
        self._but = frozenset(but)
        self._copied = frozenset(copied)
        self.room = MOST_PLACES
        self._roots: dict[int, int] = {}
        # Objects already visited, by ``id``; they stay alive as long as the walk. What is found in
        # an argument is looked into in each argument, as another call may give others.
        self._seen: dict[int, Any] = {}
        self._outside: dict[int, Any] = {}
        # Functions, classes, cells, modules of Python, and leaves that may get gradients.
        self._known: dict[int, Any] = {}
        self._absent: dict[tuple[str, ...], frozenset[str]] = {}
        self._waiting: deque[tuple[int, Any, str]] = deque()

    def walk(
        self,
        function: Callable[..., Any],
        objects: Sequence[tuple[str, Any]],
        modules: Sequence[tuple[str, Any]],
    ) -> Places:
        """Go through all that is reached; return this walk."""
        self._callable(function, "self")
        for name, value in modules:
            self._look(-1, ("root", value), name, value)
        self._globals()
        for code, scope in self.codes.items():
            for dots, name in sorted(imports_in(code)):
                self._imported(dots, name, scope)
        self._go_on()
        self._outside = self._seen
        for number, (name, value) in enumerate(objects):
            self._seen = {}
            self._look(-1, ("object", number), name, value)
            self._go_on()
        return self

    def _go_on(self) -> None:
        while self._waiting:
            self._inside(*self._waiting.popleft())

    def _globals(self) -> None:
        scopes: dict[int, tuple[dict[str, Any], dict[str, None]]] = {}
        for code, scope in self.codes.items():
            scopes.setdefault(id(scope), (scope, {}))[1].update(dict.fromkeys(code.co_names))
        for scope, names in scopes.values():
            # A global may come to hide a builtin.
            absent = frozenset(one for one in names if one not in scope and hasattr(builtins, one))
            root = self._root(scope, "globals", ("dict", dict, None, absent))
            for name in names:
                if name in scope:
                    self._look(root, ("item", name), name, scope[name])

    def _imported(self, dots: int, name: str, scope: dict[str, Any]) -> None:
        """Add the names in a module that code imports where it uses it."""
        with suppress(ImportError):  # the code has raised it, and has caught it
            name = importlib.util.resolve_name("." * dots + name, scope.get("__package__"))
        if isinstance(module := sys.modules.get(name), types.ModuleType):
            self._callable(module, name)

    def _root(self, value: Any, name: str, check: tuple[Any, ...] | None = None) -> int:
        """Return the number of a root, which stays the same object."""
        number = self._roots.get(id(value))
        if number is None:
            number = self._add(-1, ("root", value), check or ("is", value), name, value)
            self._roots[id(value)] = number
        return number

    def _add(
        self, parent: int, step: tuple[Any, ...], check: tuple[Any, ...], name: str, v: Any
    ) -> int:
        # A call of its class takes longer.
        self.found.append(tuple.__new__(Place, (parent, step, check, name, v)))
        return len(self.found) - 1

    def _count(
        self, parent: int, step: tuple[Any, ...], check: tuple[Any, ...], name: str, v: Any
    ) -> bool:
        """Add a place if there is room for it; return whether there is."""
        self.room -= 1
        if self.room < 0:
            self.stopped = self.stopped or name
            return False
        self._add(parent, step, check, name, v)
        return True

    def _look(self, parent: int, step: tuple[Any, ...], name: str, value: Any) -> None:
        """Add the place of a value, and go on inside it later."""
        if name in self._but:
            return
        kind = type(value)
        if isinstance(value, torch.Tensor):
            self._tensor(parent, step, name, value)
        elif kind is dict or isinstance(value, torch.nn.Module):
            # Most places: they are none of what follows.
            self._holder(parent, step, name, value)
        elif kind in ATOMS or is_plain(value):
            self._count(parent, step, ("plain", value), name, value)
        elif is_array(value):
            self.refused = self.refused or name
        elif value is os.environ:
            self._environment()
        elif isinstance(value, weakref.ref):
            self._add(parent, step, ("weak", value), name, value)
        elif isinstance(value, contextvars.ContextVar):
            number = self._add(parent, step, ("is", value), name, value)
            inside = found_at(value, ("context",))
            self._found_or_missing(number, ("context",), f"{name}.get()", inside)
        elif isinstance(value, types.MappingProxyType):
            self._add(parent, step, ("is", value), name, value)
            for one in gc.get_referents(value):  # the dictionary that it shows
                self._look(-1, ("root", one), name, one)
        elif has_no_parts(value) or isinstance(value, _OF_OTHERS):
            if self._count(parent, step, ("is", value), name, value):
                self._callable(value, name)
        else:
            self._holder(parent, step, name, value)

    def _holder(self, parent: int, step: tuple[Any, ...], name: str, value: Any) -> None:
        """Add the place of a container or object; its parts come later, if it has some."""
        if id(value) in self._seen or (parent >= 0 and id(value) in self._outside):
            self._add(parent, step, ("is", value), name, value)
            return
        self._seen[id(value)] = value
        if isinstance(value, torch.nn.Module):
            if id(value) not in self._known:
                self._known[id(value)] = value
                self.modules.append(value)
        elif not isinstance(value, _CONTAINERS) and not has_parts(value):
            self._count(parent, step, ("is", value), name, value)
            return
        number = self._add(parent, step, self._check(type(value), value), name, value)
        self._waiting.append((number, value, name))

    def _check(self, kind: type, value: Any) -> tuple[Any, ...]:
        """Return the check that a container or object has no other parts than its children."""
        if isinstance(value, dict):
            # Its attributes, if it has some, are not looked at.
            return "dict", kind, keys_of(value), frozenset()
        if isinstance(value, set | frozenset):
            return "set", kind, frozenset(value)
        if isinstance(value, list | tuple | deque):
            base: Any = next(one for one in (list, tuple, deque) if isinstance(value, one))
            return "list", kind, base.__len__(value)
        return "object", kind, self._absent_in(attributes_of(value))

    def _absent_in(self, attributes: dict[str, Any]) -> frozenset[str]:
        keys = tuple(attributes)
        found = self._absent.get(keys)
        if found is None:
            found = self._absent[keys] = self._read.difference(keys)
        return found

    def _tensor(self, parent: int, step: tuple[Any, ...], name: str, tensor: torch.Tensor) -> None:
        memory = _torch.memory_of(tensor)
        if memory is not None:
            self.addresses.setdefault(memory.data_ptr(), name)
        # A parameter that is frozen now may get gradients later.
        may_train = tensor.requires_grad or isinstance(tensor, torch.nn.Parameter)
        has_gradient = may_train and tensor.is_leaf
        if has_gradient and id(tensor) not in self._known:
            self._known[id(tensor)] = tensor
            self.leaves.append(tensor)
            for _, _, hooks in _torch.hooks_of_leaf(tensor):
                for hook in (hooks or {}).values():
                    self._callable(hook, f"a hook of {name}")
            if tensor.grad is not None and (of_grad := _torch.memory_of(tensor.grad)) is not None:
                self.addresses.setdefault(of_grad.data_ptr(), f"{name}.grad")
        if self._gradients is not None:
            has_gradient = id(tensor) in self._gradients
        number = self._add(parent, step, ("tensor", tensor), name, tensor)
        if has_gradient:
            grad = tensor.grad if self._gradients is None else self._gradients[id(tensor)]
            check = ("plain", None) if grad is None else ("tensor", grad)
            self._add(number, ("grad",), check, f"{name}.grad", grad)

    def settle(
        self, is_taken: Callable[[torch.Tensor, str], bool], *, copies: bool = True
    ) -> Places:
        """Let the address count only of tensors that operators took and replays do not copy.

        Args:
            is_taken: Returns whether an operator took a tensor, whose place has this name.
            copies: False if replays copy none, as those with gradients.
        """
        with_gradients = {one.parent for one in self.found if one.step[0] == "grad"}
        for number, (parent, step, check, name, tensor) in enumerate(self.found):
            if check[0] != "tensor":
                continue
            is_copied = copies and name in self._copied
            has_form = _torch.memory_of(tensor) is not None and _torch.form_of(tensor) is None
            if not is_copied and (number in with_gradients or is_taken(tensor, name)):
                if not has_form:
                    self.found[number] = Place(parent, step, ("is", tensor), name, tensor)
                continue
            if step[0] == "grad":
                self.found[number] = Place(parent, step, ("kind", type(tensor)), name, tensor)
                continue
            holder = step[1] if parent < 0 else self.found[parent].value
            self.tensors.append((holder, step, name))
            check = ("input" if is_copied else "form", tensor)
            if not has_form:
                check = ("kind", type(tensor))
            self.found[number] = Place(parent, step, check, name, form_in_words(tensor))
        return self

    def _inside(self, number: int, value: Any, name: str) -> None:
        """Add the places inside a value."""
        if type(value) is OrderedDict and not value and not attributes_of(value):
            # Most of them, as those of a module's hooks.
            return
        if isinstance(value, dict):
            self._items(number, value, name)
        elif isinstance(value, list | tuple | deque):
            for place, one in enumerate(items_of(value)):
                self._look(number, ("item", place), f"{name}[{place}]", one)
        # Python's own containers have no attributes, nor do their classes change.
        if type(value) not in _BARE and not isinstance(value, set | frozenset):
            self._attributes(number, value, name)
            self._class(type(value))

    def _items(self, number: int, value: dict[Any, Any], name: str) -> None:
        # Another thread may change the dictionary, so the walk uses a copy.
        for place, (key, one) in enumerate([*dict.items(value)]):
            its_name = name_of_item(name, key, place, self.addresses)
            self._look(number, ("item", key), its_name, one)

    def _attributes(self, number: int, value: Any, name: str) -> None:
        attributes = attributes_of(value)
        is_module = isinstance(value, torch.nn.Module)
        for key, one in [*attributes.items()]:
            if key in self.names or (is_module and (key in OF_MODULE or key == "training")):
                self._look(number, ("attr", key), f"{name}.{key}", one)
        for slot in slots_of(type(value)):
            if slot.__name__ in self.names:
                its_name = f"{name}.{slot.__name__}"
                self._found_or_missing(
                    number, ("slot", slot), its_name, found_at(value, ("slot", slot))
                )

    def _found_or_missing(self, number: int, step: tuple[Any, ...], name: str, value: Any) -> None:
        if value is NOTHING:
            self._add(number, step, ("missing",), name, NOTHING)
        else:
            self._look(number, step, name, value)

    def _class(self, kind: type) -> None:
        """Add the attributes with these names in the classes of an object."""
        if id(kind) in self._known or not kind.__flags__ & _CAN_CHANGE:
            return
        self._known[id(kind)] = kind
        self._class(type(kind))
        of_library = self._own_names
        if issubclass(kind, torch.nn.Module):
            of_library = of_library | {"forward"}
        there: set[str] = set()
        wanted: list[tuple[str, Any, bool]] = []
        for base in kind.__mro__:
            is_own = not is_library_class(base)
            named = (self.names if is_own else of_library).intersection(vars(base))
            for key in sorted(named - there):
                if not isinstance(one := vars(base)[key], _DESCRIPTORS):
                    wanted.append((key, one, is_own))
            there.update(vars(base))
        name, absent = kind.__qualname__, self._read - there
        root = self._root(kind, name, ("class", kind, absent))
        for key, one, is_own in wanted:
            if is_own:
                self._look(root, ("class", key), f"{name}.{key}", one)
            else:
                self._of_library(root, ("class", key), f"{name}.{key}", one)

    def _of_library(self, parent: int, step: tuple[Any, ...], name: str, value: Any) -> None:
        """Add a place of a library, whose own parts are not looked at."""
        if isinstance(value, types.ModuleType):
            self._callable(value, name)
        elif value is os.environ or value is os.getenv:
            self._environment()
        elif name not in self._but:
            self._count(parent, step, ("plain" if is_plain(value) else "is", value), name, value)
            if isinstance(value, types.FunctionType):  # it may be the user's
                self._function(value)

    def _environment(self) -> None:
        """Add the variables of the environment with these names."""
        environ: Any = os.environ
        keys = {environ.encodekey(name): name for name in self._own_names}
        absent = frozenset(key for key in keys if key not in environ._data)
        root = self._root(environ._data, "os.environ", ("dict", dict, None, absent))
        if id(environ) not in self._known:
            self._known[id(environ)] = environ
            for key in sorted(keys.keys() - absent):
                name = f"os.environ[{keys[key]!r}]"
                self._look(root, ("item", key), name, environ._data[key])

    def _callable(self, value: Any, name: str) -> None:
        """Go on through the parts of a function, if its code ran."""
        if isinstance(value, functools.partial):
            self._callable(value.func, name)
            for place, one in enumerate(value.args):
                self._look(
                    self._root(value.args, name), ("item", place), f"{name}.args[{place}]", one
                )
            for key, one in value.keywords.items():
                self._look(self._root(value.keywords, name), ("item", key), key, one)
        elif isinstance(value, types.MethodType):
            self._look(-1, ("root", value.__self__), name, value.__self__)
            self._callable(value.__func__, name)
        elif isinstance(value, property):
            for one in (value.fget, value.fset):
                if one is not None:
                    self._callable(one, name)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, _AROUND):
            self._callable(value.__wrapped__, name)  # type: ignore[union-attr]
        elif isinstance(value, types.ModuleType):
            self._module(value, name)
        elif value is os.getenv:
            self._environment()
        elif isinstance(value, type):
            self._class(value)
        elif name == "self" and not has_no_parts(value):
            self._look(-1, ("root", value), name, value)

    def _module(self, module: types.ModuleType, name: str) -> None:
        if id(module) in self._known:
            return
        self._known[id(module)] = module
        is_of_library = is_library_module(module)
        names = self._own_names if is_of_library else self.names
        look = self._of_library if is_of_library else self._look
        root = self._root(module, name)
        for key in sorted(names.intersection(vars(module))):
            look(root, ("attr", key), f"{name}.{key}", vars(module)[key])

    def _function(self, function: types.FunctionType) -> None:
        if id(function) in self._known:
            return
        self._known[id(function)] = function
        code, name, attributes = function.__code__, function.__name__, vars(function)
        wrapped, has_run = attributes.get("__wrapped__"), id(code) in self._ran
        if wrapped is not None and (has_run or is_library(code.co_filename)):
            # A library's decorator may be around the user's, and an object's own code says self.
            self._callable(wrapped, "self")
        if not has_run:
            return
        self.found.append(Place(-1, ("root", function), ("function", function), name, function))
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if id(cell) not in self._known:
                self._known[id(cell)] = cell
                root = self._root(cell, variable)
                self._found_or_missing(root, ("cell",), variable, found_at(cell, ("cell",)))
        names = reversed(code.co_varnames[: code.co_argcount])
        defaults = [*zip(names, reversed(function.__defaults__ or ()), strict=False)]
        for variable, one in (*defaults, *(function.__kwdefaults__ or {}).items()):
            if not is_plain(one):
                self._look(-1, ("root", one), variable, one)
        for key in sorted(self.names.intersection(attributes)):
            root = self._root(function, name)
            self._look(root, ("attr", key), f"{name}.{key}", attributes[key])


_BARE = (dict, list, tuple)
# `Py_TPFLAGS_HEAPTYPE`: classes that can get other attributes.
_CAN_CHANGE = 1 << 9


# Descriptors of a class's objects, which do not change.
_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType)
