"""The places in Python that a function reads, found by the names that stand in code that ran.

A walk begins at the function, its object, the objects among its arguments and the globals of the
code that ran, and goes on through attributes, cells, containers and modules. The values found are
compared before each replay; see ``docs/graphed.md``.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any, NamedTuple

import torch

from cgraph import _core, _torch
from cgraph._python.libraries import is_library, is_library_class, is_library_module
from cgraph._python.names import names_in
from cgraph._python.values import attributes_of, has_no_parts, is_array, is_plain

__all__ = ["MOST_PLACES", "NOTHING", "Place", "Places", "found_at", "names_in"]

MOST_PLACES = 4096
"""The most places that are compared; one warning says where a walk stopped."""

NOTHING: Any = object()
"""The value that is found where nothing is."""

_OF_MODULE = ("_parameters", "_buffers", "_modules")
_CONTAINERS = (dict, list, tuple, deque, set, frozenset)
# Their parts are looked at, and not their settings.
_OF_OTHERS = (types.ModuleType, functools.partial, _core.Dispatcher)
_TENSORS = (torch.Tensor,)


class Place(NamedTuple):
    """A place, and the value that was found there.

    Attributes:
        parent: The number of the place that it is found in; -1 for a root.
        step: The way to find it there.
        check: The condition on the value; see ``cgraph._core.Guards``.
        name: Its readable name, as ``self.layers[0].scale``.
        value: The value that was there.
    """

    parent: int
    step: tuple[Any, ...]
    check: tuple[Any, ...]
    name: str
    value: Any

    @property
    def is_of_key(self) -> bool:
        """True if another value here makes another key."""
        return bool(self.check[0] == "plain" or self.step[0] == "grad")

    @property
    def is_changing(self) -> bool:
        """True if the value is a container that can get other items."""
        return isinstance(self.value, list | dict | set | deque)


class Places:
    """A walk through the places that a function reads.

    Args:
        names: The names and literal strings that stand in code that ran.
        codes: The code that ran, and its globals.
        is_taken: Returns whether an operator took a tensor, whose place has this name.
        gradients: The gradients, when the call began, of the leaves whose gradients matter, by the
            ``id`` of the leaf. None for the present gradients of all leaves.
        but: The dotted names of places that do not count.

    Attributes:
        found: The places, each after the one that it is found in.
        stopped: The name of the first place that was left out because there are too many.
        addresses: The names of tensors, by the addresses of their storages.
        tensors: Places of tensors that no operator took: the holder, the step, and the name.
        modules: The modules that were found.
        leaves: The tensors that may get gradients.
        refused: The name of an array, whose contents nothing compares; None if there is none.
    """

    def __init__(
        self,
        names: frozenset[str],
        codes: Mapping[CodeType, dict[str, Any]],
        is_taken: Callable[[torch.Tensor, str], bool],
        gradients: Mapping[int, torch.Tensor | None] | None,
        but: Collection[str] = (),
    ) -> None:
        self.found: list[Place] = []
        self.stopped: str | None = None
        self.addresses: dict[int, str] = {}
        self.tensors: list[tuple[Any, tuple[Any, ...], str]] = []
        self.modules: list[torch.nn.Module] = []
        self.leaves: list[torch.Tensor] = []
        self.refused: str | None = None
        self._names = names
        self._ran = {id(code) for code in codes}
        self._codes = codes
        self._is_taken = is_taken
        self._gradients = gradients
        self._but = frozenset(but)
        self._count = 0
        # Objects already visited, by ``id``; they stay alive as long as the walk.
        self._seen: dict[int, Any] = {}
        self._globals_seen: set[tuple[int, str]] = set()
        self._absent: dict[tuple[str, ...], frozenset[str]] = {}
        self._waiting: deque[tuple[int, Any, str]] = deque()

    def walk(
        self,
        function: Callable[..., Any],
        objects: Sequence[tuple[str, Any]],
        modules: Sequence[tuple[str, Any]],
    ) -> Places:
        """Go through all that is reached; return this walk.

        Args:
            function: The function.
            objects: The objects among the arguments with their names.
            modules: The modules among the arguments with their names.
        """
        self._callable(function, "self")
        for number, (name, value) in enumerate(objects):
            self._look(-1, ("object", number), name, value)
        for name, value in modules:
            self._look(-1, ("root", value), name, value)
        for code, scope in self._codes.items():
            if not is_library(code.co_filename):
                self._globals(code, scope)
        while self._waiting:
            self._inside(*self._waiting.popleft())
        return self

    def _globals(self, code: CodeType, scope: dict[str, Any]) -> None:
        wanted = [name for name in code.co_names if name in scope]
        if not wanted:
            return
        root = self._root(scope, "globals")
        for name in wanted:
            if (id(scope), name) not in self._globals_seen:
                self._globals_seen.add((id(scope), name))
                self._look(root, ("item", name), name, scope[name])

    def _root(self, value: Any, name: str) -> int:
        """Return the number of a root, which stays the same object."""
        number = self._roots.get(id(value))
        if number is None:
            number = self._roots[id(value)] = len(self.found)
            self.found.append(Place(-1, ("root", value), ("is", value), name, value))
        return number

    @functools.cached_property
    def _roots(self) -> dict[int, int]:
        return {}

    def _add(
        self, parent: int, step: tuple[Any, ...], check: tuple[Any, ...], name: str, v: Any
    ) -> int:
        self.found.append(Place(parent, step, check, name, v))
        return len(self.found) - 1

    def _counted(self, name: str) -> bool:
        """Count a place; return whether there is room for it."""
        self._count += 1
        if self._count > MOST_PLACES:
            self.stopped = self.stopped or name
            return False
        return True

    def _look(self, parent: int, step: tuple[Any, ...], name: str, value: Any) -> None:
        """Add the place of a value, and go on inside it later."""
        if name in self._but:
            return
        kind = type(value)
        if isinstance(value, _TENSORS):
            self._tensor(parent, step, name, value)
        elif is_plain(value):
            if self._counted(name):
                self._add(parent, step, ("plain", value), name, value)
        elif is_array(value):
            self.refused = self.refused or name
        elif has_no_parts(value) or isinstance(value, _OF_OTHERS):
            if isinstance(value, types.ModuleType) and is_library_module(value):
                return
            if self._counted(name):
                self._add(parent, step, ("is", value), name, value)
                self._callable(value, name)
        elif id(value) in self._seen:
            self._add(parent, step, ("is", value), name, value)
        else:
            self._seen[id(value)] = value
            if isinstance(value, torch.nn.Module):
                self.modules.append(value)
            elif not isinstance(value, _CONTAINERS) and not _has_parts(value):
                if self._counted(name):
                    self._add(parent, step, ("is", value), name, value)
                return
            number = len(self.found)
            self.found.append(Place(parent, step, self._check(kind, value), name, value))
            self._waiting.append((number, value, name))

    def _check(self, kind: type, value: Any) -> tuple[Any, ...]:
        """Return the check that a container or object has no other parts than its children."""
        if isinstance(value, dict):
            # Its attributes, if it has some, are not looked at.
            return "dict", kind, dict.__len__(value), frozenset()
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
            found = self._absent[keys] = self._names.difference(keys)
        return found

    def _tensor(self, parent: int, step: tuple[Any, ...], name: str, tensor: torch.Tensor) -> None:
        memory = _torch.memory_of(tensor)
        if memory is not None:
            self.addresses.setdefault(memory.data_ptr(), name)
        # A parameter that is frozen now may get gradients later.
        may_train = tensor.requires_grad or isinstance(tensor, torch.nn.Parameter)
        has_gradient = may_train and tensor.is_leaf
        if has_gradient and id(tensor) not in self._seen:
            self._seen[id(tensor)] = tensor
            self.leaves.append(tensor)
            for _, _, hooks in _torch.hooks_of_leaf(tensor):
                for hook in (hooks or {}).values():
                    self._callable(hook, f"a hook of {name}")
            if tensor.grad is not None and (of_grad := _torch.memory_of(tensor.grad)) is not None:
                self.addresses.setdefault(of_grad.data_ptr(), f"{name}.grad")
        if self._gradients is not None:
            has_gradient = id(tensor) in self._gradients
        if not self._is_taken(tensor, name) and not has_gradient:
            holder = step[1] if parent < 0 else self.found[parent].value
            self.tensors.append((holder, step, name))
            return
        number = self._add(parent, step, ("tensor", tensor), name, tensor)
        if has_gradient:
            grad = tensor.grad if self._gradients is None else self._gradients[id(tensor)]
            check: tuple[Any, ...] = ("plain", None)
            if grad is not None:
                is_taken = self._is_taken(grad, f"{name}.grad")
                check = ("tensor", grad) if is_taken else ("kind", type(grad))
            self._add(number, ("grad",), check, f"{name}.grad", grad)

    def _inside(self, number: int, value: Any, name: str) -> None:
        """Add the places inside a value."""
        if isinstance(value, torch.nn.Module):
            self._attributes(number, value, name)
            self._class(type(value))
        elif isinstance(value, dict):
            self._items(number, value, name)
            self._attributes(number, value, name)
            self._class(type(value))
        elif isinstance(value, list | tuple | deque):
            for place, one in enumerate(_iterated(value)):
                self._look(number, ("item", place), f"{name}[{place}]", one)
            self._attributes(number, value, name)
            self._class(type(value))
        elif not isinstance(value, set | frozenset):
            self._attributes(number, value, name)
            self._class(type(value))

    def _items(self, number: int, value: dict[Any, Any], name: str) -> None:
        # Another thread may change the dictionary, so the walk uses a copy.
        owner, _, last = name.rpartition(".")
        is_of_module = last in _OF_MODULE
        for place, (key, one) in enumerate([*dict.items(value)]):
            its_name = f"{owner}.{key}" if is_of_module else f"{name}[{self._key(key, place)}]"
            self._look(number, ("item", key), its_name, one)

    def _key(self, key: Any, place: int) -> str:
        """Return a dictionary's key as text that stays the same, whatever the key holds."""
        if is_plain(key):
            return f"{key!r:.40}"
        if isinstance(key, torch.Tensor) and (memory := _torch.memory_of(key)) is not None:
            known = self.addresses.get(memory.data_ptr())
            if known is not None:
                return known
        return f"{type(key).__name__} {place}"

    def _attributes(self, number: int, value: Any, name: str) -> None:
        attributes = attributes_of(value)
        is_module = isinstance(value, torch.nn.Module)
        for key, one in [*attributes.items()]:
            if key in self._names or (is_module and (key in _OF_MODULE or key == "training")):
                self._look(number, ("attr", key), f"{name}.{key}", one)
        for slot in _slots_of(type(value)):
            if slot.__name__ in self._names:
                one = _in_slot(slot, value)
                its_name = f"{name}.{slot.__name__}"
                if one is NOTHING:
                    self._add(number, ("slot", slot), ("missing",), its_name, NOTHING)
                else:
                    self._look(number, ("slot", slot), its_name, one)

    def _class(self, kind: type) -> None:
        """Add the attributes with these names in the user's classes of an object."""
        if id(kind) in self._seen:
            return
        self._seen[id(kind)] = kind
        wanted: dict[str, Any] = {}
        hidden: set[str] = set()
        for base in kind.__mro__:
            if is_library_class(base):
                hidden.update(vars(base))
                continue
            for key, one in [*vars(base).items()]:
                if key in self._names and key not in hidden and not isinstance(one, _DESCRIPTORS):
                    wanted.setdefault(key, one)
        if wanted:
            root = self._root(kind, kind.__qualname__)
            for key, one in wanted.items():
                self._look(root, ("class", key), f"{kind.__qualname__}.{key}", one)

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
            self._look(
                -1, ("root", value.__self__), "self" if name == "self" else name, value.__self__
            )
            self._callable(value.__func__, name)
        elif isinstance(value, staticmethod | classmethod):
            self._callable(value.__func__, name)
        elif isinstance(value, property):
            for one in (value.fget, value.fset):
                if one is not None:
                    self._callable(one, name)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, _core.Dispatcher):
            self._callable(value.__wrapped__, name)  # type: ignore[attr-defined]
        elif isinstance(value, types.ModuleType) and id(value) not in self._seen:
            self._seen[id(value)] = value
            root = self._root(value, name)
            for key, one in [*vars(value).items()]:
                if key in self._names:
                    self._look(root, ("attr", key), f"{name}.{key}", one)
        elif isinstance(value, type):
            self._class(value)
        elif name == "self" and not has_no_parts(value):
            self._look(-1, ("root", value), name, value)

    def _function(self, function: types.FunctionType) -> None:
        if id(function) in self._seen or id(function.__code__) not in self._ran:
            return
        self._seen[id(function)] = function
        code = function.__code__
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if id(cell) in self._seen:
                continue
            self._seen[id(cell)] = cell
            root = self._root(cell, variable)
            try:
                self._look(root, ("cell",), variable, cell.cell_contents)
            except ValueError:  # nothing was assigned yet
                self._add(root, ("cell",), ("missing",), variable, NOTHING)
        names = reversed(code.co_varnames[: code.co_argcount])
        defaults = [*zip(names, reversed(function.__defaults__ or ()), strict=False)]
        for variable, one in (*defaults, *(function.__kwdefaults__ or {}).items()):
            if not is_plain(one):
                self._look(-1, ("root", one), variable, one)
        attributes = vars(function)
        if (wrapped := attributes.get("__wrapped__")) is not None:
            self._callable(wrapped, function.__name__)
        for key in self._names.intersection(attributes):
            root = self._root(function, function.__name__)
            self._look(root, ("attr", key), f"{function.__name__}.{key}", attributes[key])


