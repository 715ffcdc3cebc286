"""Private parts of torch's tensors, modes, autograd and optimisers."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, TypeVar

import torch

from cgraph._torch.containers import names_in
from cgraph._torch.interception import is_transformed
from cgraph._torch.private_names import of_autograd, of_modes, of_operators, of_torch

__all__ = [
    "WeakStorage",
    "apply",
    "at_end_of_backward",
    "autograd_sequence",
    "backward_pass",
    "base_of",
    "bytes_of",
    "capturable_on_cpu",
    "clone_with_strides",
    "copy_each",
    "demangled",
    "enter_mode",
    "evaluating_node",
    "form_of",
    "forward_ad",
    "generator_among",
    "in_class",
    "is_autograds_thread",
    "is_same",
    "keeps_history",
    "lazy_view",
    "leaf_names",
    "leave_mode",
    "living",
    "memories_of",
    "memory_of",
    "mode_count",
    "modes_aside",
    "modes_inside_out",
    "overlaps_itself",
    "place_of",
    "row_of",
    "saved_by",
    "sequence_of",
    "sharing_version",
    "span_of",
    "start_of",
    "storage_id",
    "take_mode_away",
    "wants_gc",
    "without_functions",
    "without_modes",
    "wrapped",
    "zero_each",
]


Mode = TypeVar("Mode")

# Its ``_current_level`` is 0 or more inside ``dual_level()``.
forward_ad = vars(torch.autograd.forward_ad)


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Call ``function.apply(*args)``, without a search for functorch's traces if it is not used."""
    if is_transformed():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def copy_each(to: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Copy tensors into others, in as few launches as possible."""
    if (copy := getattr(torch, "_foreach_copy_", None)) is not None:
        copy(to, tensors)
        return
    for one, other in zip(to, tensors, strict=True):
        one.copy_(other)


def zero_each(tensors: Sequence[torch.Tensor]) -> None:
    """Fill tensors with zeros, in as few launches as possible."""
    if (zero := getattr(torch, "_foreach_zero_", None)) is not None:
        zero(tensors)
        return
    for one in tensors:
        one.zero_()


def leaf_names(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> list[str]:
    """Return the names of leaves of positional and keyword arguments, as ``args[0]['x']``."""
    args, kwargs = arguments
    return names_in("args", args) + names_in("kwargs", kwargs)


def in_class(tensor: torch.Tensor, kind: type[torch.Tensor]) -> torch.Tensor:
    """Return a tensor on the same memory, of a class derived from torch's as parameters are."""
    made: torch.Tensor = torch.Tensor._make_subclass(kind, tensor)
    return made


def autograd_sequence() -> int:
    """Return the number of this thread's next autograd node."""
    return int(of_autograd._get_sequence_nr())


def sequence_of(node: Any) -> int:
    """Return the number of an autograd node in its thread; the largest number for a leaf's."""
    return int(node._sequence_nr())


def evaluating_node() -> Any:
    """Return the autograd node that runs backward on this thread; None outside a backward pass."""
    return of_torch._current_autograd_node()


backward_pass: Callable[[], int] = of_torch.function("_current_graph_task_id")
"""Return the number of this thread's backward pass; -1 outside of any."""


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Call a function at the end of this thread's backward pass."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def living(reference: weakref.ref[torch.Tensor]) -> torch.Tensor | None:
    """Return the tensor of a weak reference of Python, made in half the time of torch's."""
    tensor = reference()
    if tensor is not None:
        # If only autograd held it, Python holds it again.
        tensor._fix_weakref()  # type: ignore[attr-defined]
    return tensor


def keeps_history() -> bool:
    """Return whether this thread's backward pass keeps the history that it has run through."""
    return bool(of_autograd._get_current_graph_task_keep_graph())


def is_autograds_thread() -> bool:
    """Return whether this thread is one of autograd's own, in a backward pass."""
    # Python did not start these.
    kind: type = threading._DummyThread
    return backward_pass() != -1 and isinstance(threading.current_thread(), kind)


def demangled(name: str) -> str:
    """Return a C++ name in readable form; the name itself if torch cannot demangle it."""
    demangle = getattr(torch._C, "_demangle", None)
    return name if demangle is None else str(demangle(name))


_stranded: list[Any] = []


def enter_mode(mode: Any) -> None:
    """Enter a dispatch mode until :func:`leave_mode`."""
    for other in [m for m in _stranded if m in of_modes._get_current_dispatch_mode_stack()]:
        _stranded.remove(other)
        leave_mode(other)
    mode.__enter__()


def leave_mode(mode: Any) -> None:
    """Leave a dispatch mode, even if the user has entered others inside it and not left them.

    Only the thread that entered it can. From another one the mode stays until that thread enters
    its next mode; torch does not keep it alive until then.
    """
    if mode not in of_modes._get_current_dispatch_mode_stack():
        _stranded.append(mode)
        return
    with _modes_inside_aside(mode):
        mode.__exit__(None, None, None)


def take_mode_away(mode: Any) -> None:
    """Remove a dispatch mode that was left, if autograd has put it back."""
    if mode not in of_modes._get_current_dispatch_mode_stack():
        return
    with _modes_inside_aside(mode):
        if mode in _stranded:
            # It should have been left while one of its operators ran.
            _stranded.remove(mode)
            mode.__exit__(None, None, None)
        else:
            of_modes._pop_mode()


@contextmanager
def _modes_inside_aside(mode: Any) -> Iterator[None]:
    """Make an active mode the innermost one in a ``with`` block."""
    inner = []
    while (top := of_modes._get_current_dispatch_mode_stack()[-1]) is not mode:
        inner.append(of_modes._pop_mode())
        assert inner[-1] is top
    try:
        yield
    finally:
        for other in reversed(inner):
            of_modes._push_mode(other)


def mode_count() -> int:
    """Return the number of active dispatch modes."""
    return len(of_modes._get_current_dispatch_mode_stack())


def modes_inside_out(kind: type[Mode]) -> list[Mode]:
    """Return the active dispatch modes of a class, the innermost first."""
    modes = reversed(of_modes._get_current_dispatch_mode_stack())
    return [mode for mode in modes if isinstance(mode, kind)]


@contextmanager
def modes_aside(count: int) -> Iterator[None]:
    """Set all but the outermost ``count`` dispatch modes aside in a ``with`` block."""
    inner = []
    while mode_count() > count:
        inner.append(of_modes._pop_mode())
    try:
        yield
    finally:
        for mode in reversed(inner):
            of_modes._push_mode(mode)


def without_modes() -> Any:
    """Return a context in which no dispatch mode is active."""
    before_dispatch = of_operators._len_torch_dispatch_stack_pre_dispatch()
    if before_dispatch or of_torch._len_torch_dispatch_stack():
        return of_modes._disable_current_modes()
    return nullcontext()


def without_functions() -> Any:
    """Return a context in which derived classes do not see the functions on their tensors."""
    return of_torch.DisableTorchFunctionSubclass()


class WeakStorage:
    """A weak reference to a tensor's storage.

    Args:
        tensor: The tensor.

    Attributes:
        address: Where its memory begins.
        pointer: The address of torch's object, which stays, if not its memory.
    """

    pointer: int = 0

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.address = storage.data_ptr()
        self.pointer = storage._weak_ref()  # type: ignore[assignment]

    def get(self) -> torch.UntypedStorage | None:
        """Return the storage; None if it is gone."""
        storage: torch.UntypedStorage | None
        storage = torch.UntypedStorage._new_with_weak_ptr(self.pointer)
        return storage

    @property
    def is_gone(self) -> bool:
        """True if nothing of it lies where it lay."""
        storage = self.get()
        return storage is None or storage.data_ptr() != self.address

    def __del__(self) -> None:
        if self.pointer:
            torch.UntypedStorage._free_weak_ref(self.pointer)


def memory_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return a tensor's storage; None without memory: if sparse, meta, fake or a wrapper."""
    try:
        storage = tensor.untyped_storage()
        # The storage of a wrapper is on no device; to ask it takes longer.
        if tensor.is_meta or (type(tensor) not in _PLAIN and storage.device.type == "meta"):
            return None
        storage.data_ptr()
    except RuntimeError:
        return None
    return storage


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def saved_by(node: Any) -> Iterator[torch.Tensor]:
    """List the tensors that a node of autograd has saved, as far as it can tell."""
    names = [name for name in dir(node) if name.startswith("_saved_")]
    if hasattr(node, "saved_tensors"):
        names.append("saved_tensors")
    for name in names:
        # One that is undefined, or was released.
        with suppress(RuntimeError, AttributeError):
            found = getattr(node, name)
            for one in found if isinstance(found, list | tuple) else (found,):
                if isinstance(one, torch.Tensor):
                    yield one


def memories_of(tensors: Iterable[torch.Tensor]) -> Iterator[torch.UntypedStorage]:
    """Return the tensors' storages with memory, also those without bytes, which are false."""
    return (memory for memory in map(memory_of, tensors) if memory is not None)


def place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a tensor's place and layout; two tensors without a storage never share one."""
    memory = memory_of(tensor)
    if memory is None:
        return (id(tensor),)
    return storage_id(memory), tensor.storage_offset(), *layout_of(tensor)


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte and of the one after the last."""
    if tensor.numel() == 0:
        return 0, 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size()


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes from the first to the last of a tensor, with those in between: [bytes].

    To autograd they are not a view, and they do not share the tensor's version.
    """
    begin, end = span_of(tensor)
    storage = tensor.untyped_storage()
    found = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return found.set_(storage, begin - storage.data_ptr(), (end - begin,), (1,))


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Return whether elements may share memory, as in an expanded tensor."""
    if tensor.is_contiguous():
        return False
    end = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= end:
            return True
        end += (size - 1) * stride
    return False


def start_of(tensor: torch.Tensor) -> int:
    """Return where the memory of a tensor begins; 0 if it has none."""
    return tensor.untyped_storage().data_ptr()


def row_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements from the first one in memory to the last one, in a row."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.as_strided((1 + sum((size - 1) * step for size, step in pairs),), (1,))


def clone_with_strides(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same strides, also where elements share memory."""
    shape, strides = tensor.shape, tensor.stride()
    copy = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)
    row_of(copy).copy_(row_of(tensor))
    return copy


