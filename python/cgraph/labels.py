"""Labels: the origin of each node of a captured graph, noted during the capture.

A capture with ``enable_annotations=True`` gives each node a :class:`Label`. It needs no profiler,
works with every driver, and costs nothing where it is off.

>>> import torch, cgraph
>>> with cgraph.sim.use():
...     x, graph = torch.ones(4), cgraph.CUDAGraph(keep_graph=True)
...     with cgraph.graph(graph, enable_annotations=True), cgraph.annotate("scale"):
...         y = x * 2
...     graph.instantiate()
...     for node in graph.get_graph_data()["nodes"]:
...         print(node["label"]["labels"], node["label"]["operator"])
['scale'] aten.mul.Tensor
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ContextDecorator
from typing import Any, NamedTuple

from cgraph._given import require_type
from cgraph.errors import ArgumentError

__all__ = ["Config", "Label", "annotate", "as_dict", "parse_config"]


class Label(NamedTuple):
    """The origin of a node.

    Attributes:
        stack: The names of the :class:`annotate` scopes around it, the outermost first.
        module: The path of the ``nn.Module`` that ran, from the class of the outermost one on, as
            in ``Model.layers.0.attn``; None outside all of them.
        operator: The operator that recorded it, as in ``aten.add.Tensor``; None for work that no
            torch operator enqueued.
        source: The innermost line of the user's Python, as ``file:line``.
        frames: All lines of the user's Python, the innermost last, as ``file:line function``; only
            with ``record_py_stacks``.

    The work of a backward pass has the module and the lines of its forward operator, and its stack
    is the one around ``backward()``, followed by the additional scopes of the forward operator. If
    the forward operator is not known, as for the accumulation of gradients, for a forward pass
    outside this capture, or if threads have made autograd nodes of the same number, the label is
    the one around ``backward()``.
    """

    stack: tuple[str, ...]
    module: str | None
    operator: str | None
    source: str | None
    frames: tuple[str, ...] = ()


def as_dict(label: Label) -> dict[str, Any]:
    """Return a label as plain values.

    These are ``labels``, ``module``, ``operator``, ``source``, and ``frames`` if they were
    recorded.
    """
    require_type("label", label, Label, "a label, as CUDAGraph.labels() has")
    values: dict[str, Any] = {
        "labels": list(label.stack),
        "module": label.module,
        "operator": label.operator,
        "source": label.source,
    }
    if label.frames:
        values["frames"] = list(label.frames)
    return values


class annotate(ContextDecorator):
    """Name the work that is captured inside a ``with`` block or a decorated function.

    Scopes nest; each thread has its own. Outside captures with ``enable_annotations=True`` they do
    almost nothing. A decorated generator or coroutine is named while it is called, not while it
    runs.

    Args:
        name: The name.

    Raises:
        ArgumentError: The name is not a string.
    """

    def __init__(self, name: str) -> None:
        if not isinstance(name, str):
            raise ArgumentError(f"name is {name!r}, expected a string")
        self.name = name

    def __enter__(self) -> None:
        """Push the name."""
        _look()
        scopes().append(self.name)

    def __exit__(self, *_error: object) -> None:
        """Pop the name."""
        try:
            _look()
        finally:
            scopes().pop()


class Config(NamedTuple):
    """Options of recording labels; see :class:`cgraph.graph`.

    Attributes:
        record_py_stacks: Record all lines of the user's Python, not only the innermost.
        py_stack_filter_paths: Directories whose lines are left out instead of torch's and cgraph's.
    """

    record_py_stacks: bool = False
    py_stack_filter_paths: tuple[str, ...] | None = None


_DEFAULT = Config()
_CHOICES: dict[str, tuple[object, ...]] = {
    "backend": ("auto", "cupti", "edge_walk"),
    "key_by": ("exec", "source", "auto"),
    "record_py_stacks": (False, True),
}
_KEYS = [*_CHOICES, "py_stack_filter_paths"]


def parse_config(config: object) -> Config:
    """Check an ``annotation_config``.

    Raises:
        ArgumentError: A key or a value is unknown.
    """
    if config is None:
        return _DEFAULT
    if not isinstance(config, dict):
        raise ArgumentError(f"annotation_config is {config!r}, expected None or a dict")
    for key, value in config.items():
        if key not in _KEYS:
            raise ArgumentError(f"annotation_config has the key {key!r}, expected only {_KEYS}")
        if key in _CHOICES and value not in _CHOICES[key]:
            raise ArgumentError(
                f"annotation_config[{key!r}] is {value!r}, expected one of {list(_CHOICES[key])}"
            )
    paths = config.get("py_stack_filter_paths")
    if paths is not None:
        is_list = isinstance(paths, (list, tuple))
        if not is_list or not all(isinstance(path, str) and path for path in paths):
            raise ArgumentError(
                f"annotation_config['py_stack_filter_paths'] is {paths!r}, expected None or a list"
                " of paths that are not empty"
            )
        paths = tuple(paths)
    return Config(bool(config.get("record_py_stacks", False)), paths)


class _Scopes(threading.local):
    def __init__(self) -> None:
        self.names: list[str] = []


_scopes = _Scopes()
_looks: list[Callable[[], None]] = []


def scopes() -> list[str]:
    """Return the list of this thread's open scopes, the outermost first; not a copy."""
    return _scopes.names


def watch(look: Callable[[], None]) -> Callable[[], None]:
    """Call ``look`` whenever a scope begins or ends; return a function that ends that."""
    _looks.append(look)
    return lambda: _looks.remove(look)


def _look() -> None:
    for look in tuple(_looks):
        look()