def found_at(holder: Any, step: tuple[Any, ...]) -> Any:
    """Return the value at a place now, without running user code; ``NOTHING`` if none is there."""
    kind, *rest = step
    if kind == "root":
        return rest[0]
    if kind == "attr":
        return attributes_of(holder).get(rest[0], NOTHING)
    if kind == "slot":
        return _in_slot(rest[0], holder)
    if kind == "cell":
        try:
            return holder.cell_contents
        except ValueError:
            return NOTHING
    if kind == "grad":
        return holder.grad
    if kind == "class":
        of = holder if isinstance(holder, type) else type(holder)
        return next((vars(b)[rest[0]] for b in of.__mro__ if rest[0] in vars(b)), NOTHING)
    if kind == "item" and isinstance(holder, dict):
        return dict.get(holder, rest[0], NOTHING)
    if kind == "item":
        items = [*_iterated(holder)]
        return items[rest[0]] if rest[0] < len(items) else NOTHING
    return NOTHING


def _has_parts(value: Any) -> bool:
    if isinstance(value, _torch.TensorWeakRef | weakref.ref):
        return False
    return hasattr(type(value), "__dictoffset__") and (
        type(value).__dictoffset__ != 0 or bool(_slots_of(type(value)))
    )


_slots: weakref.WeakKeyDictionary[type, tuple[Any, ...]] = weakref.WeakKeyDictionary()


def _slots_of(kind: type) -> tuple[Any, ...]:
    """Return the descriptors of the slots of the user's classes."""
    known = _slots.get(kind)
    if known is None:
        known = _slots[kind] = tuple(
            one
            for base in kind.__mro__
            if not is_library_class(base)
            for one in vars(base).values()
            if isinstance(one, types.MemberDescriptorType)
        )
    return known


# Descriptors of a class's objects, which do not change.
_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType)


def _in_slot(slot: Any, value: Any) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:
        return NOTHING


def _iterated(value: Any) -> Iterator[Any]:
    base = next(one for one in (list, tuple, deque) if isinstance(value, one))
    return base.__iter__(value)
