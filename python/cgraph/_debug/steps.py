"""A captured function in steps of one operator each, to find the one that fails or differs.

After each operator the capture is divided as by a break, so that a replay can stop there, wait for
the device and check what the operator has computed. All intermediate results stay alive for that.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from cgraph import _driver, _torch, breaks
from cgraph._debug.operators import SeenOperator, Watch
from cgraph._graphed.recorded import Recorded
from cgraph._text import short_place
from cgraph.breaks import Breakable
from cgraph.cudagraph import CUDAGraph
from cgraph.errors import add_note
from cgraph.hooks import register_graph_capture_end_hook
from cgraph.labels import Label

__all__ = ["Check", "FoundError", "Steps", "ValueTrace", "Wrong"]

_OTHER_WAY = "Python goes another way"


class Wrong(NamedTuple):
    """The difference between a tensor and the right one.

    Attributes:
        text: The difference as text.
        is_nan: True if the tensor is NaN where the right one is not.
    """

    text: str
    is_nan: bool


Check = Callable[[torch.Tensor, torch.Tensor], Wrong | None]
"""Compares a tensor with the right one; returns the difference, or None."""


class FoundError(Exception):
    """The error that stops a replay at the first operator that differs.

    Attributes:
        place: The number of the operator, from 0 on.
        text: The difference as text.
        is_nan: True if an element is NaN that should not be.
    """

    def __init__(self, place: int, text: str, is_nan: bool = False) -> None:
        super().__init__(text)
        self.place = place
        self.text = text
        self.is_nan = is_nan


class Steps:
    """A function that divides its capture after each operator.

    Args:
        function: The function to capture. Outside of a capture it is just called.
        name: Its name in errors.
        keep: Keep the results of operators, to be compared.

    Attributes:
        operators: The operators of the capture, in order.
        recorded: The capture; None before there is one.
    """

    def __init__(self, function: Callable[..., Any], name: str, keep: bool) -> None:
        self.operators: list[SeenOperator] = []
        self.recorded: Recorded | None = None
        self._function = function
        self._name = name
        self._keep = keep
        self._unwritten: list[torch.Tensor] = []
        self._driver = _driver.current()
        self._nodes = self._done = 0
        self._look: Callable[[int], None] | None = None
        # The last error of a break of the user.
        self._own: Exception | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function; divide the capture under way, if there is one."""
        capture = breaks.innermost()
        if capture is None:
            return self._function(*args, **kwargs)
        self.operators, self._unwritten = [], []
        self._nodes = self._done = 0
        cutter = _Cutter(self, capture)
        with cutter.watching():
            return self._function(*args, **kwargs)

    def run(
        self,
        tensors: tuple[torch.Tensor, ...],
        look: Callable[[int], None] | None = None,
        poison: bool = False,
    ) -> None:
        """Replay, and wait for the device after each operator.

        Args:
            tensors: The tensors to copy to the static tensors.
            look: Called after each operator with its number.
            poison: Fill memory that no operator writes with NaN first.

        An exception gets a note that names the operator.
        """
        assert self.recorded is not None
        if poison:
            for tensor in self._unwritten:
                _fill_with_nan(tensor)
        self._done, self._look = 0, look
        try:
            self.recorded.graph._replay_with(tensors)
            self._driver.synchronize()
        except FoundError:
            raise
        except Exception as error:
            operators = self.operators[self._done :]
            self._blame(error, operators[0] if operators else None)
            raise
        finally:
            self._look = self._own = None

    def reset(self) -> None:
        """Drop the capture."""
        self.operators, self._unwritten = [], []
        if self.recorded is not None:
            self.recorded.reset()

    def cut(self, capture: Breakable, operator: SeenOperator) -> None:
        """Divide the capture after an operator."""
        place = len(self.operators)
        nodes = _Nodes(threading.get_ident())
        handle = register_graph_capture_end_hook(nodes)
        self.operators.append(operator)
        with torch.no_grad(), _torch.without_modes():
            results = operator.results if self._keep else []
            operator.results = [one.detach() for one in results]
        try:
            behind = partial(self._behind, place)
            capture.run(breaks.Work(behind, f"operator {place}", is_pause=True), (), {})
        except Exception as error:
            self._blame(error, operator)
            raise
        finally:
            handle.remove()
        operator.kernels, operator.node = tuple(nodes.kernels), self._nodes
        self._nodes += nodes.count

    def call_break(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a break of the user, whose errors are not those of an operator."""
        try:
            return fn(*args, **kwargs)
        except Exception as error:
            self._own = error
            raise

    def note_unwritten(self, tensor: torch.Tensor) -> None:
        """Note memory that no operator has written."""
        if self._keep:
            self._unwritten.append(tensor)

    def _behind(self, place: int) -> None:
        self._driver.synchronize()
        self._done = place + 1
        if self._look is not None:
            self._look(place)

    def _blame(self, error: Exception, operator: SeenOperator | None) -> None:
        """Name the operator under way in the error; None after the last one."""
        if error is self._own:
            return
        count = len(self.operators)
        before = "no operator" if self._done == 0 else f"{self._done} of its operators"
        what = "work after the last operator, such as a backward pass"
        if operator is not None:
            what = f"operator {self._done} of {self._name}, {operator}"
            what += ", or the backward pass before it" if operator.is_behind_backward else ""
        add_note(
            error,
            f"cgraph: {what}, has failed; {before} ran well before it, of {count} known ones",
        )


class _Cutter(Watch):
    """A watch that divides a capture after each operator."""

    def __init__(self, steps: Steps, capture: Breakable) -> None:
        super().__init__()
        self._steps = steps
        self._capture = capture

    def call_break(self, work: breaks.Work, args: Any, kwargs: Any) -> Any:
        """Let a break of the user divide the capture, too."""
        called = partial(self._steps.call_break, work.fn)
        return self._capture.run(replace(work, fn=called), args, kwargs)

    def seen(self, operator: SeenOperator) -> None:
        """Divide the capture here."""
        self._steps.cut(self._capture, operator)

    def unwritten(self, tensor: torch.Tensor) -> None:
        """Note memory to be poisoned."""
        self._steps.note_unwritten(tensor)


class ValueTrace(Watch):
    """The values that the operators of an eager run have computed.

    Attributes:
        operators: The operators, with copies of their results.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[SeenOperator] = []
        self._next = 0

    def seen(self, operator: SeenOperator) -> None:
        """Copy the results."""
        with torch.no_grad(), _torch.without_modes():
            operator.results = [one.detach().clone() for one in operator.results]
        self.operators.append(operator)

    def compare(self, steps: Steps, check: Check, place: int) -> None:
        """Raise if an operator of a replay is another one or has computed other values.

        Operators that only eager runs are skipped: a library may do set-up in eager that it does
        not do in a capture.
        """
        mine = steps.operators[place]
        there = self._place_of(mine.label)
        if there is None:
            raise FoundError(place, f"{self._passed(self._next)} in its place: {_OTHER_WAY}")
        also = ""
        if there > self._next:
            also = f"; {self._passed(self._next)} before, which the graph does not"
        self._next = there + 1
        for one, other in zip(mine.numbers, self.operators[there].numbers, strict=False):
            if one != other:
                also += f"; it was captured with {_value(one)}, but eager has {_value(other)}"
        for result, expected in zip(mine.results, self.operators[there].results, strict=True):
            wrong = check(result, expected)
            if wrong is not None:
                raise FoundError(place, wrong.text + also, wrong.is_nan)

    def finish(self, steps: Steps) -> None:
        """Raise if eager goes on after the last operator of a replay."""
        if self._next < len(self.operators) and steps.operators:
            text = f"{self._passed(self._next)} behind it, which the graph does not: {_OTHER_WAY}"
            raise FoundError(len(steps.operators) - 1, text)

    def _place_of(self, label: Label) -> int | None:
        """Find where eager runs the same operator next: at once, or later on the same line."""
        for place, operator in enumerate(self.operators[self._next :], self._next):
            eager = operator.label
            if (eager.operator, eager.module) != (label.operator, label.module):
                continue
            # Inside torch's modules the user's line is the line of the call, which may differ.
            if place == self._next or label.module is not None or eager.source == label.source:
                return place
        return None

    def _passed(self, place: int) -> str:
        """Name the operator that eager runs."""
        if place >= len(self.operators):
            return "eager runs nothing more"
        label = self.operators[place].label
        at = "" if label.source is None else f" at {short_place(label.source)}"
        return f"eager runs {label.operator}{at}"


@dataclass
class _Nodes:
    """A capture-end hook that counts the nodes that one thread captures."""

    thread: int
    kernels: list[str] = field(default_factory=list)
    count: int = 0

    def __call__(self, graph: CUDAGraph) -> None:
        """Note the nodes of a segment."""
        if threading.get_ident() != self.thread:
            return
        nodes = json.loads(graph._template.json())["nodes"]
        self.count += len(nodes)
        self.kernels += [node["name"] for node in nodes if node.get("name")]


def _fill_with_nan(tensor: torch.Tensor) -> None:
    """Set all bits of a tensor's memory, which makes NaN of every floating-point type."""
    with torch.no_grad(), _torch.without_modes():
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        whole.set_(tensor.untyped_storage()).fill_(0xFF)


def _value(number: Any) -> Any:
    return number[1] if isinstance(number, tuple) and len(number) == 2 else number
