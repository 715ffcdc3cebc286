"""The backend ``cgraph`` of ``torch.compile``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cgraph import _driver, _torch
from cgraph._trees.cudagraphify import Cudagraphified, mode_name
from cgraph._trees.trees import note_skip, reset_all, tree_of

__all__ = ["cgraph_backend"]


class Manager:
    """The manager of the graphs of one function that is compiled.

    Args:
        name: The name of the function.
        realigns: The compiled code takes inputs for aligned that are not.
    """

    def __init__(self, name: str, *, realigns: bool) -> None:
        self._name = name
        self._realigns = realigns
        self.parts = 0

    def cudagraphify(
        self,
        model: Callable[[list[Any]], Any],
        *,
        device_index: int,
        is_backward: bool,
        is_inference: bool,
        static_input_idxs: Sequence[int] = (),
        mutated_input_idxs: Sequence[int] = (),
        **_: Any,
    ) -> Cudagraphified:
        """Return a function of the device's tree."""
        mode = mode_name(is_backward, is_inference)
        number, self.parts = self.parts, self.parts + 1
        name = f"{self._name}, {mode}" + (f", part {number}" if number else "")
        if self._realigns:
            model = _torch.realigned(model, mutated_input_idxs)
        return Cudagraphified(
            model,
            device_index,
            name=name,
            mode=mode,
            statics=static_input_idxs,
            mutated=mutated_input_idxs,
            may_be_on_host=True,
        )

    def skip(self, reason: str) -> None:
        """Note that a graph, or a part of one, is not captured."""
        note_skip(self._name, reason)

    def set_running_backward(self, device_index: int) -> None:
        """Note that a backward pass runs that is not captured."""
        tree_of(device_index).set_running_backward()


class _Backend:
    """A compiler for ``torch.compile``: Inductor's code in graph trees.

    On the simulator an interpreter runs the operators of the graph that Inductor would compile.
    """

    compiler_name = "cgraph"

    def __call__(
        self, graph_module: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any
    ) -> Callable[..., Any]:
        """Compile a graph of Dynamo's."""
        driver = _driver.current()
        _follow_resets()
        name = _name_of(graph_module)
        if driver.device_type == "cpu":
            manager = Manager(name, realigns=False)
            return _torch.compile_interpreted(graph_module, inputs, manager)
        manager = Manager(name, realigns=True)
        return _torch.compile_with_inductor(graph_module, inputs, manager)

    def reset(self) -> None:
        """Drop all graphs, in the first ``torch.compiler.reset()`` after a compilation."""
        reset_all()


cgraph_backend = _Backend()


@functools.cache
def _follow_resets() -> None:
    """Drop all graphs in ``torch.compiler.reset()``."""
    _torch.call_at_reset(reset_all)


def _name_of(graph_module: torch.fx.GraphModule) -> str:
    """Return where the code of a graph begins, as the user knows it."""
    return _torch.first_line_of(graph_module) or "a compiled function"
