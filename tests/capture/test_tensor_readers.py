"""Readers of tensors, and their behaviour without their functions."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cgraph import _core, _torch
from cgraph._torch import fields
from cgraph._torch.fields import tensor_fields
from cgraph._torch.native import stable_functions
from cgraph.errors import ArgumentError
from lab import Lab, fresh
from readers import EXCHANGE_API, HAS_STABLE_FUNCTIONS, Plain, check, reader_by_fields, samples

# Values that go with the fields.
_NO_PLACES = {"vtable", "guard"}


def test_readers_without_the_stable_functions_still_read(lab: Lab) -> None:
    x, y = fresh(lab, 3), fresh(lab, 3)
    all_of = stable_functions()
    assert bool(all_of) is HAS_STABLE_FUNCTIONS
    assert not all_of or {"requires_grad", "is_conj", "is_neg"} < set(all_of)
    for functions, given in [
        ({}, samples()),
        ({name: at for name, at in all_of.items() if "sizes" not in name}, samples()),
        ({name: at for name, at in all_of.items() if "layout" not in name}, samples()),
        (dict.fromkeys(all_of, 0), samples()),
        (all_of, []),
        (all_of, [Plain(torch.empty(0))]),
    ]:
        reader = _core.TensorReader(Tensor, EXCHANGE_API, functions, given)
        assert check(reader, x, y) == ("copy", y.data_ptr())


def address(symbol: str) -> int:
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    return ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value or 0


@pytest.mark.parametrize("known", ["right", "wrong", "none"])
@pytest.mark.parametrize("has_fields", [False, True])
def test_readers_tell_which_tensors_require_a_gradient(
    lab: Lab, known: str, has_fields: bool
) -> None:
    functions = stable_functions()
    if known == "wrong" and functions:
        # Of the same form, and true of all tensors.
        functions["requires_grad"] = address("_ZNK3c1010TensorImpl11has_storageEv")
    elif known == "none":
        functions.pop("requires_grad", None)
    known_fields = tensor_fields() if has_fields else {}
    reader = _core.TensorReader(Tensor, EXCHANGE_API, functions, samples(), known_fields)
    x = fresh(lab, 3)
    leaf = fresh(lab, 3).requires_grad_()
    parameters = [torch.nn.Parameter(x, requires_grad=flag) for flag in (False, True)]
    for one in (x, leaf, leaf * 2, (leaf * 2).detach(), *parameters, Plain(x), Plain(leaf)):
        assert reader.requires_grad(one) is one.requires_grad
    with torch.inference_mode():
        assert not reader.requires_grad(x * 2)


def test_tensors_of_this_torch_are_read_by_its_stable_functions(lab: Lab) -> None:
    # Not the reader of all: a tensor that the functions could not read ends them for good.
    reader = _torch.tensor_reader.__wrapped__()
    x, y = fresh(lab, 3), fresh(lab, 3)
    assert check(reader, x, y) == ("copy", y.data_ptr())
    assert check(reader, torch.nn.Parameter(x), torch.nn.Parameter(y)) == ("copy", y.data_ptr())
    assert reader.uses_stable_functions is HAS_STABLE_FUNCTIONS
    assert not _core.TensorReader(Tensor, EXCHANGE_API).uses_stable_functions


@pytest.mark.parametrize(
    "first",
    [
        lambda x: torch.nn.Parameter(x),
        lambda x: x.requires_grad_() * 2,
        lambda x: x.conj(),
        lambda x: x.conj().imag,
        lambda x: x.new_empty(0),
    ],
)
def test_the_first_tensor_of_a_dtype_does_not_change_how_others_are_read(
    lab: Lab, first: Callable[[Tensor], Tensor]
) -> None:
    x, y = (torch.complex(fresh(lab, 4), fresh(lab, 4)) for _ in range(2))
    reader = _core.TensorReader(Tensor, EXCHANGE_API, stable_functions(), samples())
    given = first(x.clone())
    with suppress(ArgumentError):
        check(reader, given, given)
    for static, live in ((x, y), (x.real.clone(), y.imag.clone())):
        assert check(reader, static, live) == ("copy", live.data_ptr())
        assert _core.Signature(reader, static).nbytes == static.nbytes
    assert check(reader, x, y.conj()) == ("torch", 0)


def test_tensors_of_torch_up_to_2_11_are_read_by_their_fields() -> None:
    is_known = torch.torch_version.TorchVersion(torch.__version__) < (2, 12)
    assert bool(tensor_fields()) is is_known
    # Where the fields do not tell, the stable functions are asked.
    is_used = is_known and HAS_STABLE_FUNCTIONS
    assert _torch.tensor_reader.__wrapped__().uses_fields is is_used
    assert reader_by_fields().uses_fields is is_used
    assert not _core.TensorReader(Tensor, None, stable_functions(), samples()).uses_fields


@pytest.mark.skipif(not tensor_fields(), reason="the fields of this torch are not known")
def test_where_no_function_tells_the_layout_fields_do(lab: Lab) -> None:
    functions = {name: at for name, at in stable_functions().items() if "layout" not in name}
    reader = _core.TensorReader(Tensor, None, functions, samples(), tensor_fields())
    assert reader.uses_fields
    assert not _core.TensorReader(Tensor, None, functions, samples()).uses_stable_functions
    static, live = fresh(lab, 3, 4), fresh(lab, 3, 4)
    assert check(reader, static, live) == ("copy", live.data_ptr())
    assert check(reader, static, live.t().contiguous().t()) == ("torch", 0)
    with pytest.raises(ArgumentError, match="that cannot be read"):
        check(reader, static, live.to_sparse())
    # Asking torch for properties that a sparse tensor lacks would have ended this.
    assert reader.uses_fields


def test_fields_are_found_whatever_the_default_dtype_is() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert tensor_fields.__wrapped__() == tensor_fields()
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("name", [*tensor_fields()])
def test_each_field_is_compared_with_what_torch_says(name: str) -> None:
    shifted = 0xFF00 if name == "guard" else tensor_fields()[name] + 8
    wrong = {**tensor_fields(), name: shifted}
    assert all(fields._agree(tensor_fields(), one) for one in fields._samples())
    assert not all(fields._agree(wrong, one) for one in fields._samples())


@pytest.mark.parametrize("name", [*tensor_fields()])
def test_a_reader_takes_all_fields_or_none(name: str) -> None:
    some = {other: at for other, at in tensor_fields().items() if other != name}
    with pytest.raises(ArgumentError, match=f"no {name}, expected all or none"):
        _core.TensorReader(Tensor, None, stable_functions(), samples(), some)


@pytest.mark.parametrize("version", ["2.7.1", "2.12.0a0+git1", "3.0.0"])
def test_fields_are_not_looked_for_in_a_torch_that_is_not_known(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert tensor_fields.__wrapped__() == {}


def test_samples_that_are_no_tensors_are_refused() -> None:
    # A storage has a torch number as well, of another object.
    for given in (object(), torch.empty(1).untyped_storage()):
        with pytest.raises(ArgumentError, match=r"a sample is \w+, expected a torch\.Tensor"):
            _core.TensorReader(Tensor, EXCHANGE_API, stable_functions(), [given])


@pytest.mark.skipif(not tensor_fields(), reason="the fields of this torch are not known")
@pytest.mark.parametrize("name", [name for name in tensor_fields() if name not in _NO_PLACES])
def test_fields_that_were_found_at_other_places_are_not_looked_at(lab: Lab, name: str) -> None:
    moved = {**tensor_fields(), name: tensor_fields()[name] + 8}
    reader = _core.TensorReader(Tensor, None, stable_functions(), samples(), moved)
    assert not reader.uses_fields
    x, y = fresh(lab, 3), fresh(lab, 3)
    assert check(reader, x, y) == ("copy", y.data_ptr())


@pytest.mark.parametrize("dimensions", range(1, 8))
def test_every_size_and_stride_counts_in_any_number_of_dimensions(
    lab: Lab, dimensions: int
) -> None:
    # Up to five are compared by fields.
    reader = reader_by_fields()
    shape = [2, 3] * 4
    static, live = fresh(lab, *shape[:dimensions]), fresh(lab, *shape[:dimensions])
    assert check(reader, static, live) == ("copy", live.data_ptr())
    assert check(reader, static, static) == ("same", static.data_ptr())
    for dim in range(dimensions):
        sizes = shape[:dimensions]
        sizes[dim] += 1
        other = fresh(lab, *sizes)
        with pytest.raises(ArgumentError, match="expected"):
            check(reader, static, other)
        # The same sizes, with other strides.
        assert check(reader, static, other.narrow(dim, 0, shape[dim])) == (
            ("torch", 0) if dim else ("copy", other.data_ptr())
        )
