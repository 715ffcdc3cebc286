"""The backend ``cgraph`` of ``torch.compile``."""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from cgraph import _driver, _torch
from cgraph._reason import Reason
from cgraph._trees.cudagraphify import Cudagraphified, mode_name
from cgraph._trees.function import Description
from cgraph._trees.options import TreeOptions, unknown
from cgraph._trees.skips import note_skip, skip, skip_without_gpu
from cgraph._trees.trees import reset_all, tree_of
from cgraph.causes import Cause
from cgraph.errors import ArgumentError

__all__ = ["cgraph_backend", "follow_resets", "name_of", "take_graphs_of_torch"]


class Manager:
    """The manager of the graphs of one function that is compiled.

    Args:
        name: The name of the function.
        options: Its options.
        realigns: The compiled code takes inputs for aligned that are not.
        names: What users call its inputs.
        operators: Its operators that are not torch's.
        pair: The number of its forward pass and its backward pass; None where that is not known.
    """

    def __init__(
        self,
        name: str,
        options: TreeOptions,
        *,
        realigns: bool,
        names: Sequence[str] = (),
        operators: Sequence[str] = (),
        pair: int | None = None,
    ) -> None:
        self._name, self._options = name, options
        self._names, self._operators = names, operators
        self._realigns = realigns
        self._pair = pair
        self._parts: collections.Counter[str] = collections.Counter()

    @property
    def parts(self) -> int:
        """The number of functions that it was given."""
        return self._parts.total()

    def cudagraphify(
        self,
        model: Callable[[list[Any]], Any],
        *,
        device_index: int,
        is_backward: bool,
        is_inference: bool,
        static_input_idxs: Sequence[int] = (),
        mutated_input_idxs: Sequence[int] = (),
        placeholders: Sequence[Any] = (),
        **_: Any,
    ) -> Cudagraphified:
        """Return a function of the device's tree."""
        mode = mode_name(is_backward, is_inference)
        part = self._parts[mode]
        self._parts[mode] += 1
        name = f"{self._name}, {mode}" + (f", part {part}" if part else "")
        if self._realigns:
            model = _torch.realigned(model, mutated_input_idxs)
        description = Description(
            name,
            mode,
            static_input_idxs,
            mutated_input_idxs,
            self._options,
            placeholders,
            self._pair,
            part,
            self._names,
            self._operators,
        )
        return Cudagraphified(model, device_index, description, may_be_on_host=True)

    def skip(self, reason: str, *, is_counted: bool = False) -> None:
        """Tell that a graph is not captured.

        Raises:
            CaptureError: The options say ``strict``.
        """
        note_skip(self._name, reason)
        if self._options.strict or not self._options.skip_dynamic_graphs:
            why = Reason(Cause.UNCAPTURED_OPERATOR, reason)
            skip(self._name, why, self._options, is_counted=is_counted)

    def skip_between(self, reason: str) -> None:
        """Note work between the parts of a graph that is not captured.

        Raises:
            CaptureError: The options say ``strict``.
        """
        note_skip(self._name, reason)
        if self._options.strict:
            skip(self._name, Reason(Cause.UNCAPTURED_OPERATOR, reason), self._options)

    def set_running_backward(self, device_index: int) -> None:
        """Note that a backward pass runs that is not captured."""
        tree_of(device_index).set_running_backward(self._pair)


_pairs = itertools.count()


class _AllGraphs(Manager):
    """The manager of graphs that torch would make; torch tells what is not captured."""

    def __init__(self) -> None:
        super().__init__("a compiled function", TreeOptions(), realigns=True)

    def cudagraphify(
        self,
        model: Callable[[list[Any]], Any],
        *,
        stack_traces: Sequence[str | None] | None = None,
        **kwargs: Any,
    ) -> Cudagraphified:
        """Return a function of the device's tree, named by the line of its first result."""
        name = _torch.line_of_first(stack_traces or ()) or self._name
        return Manager(name, TreeOptions.of(None), realigns=True).cudagraphify(model, **kwargs)

    def skip(self, reason: str, *, is_counted: bool = False) -> None:
        """Do nothing."""

    def skip_between(self, reason: str) -> None:
        """Do nothing."""


def take_graphs_of_torch(*, takes: bool) -> None:
    """Put all graphs in trees that torch's compiler would put into its own; or do so no more.

    Raises:
        TorchError: This torch has no place where its compiler asks for that.
    """
    if takes:
        follow_resets()
    _torch.take_all_graphs(_AllGraphs() if takes else None)


class _Backend:
    """A compiler for ``torch.compile``: Inductor's code in graph trees.

    On the simulator an interpreter runs the operators of the graph that Inductor would compile.
    """

    compiler_name = "cgraph"

    def __call__(
        self,
        graph_module: torch.fx.GraphModule,
        inputs: Sequence[Any],
        *,
        options: Mapping[str, Any] | None = None,
        mode: str | None = None,
    ) -> Callable[..., Any]:
        """Compile a graph of Dynamo's.

        Args:
            graph_module: The graph.
            inputs: Its example inputs.
            options: Options of trees; others are Inductor's.
            mode: The name of a set of Inductor's options, as of ``torch.compile``.

        Raises:
            ArgumentError: An option, its value or the mode is not what was expected.
        """
        given, of_inductor = _checked(options or {}, mode)
        driver = _driver.current()
        follow_resets()
        name = name_of(graph_module)
        is_simulated = driver.device_type == "cpu"
        names = _torch.names_of_inputs(graph_module.graph, inputs)
        manager = Manager(
            name,
            given,
            realigns=not is_simulated,
            names=names,
            operators=_torch.foreign_operators(graph_module.graph),
            pair=next(_pairs),
        )
        if is_simulated:
            return _torch.compile_interpreted(graph_module, inputs, manager)
        skip_without_gpu(name, given)
        return _torch.compile_with_inductor(graph_module, inputs, manager, of_inductor)

    def reset(self) -> None:
        """Drop all graphs, in the first ``torch.compiler.reset()`` after a compilation."""
        reset_all()


cgraph_backend = _Backend()


@functools.cache
def follow_resets() -> None:
    """Drop all graphs in ``torch.compiler.reset()``."""
    _torch.call_at_reset(reset_all)


def _checked(options: Mapping[str, Any], mode: str | None) -> tuple[TreeOptions, dict[str, Any]]:
    """Return the options of trees, and those of Inductor."""
    rest = {} if mode is None else _of_mode(mode)
    rest |= {name.replace("-", "_"): value for name, value in options.items()}
    found = TreeOptions.taken_from(rest)
    if rest:
        known = _torch.inductor_options()
        for name in rest:
            if name not in known:
                raise unknown(name, TreeOptions.names(), known)
    if found.skip_dynamic_graphs:
        rest["triton.cudagraph_skip_dynamic_graphs"] = True
    return found, rest


def _of_mode(mode: str) -> dict[str, Any]:
    try:
        return _torch.inductor_options(mode)
    except RuntimeError as error:
        raise ArgumentError(f"mode is {mode!r:.80}: {error}") from None


def name_of(graph_module: torch.fx.GraphModule) -> str:
    """Return where the code of a graph begins, as the user knows it."""
    return _torch.first_line_of(graph_module) or "a compiled function"
