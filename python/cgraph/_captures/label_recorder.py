"""The origins of the nodes of an open capture.

A dispatch mode sees each operator, and asks the core afterwards which nodes are new. Operators of a
backward pass are seen too, on whichever thread autograd runs them.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable
from contextlib import ExitStack
from itertools import takewhile
from typing import Any, NamedTuple

from torch import nn

from cgraph import _core, _source, _torch, labels
from cgraph.labels import Config, Label

__all__ = ["LabelRecorder", "Modules"]


class _Context(NamedTuple):
    """The context in which an operator runs: a label without the operator."""

    stack: tuple[str, ...]
    module: str | None
    source: str | None
    frames: tuple[str, ...]


class LabelRecorder(_torch.Bystander):
    """A mode that records the labels of one capture.

    Args:
        config: The parts of labels to record.

    Attributes:
        found: The labels so far, by raw node.
        over: True if the capture has ended; a mode that could not be left then does nothing.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.found: dict[int, Label] = {}
        self.over = False
        self._config = config
        self._context = ExitStack()

    def start(self, current: Callable[[], _core.Stream]) -> None:
        """Follow the capture that is open on this thread's current stream.

        Args:
            current: Returns the current stream of the thread that calls it.
        """
        paths = self._config.py_stack_filter_paths
        self._omitted = None if paths is None else _source.directories(paths)
        self._current = current
        self._tracker = _core.Tracker(current())
        self._thread = threading.get_ident()
        self._scopes = labels.scopes()
        self._marks = {self._thread: _Marks(_torch.autograd_sequence())}
        self._modules = Modules(self.look)
        with ExitStack() as context:
            context.callback(self._modules.remove)
            context.callback(labels.watch(self.look))
            context.callback(_torch.leave_mode, self)
            _torch.enter_mode(self)
            self._context = context.pop_all()

    def stop(self) -> None:
        """Stop recording, whatever happens; once is enough."""
        self.over = True
        self._context.close()

    def look(self) -> None:
        """Label the nodes that were recorded since the last operator: they belong to none."""
        if not self.over and (nodes := self._tracker.new_nodes(self._current())):
            label = Label(self._stack(), self._modules.current(), None, None)
            self.found.update(dict.fromkeys(nodes, label))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator and label the nodes that it recorded."""
        kwargs = kwargs or {}
        if self.over:
            return func(*args, **kwargs)
        self.look()
        context = self._in_force()
        sequence = _torch.autograd_sequence()
        self._marks.setdefault(threading.get_ident(), _Marks(sequence)).note(sequence, context)
        result = func(*args, **kwargs)
        if nodes := self._tracker.new_nodes(self._current()):
            label = Label(context.stack, context.module, str(func), context.source, context.frames)
            self.found.update(dict.fromkeys(nodes, label))
        return result

    def _in_force(self) -> _Context:
        stack, module = self._stack(), self._modules.current()
        node = _torch.evaluating_node()
        if node is not None and module is None:  # with a module, it is a forward pass again
            forward = self._forward(node)
            if forward is not None:
                pairs = zip(stack, forward.stack, strict=False)
                common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
                return forward._replace(stack=(*stack, *forward.stack[common:]))
        frames = _source.user_frames(self._omitted) if self._config.record_py_stacks else ()
        return _Context(stack, module, _source.user_line(), frames)

    def _stack(self) -> tuple[str, ...]:
        if threading.get_ident() == self._thread:
            return tuple(self._scopes)
        # A thread of autograd has no scopes of its own: those around backward() are in force.
        return (*self._scopes, *labels.scopes())

    def _forward(self, node: Any) -> _Context | None:
        """Return the context in which an autograd node was made, if that is certain.

        Each thread numbers its own nodes, and a node does not tell which thread made it.
        """
        number = node._sequence_nr()
        candidates = [marks.find(number) for marks in tuple(self._marks.values())]
        found = [context for context in candidates if context is not None]
        return found[0] if len(found) == 1 else None


class _Marks:
    """The contexts in which a thread made its autograd nodes.

    Args:
        sequence: The number of the thread's next node.
    """

    def __init__(self, sequence: int) -> None:
        self._end = sequence
        self._numbers: list[int] = []
        self._contexts: list[_Context] = []

    def note(self, sequence: int, context: _Context) -> None:
        """Note the operator that runs now: its node, if it has one, is the latest."""
        if sequence > self._end:
            self._end = sequence
            self._numbers.append(sequence - 1)
            self._contexts.append(context)

    def find(self, number: int) -> _Context | None:
        """Return the context in which a node was made; None if it is older, or has no number."""
        place = bisect.bisect_right(self._numbers, number) - 1
        return self._contexts[place] if place >= 0 and number < self._end else None


class Modules:
    """The paths of the modules that run, by thread.

    Args:
        look: Called whenever a module begins or ends.

    Attributes:
        remove: Stops following them.
    """

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look
        self._running: dict[int, list[str]] = {}
        # Modules are kept, so that no other module gets the id of a dead one.
        self._paths: dict[int, tuple[nn.Module, str]] = {}
        self.remove = _torch.follow_modules(self._enter, self._leave)

    def current(self) -> str | None:
        """Return the path of the innermost module that runs on this thread."""
        running = self._running.get(threading.get_ident())
        return running[-1] if running else None

    def _enter(self, module: nn.Module, _args: object) -> None:
        self._look()
        self._running.setdefault(threading.get_ident(), []).append(self._path(module))

    def _leave(self, _module: nn.Module, _args: object, _output: object) -> None:
        running = self._running.get(threading.get_ident())
        if running:  # a capture may begin inside a module
            try:
                self._look()
            finally:
                running.pop()

    def _path(self, module: nn.Module) -> str:
        if id(module) not in self._paths:
            root = type(module).__name__
            for name, inner in module.named_modules():
                self._paths[id(inner)] = (inner, f"{root}.{name}" if name else root)
        return self._paths[id(module)][1]
