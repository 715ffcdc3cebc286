"""The core's access to torch without Python: addresses of torch's functions, and tensors."""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

import torch

from cgraph import _core
from cgraph._torch.fields import tensor_fields
from cgraph._torch.tensors import without_modes

__all__ = [
    "fresh_functions",
    "mode_addresses",
    "stable_functions",
    "tensor_reader",
    "torch_settings",
]


@functools.cache
def tensor_reader() -> _core.TensorReader:
    """Return the native reader of tensors.

    It reads the fields of tensors in a torch whose tensors are known, else it calls torch's stable
    C functions, or uses DLPack's table if there is one.
    """
    api = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    with without_modes(), torch.inference_mode(False):
        tensor = torch.empty(0, device="cpu")
        samples = [tensor, torch.nn.Parameter(tensor, requires_grad=False)]
        samples += [torch.empty(0, device="cpu", requires_grad=True), torch.nn.Parameter(tensor)]
        conjugate = torch.empty(0, dtype=torch.complex64, device="cpu").conj()
        samples += [conjugate, conjugate.imag]
        fields = tensor_fields()
    return _core.TensorReader(torch.Tensor, api, stable_functions(), samples, fields)


_STABLE = tuple(
    f"aoti_torch_get_{name}"
    for name in (
        "data_ptr",
        "dim",
        "sizes",
        "strides",
        "dtype",
        "device_type",
        "device_index",
    )
)


def stable_functions() -> dict[str, int]:
    """Return the addresses of torch's stable C functions on tensors; empty if one is missing.

    The one for the layout may be missing, as in torch 2.8: there the fields of tensors tell it.
    Functions that are not stable are included under names of ours.
    """
    stable = _addresses({name: (_CPU, name) for name in _STABLE})
    layout = _addresses({name: (_CPU, name) for name in ("aoti_torch_get_layout",)})
    grad = _addresses({"requires_grad": (_C10, "_ZNK3c1010TensorImpl13requires_gradEv")})
    lazy = {
        name: (_CPU, f"_ZN2at6native{len(name)}{name}ERKNS_6TensorE")
        for name in ("is_conj", "is_neg")
    }
    return {**stable, **layout, **grad, **_addresses(lazy)} if stable else {}


@functools.cache
def mode_addresses() -> dict[str, int]:
    """Return the addresses of torch's functions that tell a thread's modes.

    The result has the functions for all modes or for none. It has ``is_included``, for dispatch
    keys, together with the one for modes of functions, or neither.
    """
    interception = {
        "is_included": (_C10, "_ZN3c104impl28tls_is_dispatch_key_includedENS_11DispatchKeyE"),
        "is_function_mode": (_CPU, "_ZN2at4impl27torch_function_mode_enabledEv"),
    }
    modes = _addresses(
        {
            "is_grad_enabled": (_CPU, "aoti_torch_grad_mode_is_enabled"),
            "is_inference": (_C10, "_ZN3c1013InferenceMode10is_enabledEv"),
            "is_autocast": (_CPU, "_ZN2at8autocast19is_autocast_enabledEN3c1010DeviceTypeE"),
        }
    )
    return {**modes, **_addresses(interception)}


@functools.cache
def fresh_functions() -> dict[str, int]:
    """Return the addresses of torch's C functions that make a tensor; empty if one is missing."""
    found = _addresses(
        {
            "empty_strided": (_CPU, "aoti_torch_empty_strided"),
            "data_ptr": (_CPU, "aoti_torch_get_data_ptr"),
            "delete": (_CPU, "aoti_torch_delete_tensor_object"),
        }
    )
    found |= _addresses({"from_blob": (_CPU, "aoti_torch_create_tensor_from_blob")})
    for symbol in _WRAPS:
        wrap = _addresses({"wrap": (_PYTHON, symbol)})
        if found and wrap:
            return {**found, **wrap}
    return {}


_FLAGS = (
    "userEnabledCuDNN",
    "benchmarkCuDNN",
    "deterministicCuDNN",
    "deterministicAlgorithms",
    "deterministicAlgorithmsWarnOnly",
    "deterministicFillUninitializedMemory",
    "userEnabledFlashSDP",
    "userEnabledMemEfficientSDP",
    "userEnabledMathSDP",
    "userEnabledCuDNNSDP",
    "allowFP16BF16ReductionMathSDP",
    "allowFP16ReductionCuBLAS",
    "allowBF16ReductionCuBLAS",
    "allowFP16AccumulationCuBLAS",
)
# The last torch in which they only read a field.
_OLD_FLAGS = ("allowTF32CuBLAS", "allowTF32CuDNN", "float32MatmulPrecision")
_PRECISION = "_ZNK2at7Context16float32PrecisionENS_14Float32BackendENS_9Float32OpE"


@functools.cache
def torch_settings() -> _core.TorchSettings:
    """Return the native reader of torch's settings that all threads have in common.

    What it cannot read itself, as torch has no such function, is read by Python in each call.
    """

    def flag(name: str) -> int:
        symbol = f"_ZNK2at7Context{len(name)}{name}Ev"
        return _addresses({name: (_CPU, symbol)}).get(name, 0)

    context = _addresses({"context": (_CPU, "_ZN2at13globalContextEv")}).get("context", 0)
    dtype = _addresses({"dtype": (_C10, "_ZN3c1031get_default_dtype_as_scalartypeEv")})
    precision = _addresses({"precision": (_CPU, _PRECISION)}).get("precision", 0)
    # An old torch does not know of a setting that it does not have.
    flags = [found for found in map(flag, _FLAGS) if found]
    also = None
    if not precision:
        old = [flag(name) for name in _OLD_FLAGS]
        flags += old if all(old) else []
        also = None if all(old) else _precisions
    if not (context and dtype):
        also = _settings
    return _core.TorchSettings(context, flags, precision, dtype.get("dtype", 0), also)


def _precisions() -> int:
    """Return a number for the precisions of float32."""
    backends: Any = torch.backends
    found = backends.cuda.matmul.fp32_precision, backends.cudnn.fp32_precision
    return hash((*found, backends.cudnn.conv.fp32_precision)) & _WORD


def _settings() -> int:
    """Return a number for the settings that Python can read."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    of_attention = (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    )
    of_libraries = cudnn.enabled, cudnn.benchmark, cudnn.deterministic
    of_all = torch.get_deterministic_debug_mode(), str(torch.get_default_dtype())
    return hash((of_attention, of_libraries, of_all, torch.get_float32_matmul_precision())) & _WORD


_WORD = (1 << 64) - 1
_CPU, _C10, _PYTHON = "libtorch_cpu.so", "libc10.so", "libtorch_python.so"
# `THPVariable_Wrap` takes an rvalue reference, a reference, or in older torch a value.
_WRAPS = tuple(
    f"_Z16THPVariable_Wrap{argument}"
    for argument in ("ON2at10TensorBaseE", "RKN2at10TensorBaseE", "N2at10TensorBaseE")
)


def _addresses(wanted: dict[str, tuple[str, str]]) -> dict[str, int]:
    """Return the addresses of functions in torch's libraries; empty if one is missing."""
    folder = os.path.join(os.path.dirname(torch.__file__), "lib")
    found = {}
    try:
        for name, (library, symbol) in wanted.items():
            function = getattr(ctypes.CDLL(os.path.join(folder, library)), symbol)
            found[name] = ctypes.cast(function, ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        return {}
    return found
