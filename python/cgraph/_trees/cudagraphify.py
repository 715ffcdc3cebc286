"""Functions of compilers that become functions of graph trees."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any

import torch

from cgraph import _driver
from cgraph._trees.function import Function, Model
from cgraph._trees.trees import Owner, note_skip, owner, tree_of
from cgraph.errors import ArgumentError

__all__ = ["Cudagraphified", "mode_name"]


class Cudagraphified:
    """A function that a tree captures, once for each combination of its inputs that are integers.

    Args:
        model: The function: it takes a list of inputs and empties it.
        device_index: The number of the device.
        name: Its name, for people.
        mode: ``"inference"``, ``"forward"`` or ``"backward"``.
        statics: The places of inputs that stay where they are.
        mutated: The places of inputs that it writes.
        may_be_on_host: Calls may have inputs on the host, and are not captured then.
    """

    def __init__(
        self,
        model: Model,
        device_index: int,
        *,
        name: str,
        mode: str,
        statics: Sequence[int],
        mutated: Sequence[int],
        may_be_on_host: bool = False,
    ) -> None:
        # torch hands over the inputs as a list. It copies the attributes of the object only.
        self._boxed_call = True
        self._model = model
        self._device_index = device_index
        self._may_be_on_host = may_be_on_host
        self._options: dict[str, Any] = {
            "name": name,
            "mode": mode,
            "statics": statics,
            "mutated": mutated,
        }
        # The places of integers, from the first call on.
        self._integers: list[int] | None = None
        self._count = 0
        # By the owner of the tree, and by the driver and the integers.
        self._functions: weakref.WeakKeyDictionary[
            Owner, dict[tuple[int, ...], Callable[[list[Any]], Any]]
        ] = weakref.WeakKeyDictionary()
        # The only one of a thread, without integers.
        self._only: Callable[[list[Any]], Any] | None = None
        self._thread = 0

    def __call__(self, inputs: list[Any]) -> Any:
        """Run the function, which empties the list; return its results as a list."""
        if self._only is not None and get_ident() == self._thread:
            return self._only(inputs)
        if self._integers is None:
            _require_list(inputs)
            self._count = len(inputs)
            self._integers = [place for place, one in enumerate(inputs) if _is_integer(one)]
        user = owner()
        functions = self._functions.setdefault(user, {})
        if len(inputs) < self._count:
            raise ArgumentError(
                f"the number of inputs is {len(inputs)}, expected {self._count}, as in the first"
                " call"
            )
        key = _driver.number(), *(inputs[place] for place in self._integers)
        found = functions.get(key)
        if found is None:
            found = functions[key] = self.function_for(inputs)
            # A thread of autograd's serves more than one owner.
            is_one = not self._integers and self._only is None
            if is_one and user.thread == get_ident() and not _driver.number():
                self._only, self._thread = found, user.thread
        return found(inputs)

    def function_for(self, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        """Return the function of the tree for inputs like these; as it was written if it has none.

        Raises:
            ArgumentError: There is a tensor on another device.
        """
        tree = tree_of(self._device_index)
        count = len(inputs)
        for name in ("statics", "mutated"):
            wrong = [one for one in self._options[name] if not 0 <= one < count]
            if wrong:
                raise ArgumentError(
                    f"{name} of {self._options['name']} are the places {wrong}, expected places"
                    f" of its {count} inputs"
                )
        elsewhere = []
        for place, one in enumerate(inputs):
            if isinstance(one, torch.Tensor):
                if one.is_cpu and tree.device_type != "cpu" and self._may_be_on_host:
                    # As torch's attention returns its random state outside of captures.
                    elsewhere.append(place)
                else:
                    _require_device(tree.device_type, self._device_index, place, one)
            elif not (one is None or isinstance(one, (int, torch.Generator))):
                kind = type(one).__name__
                note_skip(self._options["name"], f"input {place} is a {kind}, which may change")
                return self._model
        function = Function(tree, self._model, len(inputs), elsewhere=elsewhere, **self._options)
        tree.functions.add(function)
        return function


def mode_name(is_backward: bool, is_inference: bool) -> str:
    """Return the name of the mode of a function.

    Raises:
        ArgumentError: It is both.
    """
    if is_backward and is_inference:
        raise ArgumentError("is_backward and is_inference are both True, expected one of them")
    if is_backward:
        return "backward"
    return "inference" if is_inference else "forward"


def _require_list(inputs: Any) -> None:
    if type(inputs) is not list:
        raise ArgumentError(
            f"inputs are a {type(inputs).__qualname__}, expected a list, which the call empties"
        )


def _require_device(device_type: str, index: int, place: int, tensor: torch.Tensor) -> None:
    device = tensor.device
    if device.type != device_type or (device.type == "cuda" and device.index != index):
        wanted = f"cuda:{index}" if device_type == "cuda" else device_type
        raise ArgumentError(
            f"input {place} is on {device}, expected {wanted}, where the function is captured"
        )


def _is_integer(value: Any) -> bool:
    return isinstance(value, int)
