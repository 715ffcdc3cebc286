"""A watch on a function that runs eagerly, for lines that a capture would refuse or freeze."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from cgraph import _source, _torch
from cgraph._driver import Driver
from cgraph._explanation.findings import Log
from cgraph._explanation.random_draws import draws_noted
from cgraph._explanation.stream_order import Streams
from cgraph._operators.refused import REFUSED, refused_copy
from cgraph._operators.schemas import name_of
from cgraph._source import Place
from cgraph._torch import tree_iter
from cgraph.causes import Cause

__all__ = ["inspected"]

_INDEXED_WRITES = ("index_put_", "index_put", "_index_put_impl_", "_unsafe_index_put")
_COPIES = ("_to_copy", "copy_", "copy")
_WAITED = "called a synchronizing CUDA operation"


@contextmanager
def inspected(driver: Driver, log: Log) -> Iterator[None]:
    """Note findings in the ``with`` block, on this thread and in its backward passes.

    Args:
        driver: The driver of the captures. The current stream stands for the one that captures.
        log: Receives the findings.
    """
    thread = threading.get_ident()

    def here() -> Place:
        # Threads of autograd have no line of the user's: the thread that waits for them has.
        place = _source.user_place() or _source.user_place(sys._current_frames().get(thread))
        return place or ("", 0)

    streams = Streams(driver, log, here)
    calls = _Calls(driver, log, here)
    operators = _Operators(driver, log, here, streams, calls)
    with ExitStack() as stack:
        stack.callback(streams.finish)
        stack.enter_context(streams.watched())
        stack.enter_context(_torch.steps_noted(_optimizer_check(log, here)))
        if driver.device_type == "cuda":
            stack.enter_context(_waits_heard(operators.waited))
        stack.enter_context(calls)
        operators.uncompiled = stack.enter_context(_torch.Uncompiled())
        stack.callback(_torch.leave_mode, operators)
        _torch.enter_mode(operators)
        stack.enter_context(draws_noted(log, here))
        yield


class _Calls(TorchFunctionMode):
    """A mode for calls that the dispatcher does not see: printing, and moving to the same device.

    Attributes:
        running: The name of the torch function that the user has called.
    """

    def __init__(self, driver: Driver, log: Log, here: Callable[[], Place]) -> None:
        super().__init__()
        self.running = ""
        self._device_type = driver.device_type
        self._log = log
        self._here = here
        # On the simulator these do nothing; on a GPU they would be copies.
        moves = ("cpu", "tolist", "numpy", "__array__", "__format__")
        self._reads = {"__repr__", *(moves if driver.device_type == "cpu" else ())}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note the call and make it."""
        before, self.running = self.running, getattr(func, "__name__", "")
        if self._is_read(args):
            self._log.add(Cause.HOST_READ, f"Tensor.{self.running}", self._here())
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.running = before

    def _is_read(self, args: Any) -> bool:
        if self.running not in self._reads or args[0].device.type != self._device_type:
            return False
        # An operator reads a single number.
        return self.running != "__format__" or bool(args[0].dim())


