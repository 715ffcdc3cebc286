"""Functions of compilers that become functions of graph trees."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from threading import get_ident
from typing import Any

import torch

from cgraph import _driver, _torch
from cgraph._reason import Reason
from cgraph._text import plural
from cgraph._trees.function import Description, Function, Model
from cgraph._trees.skips import note_skip, skip
from cgraph._trees.trees import Owner, owner, tree_of
from cgraph.causes import Cause
from cgraph.errors import ArgumentError, CgraphWarning

__all__ = ["Cudagraphified", "mode_name"]

_Called = Callable[[list[Any]], Any]


class Cudagraphified:
    """A function that a tree captures, once for each combination of its inputs that are integers.

    Args:
        model: The function: it takes a list of inputs and empties it.
        device_index: The number of the device.
        description: What the compiler says of it.
        may_be_on_host: Calls may have inputs on the host, and are not captured then.
    """

    def __init__(
        self,
        model: Model,
        device_index: int,
        description: Description,
        *,
        may_be_on_host: bool = False,
    ) -> None:
        # torch hands over the inputs as a list. It copies the attributes of the object only.
        self._boxed_call = True
        self._model = model
        self._device_index = device_index
        self._description = description
        self._may_be_on_host = may_be_on_host
        # The places of integers, from the first call on.
        self._integers: list[int] | None = None
        self._count = 0
        # By the owner of the tree, and by the driver and the integers.
        self._functions: dict[Owner, dict[tuple[Any, ...], _Called]] = {}
        # The only one of an owner, without integers.
        self._only: tuple[Owner, _Called] | None = None

    def __call__(self, inputs: list[Any]) -> Any:
        """Run the function, which empties the list; return its results as a list."""
        if (only := self._only) is not None and only[0].thread == get_ident():
            return only[1](inputs)
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
        sizes = tuple(inputs[place] for place in self._integers)
        # True is 1 to a dictionary.
        flags = tuple(place for place, one in enumerate(sizes) if one is True or one is False)
        key = _driver.number(), flags, *sizes
        found = functions.get(key)
        if found is None:
            found = functions[key] = self._of_sizes(sizes, inputs, functions.values())
            # A thread of autograd's serves more than one owner.
            is_one = not self._integers and self._only is None
            if is_one and user.thread == get_ident() and not _driver.number():
                self._only = user, found
        return found(inputs)

    def function_for(self, inputs: Sequence[Any]) -> _Called:
        """Return the function of the tree for inputs like these; as it was written if it has none.

        Raises:
            ArgumentError: There is a tensor on another device.
            CaptureError: It cannot be captured, and the options say ``strict``.
        """
        tree = tree_of(self._device_index)
        self._require_places(len(inputs))
        said = self._description
        written = sorted(set(said.mutated).difference(said.statics))
        if written and not said.options.input_mutation:
            reason = f"mutated inputs ({len(written)} instances): {said.input(written[0])}"
            fix = "let the option input_mutation be True"
            return self._refused(Reason(Cause.MUTATED_INPUT, reason, special_fix=fix))
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
                text = f"non-Tensor inputs: input {place} is a {kind}"
                return self._refused(Reason(Cause.INPUT_KIND, text))
        return Function(tree, self._model, len(inputs), said, elsewhere=elsewhere)

    def _of_sizes(
        self, sizes: tuple[int, ...], inputs: Sequence[Any], known: Iterable[_Called]
    ) -> _Called:
        """Return the function for inputs with sizes that are new."""
        count = sum(isinstance(one, Function) for one in known)
        said, asked = self._description, None
        options = said.options
        if sizes and options.skip_dynamic_graphs:
            asked = "inputs that are sizes, as skip_dynamic_graphs says"
        elif sizes and options.capture_sizes is not None and sizes not in options.capture_sizes:
            asked = "sizes that are not among capture_sizes"
        if asked is not None:
            note_skip(said.name, asked)
            return self._uncaptured
        if sizes and options.max_sizes is not None and count >= options.max_sizes:
            reason = f"more than {plural(options.max_sizes, 'size')}, as max_sizes says"
            return self._refused(Reason(Cause.MANY_SIZES, reason))
        most = _torch.configured_of_inductor("triton.cudagraph_dynamic_shape_warn_limit")
        if sizes and most and count == most:
            text = _MANY.format(name=said.name, count=count + 1)
            Reason(Cause.MANY_SIZES, text, None, _FEWER).warn(kind=CgraphWarning)
        return self.function_for(inputs)

    def _refused(self, reason: Reason) -> _Called:
        note_skip(self._description.name, reason.text)
        skip(self._description.name, reason, self._description.options)
        return self._uncaptured

    def _uncaptured(self, inputs: list[Any]) -> Any:
        """Run the function as it was written."""
        if self._description.mode == "backward":
            tree_of(self._device_index).set_running_backward(self._description.pair)
        return self._model(inputs)

    def _require_places(self, count: int) -> None:
        said = self._description
        for name, places in (("statics", said.statics), ("mutated", said.mutated)):
            wrong = [one for one in places if not 0 <= one < count]
            if wrong:
                raise ArgumentError(
                    f"{name} of {said.name} are the places {wrong}, expected places of its"
                    f" {count} inputs"
                )


_MANY = (
    "CUDAGraph supports dynamic shapes by recording a new graph for each distinct input size, and"
    " {name} has {count} of them"
)
_FEWER = (
    "pad inputs to a few sizes, or set the options capture_sizes, max_sizes or skip_dynamic_graphs"
    " (torch._inductor.config.triton.cudagraph_dynamic_shape_warn_limit=None silences this)"
)


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
    if device.type == "meta":
        # It has no contents, only a shape.
        return
    if device.type != device_type or (device.type == "cuda" and device.index != index):
        wanted = f"cuda:{index}" if device_type == "cuda" else device_type
        raise ArgumentError(
            f"input {place} is on {device}, expected {wanted}, where the function is captured"
        )


def _is_integer(value: Any) -> bool:
    return isinstance(value, int)