def form_of(tensor: torch.Tensor) -> str | None:
    """Return the form of a sparse, nested or quantized tensor; None for others."""
    if tensor.is_nested:
        return "nested"
    if tensor.is_quantized:
        return "quantized"
    return None if tensor.layout is torch.strided else str(tensor.layout).removeprefix("torch.")


def layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the layout by which a strided tensor's elements are read from its memory."""
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()


def storage_id(storage: torch.UntypedStorage) -> int:
    """Return a number that no other living storage has; it stays when memory is resized."""
    return int(storage._cdata)


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that autograd knows as the base of this view; itself if not a view."""
    return tensor if tensor._base is None else tensor._base


def wrapped(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors inside a wrapper at any depth; a tensor itself if it is not one."""
    if of_modes.is_traceable_wrapper_subclass(tensor):
        names: list[str] = tensor.__tensor_flatten__()[0]  # type: ignore[attr-defined]
        for name in names:
            yield from wrapped(getattr(tensor, name))
    else:
        yield tensor


def lazy_view(tensor: torch.Tensor, conjugate: bool, negative: bool) -> torch.Tensor:
    """Return a view whose elements are conjugated or negated when they are read."""
    if conjugate:
        tensor = tensor.conj()
    return torch._neg_view(tensor) if negative else tensor