class _Operators(_torch.Bystander):
    """A mode that sees each operator before it runs."""

    def __init__(
        self,
        driver: Driver,
        log: Log,
        here: Callable[[], Place],
        streams: Streams,
        calls: _Calls,
    ) -> None:
        super().__init__()
        self._device_type = driver.device_type
        self._log = log
        self._here = here
        self._streams = streams
        self._calls = calls
        self._last = "torch"
        self._literals: dict[int, torch.Tensor] = {}
        self._heard: set[tuple[str, Place]] = set()
        self._thread = threading.get_ident()
        self._unheard = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note the reasons against capturing an operator, and run it."""
        kwargs = kwargs or {}
        self._last = name_of(func)
        tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        on_device = [one for one in tensors if self._is_on_device(one)]
        place = self._here()
        for cause in self._causes(func, args, kwargs, tensors, on_device):
            self._log.add(cause, self._last, place)
            # Autograd passes the warnings of its threads on to the line of the backward pass.
            self._unheard += threading.get_ident() != self._thread
        if self._is_work(on_device, kwargs) and _torch.evaluating_node() is None:
            # Autograd joins the streams of a backward pass itself.
            self._streams.work(self._last, place)
        result = func(*args, **kwargs)
        if self._last == "aten.lift_fresh" and result.dim() == 0:
            self._literals[id(result)] = result
        return result

    def waited(self) -> None:
        """Note that torch has waited for the device, unless the reason is known."""
        place = self._here()
        key = (self._last, place)
        if key not in self._heard and self._log.refuses(place):
            return
        if self._unheard:
            self._unheard -= 1
            return
        self._heard.add(key)
        self._log.add(Cause.HOST_READ, self._last, place)

    def _causes(
        self,
        func: Any,
        args: Any,
        kwargs: dict[str, Any],
        tensors: Sequence[torch.Tensor],
        on_device: Sequence[torch.Tensor],
    ) -> Iterator[Cause]:
        # Operators of higher order have no namespace.
        name = self._last.rpartition(".")[2]
        if self._draws_alone(args, kwargs):
            yield Cause.GENERATOR
        if name == "item" and not on_device:
            if tensors and id(tensors[0]) not in self._literals:
                yield Cause.HOST_NUMBER
            return
        if not self._is_work(on_device, kwargs):
            return
        if name in _COPIES:
            if (cause := refused_copy(name, args, kwargs, self._device_type)) is not None:
                yield cause
        elif name == "lift_fresh":
            if self._device_type != "cpu" or args[0].dim():
                # A literal; on the simulator a single number may also be on the host.
                yield Cause.HOST_COPY
        elif name in ("index", *_INDEXED_WRITES):
            yield from self._indexed(name, args, kwargs)
        elif on_device and self._reads(func, name, kwargs):
            known = REFUSED.get(name, Cause.SHAPE)
            is_branch = known is Cause.HOST_READ and self._calls.running == "__bool__"
            yield Cause.BRANCH if is_branch else known
        elif "attention" not in name and any(self._is_outside(one) for one in tensors):
            # Kernels of attention keep their random state on the host only outside of captures.
            yield Cause.HOST_OPERAND

    def _reads(self, func: Any, name: str, kwargs: dict[str, Any]) -> bool:
        if name == "repeat_interleave":
            return kwargs.get("output_size") is None
        tags = getattr(func, "tags", ())
        return name in REFUSED or torch.Tag.dynamic_output_shape in tags

    def _indexed(self, name: str, args: Any, kwargs: dict[str, Any]) -> Iterator[Cause]:
        indices = [one for one in args[1] if one is not None]
        masks = [one for one in indices if one.dtype in (torch.bool, torch.uint8)]
        value = args[2] if name != "index" else None
        if masks:
            fills = value is not None and len(indices) == 1 and self._is_number(value)
            if not fills or kwargs.get("accumulate", args[3] if len(args) > 3 else False):
                yield Cause.SHAPE
        elif any(self._is_outside(one) for one in indices):
            yield Cause.HOST_COPY
        elif value is not None and self._is_outside(value):
            yield Cause.HOST_OPERAND

    def _draws_alone(self, args: Any, kwargs: dict[str, Any]) -> bool:
        generator = _torch.generator_among(args, kwargs)
        if generator is None or generator.device.type != self._device_type:
            return False
        known = torch.cuda.default_generators if self._device_type == "cuda" else ()
        return not any(_torch.is_same(generator, one) for one in (torch.default_generator, *known))

    def _is_work(self, on_device: Sequence[torch.Tensor], kwargs: dict[str, Any]) -> bool:
        device = kwargs.get("device")
        given = device is not None and torch.device(device).type == self._device_type
        return bool(on_device) or given or self._device_type == "cpu"

    def _is_on_device(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._device_type

    def _is_outside(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on the host, and is not a number that the code spells out."""
        is_literal = id(tensor) in self._literals
        return tensor.device.type == "cpu" and self._device_type != "cpu" and not is_literal

    def _is_number(self, value: torch.Tensor) -> bool:
        """Return whether a masked write of a value needs no shape; on a GPU only a host number."""
        if self._device_type == "cpu":
            return id(value) in self._literals
        return value.numel() == 1 and value.device.type == "cpu"


def _optimizer_check(log: Log, here: Callable[[], Place]) -> Callable[..., None]:
    def check(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if not all(group.get("capturable", True) for group in optimizer.param_groups):
            log.add(Cause.OPTIMIZER, f"{type(optimizer).__name__}.step", here())

    return check


@contextmanager
def _waits_heard(heard: Callable[[], None]) -> Iterator[None]:
    """Call ``heard`` where torch's CUDA code waits for the device, which it can warn about."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        warnings.filterwarnings("always", message=_WAITED)
        show = warnings.showwarning

        def hear(message: Warning | str, *args: Any, **kwargs: Any) -> None:
            if str(message).startswith(_WAITED):
                heard()
            else:
                show(message, *args, **kwargs)

        warnings.showwarning = hear
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
