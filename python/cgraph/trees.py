"""Graph trees: captured functions that share memory, as they are called one after another.

Within one step, calls may use outputs of those before them. Each call is captured once for each way
in which a step can come to it, and the memory of what nobody holds any more is used again. What is
held when its step ends gets memory of its own.

``torch.compile(backend="cgraph")`` uses them; :func:`cudagraphify` is for other compilers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cgraph._given import require_type
from cgraph._trees.cudagraphify import Cudagraphified, mode_name
from cgraph._trees.function import Description
from cgraph._trees.options import TreeOptions
from cgraph._trees.report import (
    TreeFunctionReport,
    TreeNodeReport,
    TreeReport,
    TreesReport,
    report,
)
from cgraph._trees.steps import mark_step
from cgraph._trees.trees import reset_all

__all__ = [
    "TreeFunctionReport",
    "TreeNodeReport",
    "TreeReport",
    "TreesReport",
    "cudagraphify",
    "mark_step_begin",
    "report",
    "reset",
]


def cudagraphify(
    model: Callable[[list[Any]], Sequence[Any]],
    inputs: Sequence[Any],
    static_input_idxs: Sequence[int] = (),
    *,
    device_index: int = 0,
    is_backward: bool = False,
    is_inference: bool = False,
    stack_traces: Sequence[str | None] | None = None,
    constants: Sequence[Any] = (),
    placeholders: Sequence[Any] = (),
    mutated_input_idxs: Sequence[int] = (),
    compile_id: Any = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[[list[Any]], list[Any]]:
    """Return a function that replays captures of ``model``; the signature is torch's.

    It takes a list of tensors, integers and generators, which it empties, and returns a list. All
    calls have tensors of the same shapes and strides. The first call runs ``model``, a later one
    captures it, without recording gradients, and then calls are replays.

    Call :func:`mark_step_begin` before each step: without it, all calls belong to one step, outputs
    that are held keep their memory, and a function that has been called 256 times behind them runs
    uncaptured.

    Args:
        model: The function; it takes a list and empties it.
        inputs: Inputs as those of the calls; for their number, and which of them are integers.
        static_input_idxs: The places of inputs that stay at one address. They are not copied; if
            one has moved, the function is captured again.
        device_index: The number of the device.
        is_backward: It is a backward pass.
        is_inference: No backward pass follows it.
        stack_traces: For torch's signature.
        constants: For torch's signature.
        placeholders: What Inductor knows of the inputs: names, and lines that use them.
        mutated_input_idxs: The places of inputs that it writes. Where these are neither static nor
            outputs of the same step, calls run uncaptured.
        compile_id: For torch's signature.
        options: The options, as of ``torch.compile(backend="cgraph", options=...)``.

    Raises:
        ArgumentError: An input is on another device, both modes are given, a place is none of an
            input, or an option is not what was expected.

    >>> import torch, cgraph
    >>> with cgraph.sim.use():
    ...     double = cgraph.trees.cudagraphify(
    ...         lambda args: [args.pop() * 2], [torch.ones(2)], is_inference=True
    ...     )
    ...     for step in range(4):
    ...         cgraph.trees.mark_step_begin()
    ...         [y] = double([torch.full((2,), float(step))])
    ...     print(y)
    tensor([6., 6.])
    """
    require_type("model", model, Callable, "a function that takes a list")
    require_type("inputs", inputs, Sequence, "the inputs of a call")
    mode = mode_name(is_backward, is_inference)
    name = getattr(model, "__qualname__", type(model).__qualname__)
    settings = TreeOptions.of(options)
    description = Description(
        name, mode, static_input_idxs, mutated_input_idxs, settings, placeholders
    )
    made = Cudagraphified(model, device_index, description)
    if any(isinstance(one, int) for one in inputs):
        return made
    return made.function_for(inputs)


def mark_step_begin() -> None:
    """Begin a step: outputs of calls before it may be overwritten from here on.

    From the first mark on, steps begin only where they are marked, here or by
    ``torch.compiler.cudagraph_mark_step_begin()``.
    """
    mark_step()


def reset() -> None:
    """Drop all captured graphs of trees of the driver in force.

    Outputs of the last step that somebody holds get memory of their own. Functions stay and are
    captured again. Steps count by themselves again, until the next mark.
    ``torch.compiler.reset()`` does the same once a backend of cgraph's has compiled something.
    """
    reset_all()