def sharing_version(tensor: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor whose version is that of another one, without its memory."""
    made = tensor.detach()
    made.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return made


def generator_among(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Generator | None:
    """Return the generator among an operator's arguments, also where it is positional."""
    values = (*args, kwargs.get("generator"))
    return next((one for one in values if isinstance(one, torch.Generator)), None)


def is_same(first: torch.Generator, second: torch.Generator) -> bool:
    """Return whether two Python objects are one generator."""
    return int(first._cdata) == int(second._cdata)  # type: ignore[attr-defined]


def wants_gc() -> bool:
    """Return whether the user wants a collection before each capture (``TORCH_CUDAGRAPH_GC``)."""
    config = getattr(torch.compiler, "config", None)
    wants = getattr(config, "force_cudagraph_gc", None)
    return os.environ.get("TORCH_CUDAGRAPH_GC", "0") == "1" if wants is None else bool(wants)


_capturable: dict[str, Any] = {"users": 0, "before": []}


_capturable_lock = threading.Lock()


@contextmanager
def capturable_on_cpu() -> Iterator[None]:
    """Let optimisers with ``capturable=True`` step on CPU tensors, which stand for a GPU's."""
    with _capturable_lock:
        _capturable["users"] += 1
        if _capturable["users"] == 1:
            _capturable["before"] = _allow_cpu()
    try:
        yield
    finally:
        with _capturable_lock:
            _capturable["users"] -= 1
            if _capturable["users"] == 0:
                for module, original in _capturable["before"]:
                    setattr(module, _SUPPORTED_DEVICES, original)


_SUPPORTED_DEVICES = "_get_capturable_supported_devices"


def _allow_cpu() -> list[tuple[Any, Any]]:
    """Add the CPU to the devices of every optimiser; return the functions to put back."""
    modules = [m for key, m in sys.modules.items() if key.startswith("torch.optim.")]
    before = [
        (m, getattr(m, _SUPPORTED_DEVICES)) for m in modules if hasattr(m, _SUPPORTED_DEVICES)
    ]

    def supported(*args: Any, **kwargs: Any) -> list[str]:
        return [*before[0][1](*args, **kwargs), "cpu"]

    for module, _ in before:
        setattr(module, _SUPPORTED_DEVICES, supported)
    return before
