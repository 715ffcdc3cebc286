"""Reading tensors, and copying them into static ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.testing import assert_close

import cgraph
from cgraph import _core
from cgraph._torch.native import stable_functions
from cgraph.errors import ArgumentError
from lab import Lab, SimLab, fresh
from readers import EXCHANGE_API, Plain, check, reader_by_fields, samples

WAYS = ["by_fields", "by_stable_functions", "by_python"]
if EXCHANGE_API:
    WAYS += ["by_dlpack", "by_both"]


@pytest.fixture(params=WAYS)
def reader(request: pytest.FixtureRequest) -> _core.TensorReader:
    """Return each way of reading; torch before 2.10 has no DLPack table."""
    api = EXCHANGE_API if request.param in ("by_dlpack", "by_both") else None
    if request.param == "by_fields":
        return reader_by_fields()
    if request.param in ("by_stable_functions", "by_both"):
        return _core.TensorReader(Tensor, api, stable_functions(), samples())
    return _core.TensorReader(Tensor, api)


def test_a_signature_knows_address_bytes_and_density(lab: Lab, reader: _core.TensorReader) -> None:
    x = fresh(lab, 6, 8)
    for view, dense in [
        (x, True),
        (x.t(), True),
        (x[2:], True),
        (x[:, 1:], False),
        (x[3, 2], True),
    ]:
        signature = _core.Signature(reader, view)
        assert signature.address == view.data_ptr()
        assert signature.nbytes == view.numel() * view.element_size()
        assert signature.is_dense == dense


@pytest.mark.parametrize(
    "layout",
    [
        lambda x: x,
        lambda x: x.t(),
        lambda x: x[2:],
        lambda x: x.as_strided((4, 8), (8, 1), 8),
        lambda x: x.view(2, 3, 2, 4).permute(3, 0, 2, 1),
        lambda x: x[1, 1],
    ],
)
def test_a_tensor_of_the_same_dense_layout_is_copied_by_bytes(
    lab: Lab, reader: _core.TensorReader, layout: Callable[[Tensor], Tensor]
) -> None:
    static, live = layout(fresh(lab, 6, 8)), layout(fresh(lab, 6, 8))
    assert check(reader, static, live) == ("copy", live.data_ptr())
    assert check(reader, static, static.detach()) == ("same", static.data_ptr())


def test_strides_of_dimensions_of_size_one_do_not_matter(
    lab: Lab, reader: _core.TensorReader
) -> None:
    static = fresh(lab, 5, 1, 3)
    live = fresh(lab, 15).as_strided((5, 1, 3), (3, 77, 1))
    assert check(reader, static, live) == ("copy", live.data_ptr())
    assert check(reader, live, static) == ("copy", static.data_ptr())
    assert _core.Signature(reader, live).is_dense


def test_other_strides_go_through_torch(lab: Lab, reader: _core.TensorReader) -> None:
    x, y = fresh(lab, 6, 6), fresh(lab, 6, 6)
    assert check(reader, x, y.t()) == ("torch", 0)
    assert check(reader, x, x.t()) == ("torch", 0)
    assert check(reader, x[:, :3], y[:, :3]) == ("torch", 0)
    assert check(reader, x[:3], y[0].expand(3, 6)) == ("torch", 0)
    assert check(reader, x[0].expand(3, 6), y[0].expand(3, 6)) == ("torch", 0)


def test_a_tensor_that_overlaps_the_static_one_goes_through_torch(
    lab: Lab, reader: _core.TensorReader
) -> None:
    x = fresh(lab, 20)
    assert check(reader, x[:12], x[4:16]) == ("torch", 0)
    assert check(reader, x[4:14], x[:10]) == ("torch", 0)
    assert check(reader, x[:10], x[10:]) == ("copy", x[10:].data_ptr())


def test_tensors_without_elements_are_there(lab: Lab, reader: _core.TensorReader) -> None:
    static, live = fresh(lab, 4, 0), fresh(lab, 0, 4).t()
    assert check(reader, static, live)[0] == "same"
    assert _core.Signature(reader, static).nbytes == 0


def test_parameters_gradients_and_subclasses_are_read_as_tensors(
    lab: Lab, reader: _core.TensorReader
) -> None:
    x = fresh(lab, 8)
    lives = [
        fresh(lab, 8).requires_grad_(),
        torch.nn.Parameter(fresh(lab, 8)),
        fresh(lab, 8).requires_grad_() * 2,
        fresh(lab, 8).as_subclass(Plain),
    ]
    for live in lives:
        assert check(reader, x, live) == ("copy", live.data_ptr())
        assert check(reader, live, x) == ("copy", x.data_ptr())


def test_conjugates_and_negatives_go_through_torch(lab: Lab, reader: _core.TensorReader) -> None:
    x = torch.complex(fresh(lab, 4), fresh(lab, 4))
    y = torch.complex(fresh(lab, 4), fresh(lab, 4))
    assert check(reader, x, y) == ("copy", y.data_ptr())
    assert check(reader, x, y.conj()) == ("torch", 0)
    assert check(reader, x, x.conj()) == ("torch", 0)
    assert check(reader, x, y.conj().resolve_conj())[0] == "copy"
    one = y[:1].conj().imag
    assert one.is_neg()
    assert check(reader, fresh(lab, 1), one) == ("torch", 0)
    assert check(reader, y.imag, y.conj().imag) == ("torch", 0)
    assert check(reader, x.real.clone(), torch._neg_view(y.real.clone())) == ("torch", 0)
    for lazy in (y.conj(), one):
        with pytest.raises(ArgumentError, match=r"resolve_conj\(\), resolve_neg\(\)"):
            _core.Signature(reader, lazy)


@pytest.mark.filterwarnings("ignore")
def test_quantized_tensors_are_left_to_torch(reader: _core.TensorReader) -> None:
    x = torch.quantize_per_tensor(torch.rand(3), 0.1, 0, torch.qint8)
    with pytest.raises(ArgumentError, match=r"dequantize\(\)"):
        _core.Signature(reader, x)


@pytest.mark.parametrize("shape", [(), (1,), (4,), (3, 1, 2), (2, 1, 3, 1, 2), (2, 1, 3, 2, 1, 2)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.complex64])
def test_tensors_of_any_shape_and_dtype_are_where_torch_says(
    lab: Lab, reader: _core.TensorReader, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    static, other = (torch.empty((5, *shape), dtype=dtype, device=lab.device) for _ in range(2))
    for live in (other[2], other[1:2].view(shape)):
        assert check(reader, static[3], live) == ("copy", live.data_ptr())
    assert check(reader, static[3], static[3]) == ("same", static[3].data_ptr())


def test_a_tensor_that_changes_in_place_is_read_anew(lab: Lab, reader: _core.TensorReader) -> None:
    static, live, other = fresh(lab, 2, 3), fresh(lab, 2, 3), fresh(lab, 2, 3)
    assert check(reader, static, live) == ("copy", live.data_ptr())
    live.data = other
    assert check(reader, static, live) == ("copy", other.data_ptr())
    live.t_()
    with pytest.raises(ArgumentError, match=r"shape \[3, 2\]"):
        check(reader, static, live)
    live.t_()
    live.data = other.double()
    with pytest.raises(ArgumentError, match="float64"):
        check(reader, static, live)
    live.data = static
    assert check(reader, static, live) == ("same", static.data_ptr())


def test_a_tensor_whose_memory_was_taken_away_is_left_to_torch(
    lab: Lab, reader: _core.TensorReader
) -> None:
    # Other readers ask torch, which adds the offset of a part to nothing.
    starts = [0, 1] if reader.uses_fields else [0]
    for start in starts:
        signature, whole = _core.Signature(reader, fresh(lab, 1, 2)), fresh(lab, 4)
        parts = [whole[start:][None, :2], whole[start:].as_strided((1, 2), (77, 1), start)]
        whole.untyped_storage().resize_(0)
        # pytest would show the tensors, which torch cannot.
        found = [signature.check(part) for part in parts]
        assert found == [("torch", 0)] * 2


def test_memory_that_is_shared_until_it_is_written_is_no_longer_where_it_was(
    lab: Lab, reader: _core.TensorReader
) -> None:
    static = fresh(lab, 4)
    signature, before = _core.Signature(reader, static), static.clone()
    assert signature.check(static) == ("same", static.data_ptr())
    lazy = torch._lazy_clone(static)
    # One of the two gets memory of its own on request.
    assert {signature.check(one)[0] for one in (lazy, static)} == {"same", "copy"}
    assert_close(lazy, before)
    assert_close(static, before)


def test_each_way_of_reading_tells_where_tensors_lie(lab: Lab, reader: _core.TensorReader) -> None:
    def lie(tensor: Tensor) -> _core.Guards:
        return _core.Guards([(-1, ("root", tensor), ("tensor", tensor))], reader)

    base = fresh(lab, 4, 8)
    parts = [
        base,
        base[1:, 2:],
        torch.nn.Parameter(fresh(lab, 3)),
        fresh(lab, 3).as_subclass(Plain),
    ]
    for part in parts:
        known, before = lie(part), part.detach()
        assert known.fits()
        part.data = before.clone()
        assert not known.fits()
        part.data = before
        assert known.fits()
        if before.storage_offset():
            # The same place in elements, but not in bytes.
            part.data = before.as_strided(before.shape, before.stride(), 1)
            assert not known.fits()
            part.data = before
    late = fresh(lab, 5)
    known = lie(late)
    late.data = fresh(lab, 5)
    assert not known.fits()


@pytest.mark.skipif(not hasattr(torch.Tensor, "refine_names"), reason="torch 2.15 has none")
@pytest.mark.filterwarnings("ignore:Named tensors")
def test_named_tensors_are_read_as_others(lab: Lab, reader: _core.TensorReader) -> None:
    static, live = fresh(lab, 2, 3), fresh(lab, 2, 3).refine_names("rows", "columns")
    assert check(reader, static, live) == ("copy", live.data_ptr())


def test_tensors_of_inference_mode_are_read_as_others(lab: Lab, reader: _core.TensorReader) -> None:
    static = fresh(lab, 3)
    with torch.inference_mode():
        live = fresh(lab, 3)
    assert check(reader, static, live) == ("copy", live.data_ptr())
    assert check(reader, live, static) == ("copy", static.data_ptr())


def dtypes() -> list[torch.dtype]:
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    # DLPack has no integers of odd widths and names them by the bytes that they take.
    odd = {f"torch.{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)}
    others = (dtype for dtype in found if str(dtype) not in odd)
    # Quantized tensors, whose bytes are not their values.
    return sorted((dtype for dtype in others if "torch.q" not in str(dtype)[:8]), key=str)


@pytest.mark.filterwarnings("ignore:.*support is experimental")
def test_every_dtype_fits_itself_and_no_other(reader: _core.TensorReader) -> None:
    tensors = [torch.empty(6, dtype=dtype) for dtype in dtypes()]
    assert len(tensors) > 12
    statics = [(static, _core.Signature(reader, static)) for static in tensors]
    for static, signature in statics:
        for other, _ in statics:
            if other.dtype == static.dtype:
                assert signature.check(torch.empty_like(other))[0] == "copy"
                continue
            with pytest.raises(ArgumentError):
                signature.check(other)


@pytest.mark.parametrize(
    ("live", "given"),
    [
        (lambda: torch.rand(2, 4), r"a torch.float32 tensor of shape \[2, 4\] on cpu"),
        (lambda: torch.rand(2, 3, 1), r"of shape \[2, 3, 1\]"),
        (lambda: torch.rand(()), r"of shape \[\]"),
        (lambda: torch.rand(2, 3).double(), "a torch.float64 tensor"),
        (lambda: torch.rand(2, 3, device="meta"), "Tensor that cannot be read|on meta"),
        (lambda: torch.rand(2, 3).to_sparse(), "Tensor that cannot be read"),
        (lambda: [1.0, 2.0], "a list that cannot be read"),
        (lambda: None, "a NoneType that cannot be read"),
    ],
)
def test_what_does_not_fit_is_named_with_its_index_and_what_is_expected(
    reader: _core.TensorReader, live: Callable[[], Any], given: str
) -> None:
    static = torch.rand(2, 3)
    pattern = (
        rf"argument 3 is .*({given}).*, expected a torch.float32 tensor of shape \[2, 3\] on cpu"
    )
    with pytest.raises(ArgumentError, match=pattern):
        check(reader, static, live())


def test_a_class_is_no_tensor(reader: _core.TensorReader) -> None:
    with pytest.raises(ArgumentError, match=r"argument 3 is a .* that cannot be read"):
        check(reader, torch.rand(3), Tensor)


@pytest.mark.parametrize("static", [torch.rand(3, device="meta"), None, torch.rand(3).to_sparse()])
def test_a_static_tensor_without_memory_is_refused(
    reader: _core.TensorReader, static: object
) -> None:
    with pytest.raises((ArgumentError, RuntimeError)):
        _core.Signature(reader, static)


def test_a_live_tensor_without_memory_of_its_own_is_never_read(
    reader: _core.TensorReader,
) -> None:
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.rand(3))
    try:
        kind, _ = check(reader, torch.rand(3), fake)
    except ArgumentError:
        return
    assert kind == "torch"


def inputs(
    sim: SimLab, reader: _core.TensorReader, *statics: Tensor
) -> tuple[_core.Inputs, _core.Template]:
    graph = cgraph.CUDAGraph(keep_graph=True)
    with cgraph.graph(graph):
        fresh(sim, 1).mul(2)
    template = graph._template
    return _core.Inputs(template, reader, statics), template


def test_sources_are_those_of_dense_tensors(sim: SimLab, reader: _core.TensorReader) -> None:
    a, b, c = fresh(sim, 8), fresh(sim, 4, 4), fresh(sim, 0)
    nodes, template = inputs(sim, reader, a, b, c)
    assert len(nodes) == 3
    assert template.count() > 1
    x, y = fresh(sim, 8), fresh(sim, 4, 4)
    found = nodes.sources((x, y, fresh(sim, 0)))
    assert found[:2] == [x.data_ptr(), y.data_ptr()]
    assert nodes.sources((a, b, c))[:2] == [a.data_ptr(), b.data_ptr()]


def test_what_the_kernel_cannot_copy_torch_has_copied(
    sim: SimLab, reader: _core.TensorReader
) -> None:
    a, b = fresh(sim, 6, 6), fresh(sim, 6, 12)[:, ::2].requires_grad_()
    nodes, _ = inputs(sim, reader, a, b)
    x, y = fresh(sim, 6, 6), fresh(sim, 6, 6).requires_grad_()
    assert nodes.sources((x.t(), y * 2)) == [a.data_ptr(), b.data_ptr()]
    assert torch.equal(a, x.t())
    assert torch.equal(b, y * 2)
    assert b.is_leaf


def test_static_tensors_that_share_memory_are_copied_in_order(
    sim: SimLab, reader: _core.TensorReader
) -> None:
    memory, d = fresh(sim, 32), fresh(sim, 4)
    a, b, c = memory[:16], memory[8:24], memory[24:]
    nodes, _ = inputs(sim, reader, a, b, c, d)
    x, y, z, w = fresh(sim, 16), fresh(sim, 16), fresh(sim, 8), fresh(sim, 4)
    assert nodes.sources((x, y, z, w)) == [
        a.data_ptr(),
        b.data_ptr(),
        z.data_ptr(),
        w.data_ptr(),
    ]
    assert torch.equal(memory[:24], torch.cat([x[:8], y]))


def test_static_tensors_as_arguments_of_others_are_copied_as_torch_would(
    sim: SimLab, reader: _core.TensorReader
) -> None:
    a, b = fresh(sim, 8), fresh(sim, 8)
    nodes, _ = inputs(sim, reader, a, b)
    old, new = b.clone(), fresh(sim, 8)
    assert nodes.sources((b, new)) == [a.data_ptr(), new.data_ptr()]
    assert torch.equal(a, old)


def test_a_wrong_number_of_tensors_is_refused(sim: SimLab, reader: _core.TensorReader) -> None:
    nodes, _ = inputs(sim, reader, fresh(sim, 8))
    with pytest.raises(ArgumentError, match="number of tensors is 0, expected 1"):
        nodes.sources(())


def test_a_static_tensor_that_was_resized_is_not_copied_to_on_the_simulator(sim: SimLab) -> None:
    for resize in (lambda x: x.resize_(1 << 20), lambda x: x.untyped_storage().resize_(0)):
        x, ladder = fresh(sim, 64), cgraph.GraphLadder()
        ladder.capture("a", lambda x: x[:2] * 2, x)
        resize(x)
        with pytest.raises(ArgumentError, match=r"static input 0 is at .*resize_ has moved it"):
            ladder("a", fresh(sim, 64))


def test_a_tensor_whose_memory_was_taken_away_is_refused(lab: Lab) -> None:
    ladder = cgraph.GraphLadder()
    ladder.capture("a", lambda x: x * 2, fresh(lab, 64))
    x = fresh(lab, 64)
    assert_close(ladder("a", x), x * 2)
    x.untyped_storage().resize_(0)
    with pytest.raises(ArgumentError, match="tensor 0 is without memory"):
        ladder("a", x)


def test_a_ladder_of_inference_mode_copies_strided_tensors_outside_of_it(lab: Lab) -> None:
    ladder = cgraph.GraphLadder()
    with torch.inference_mode():
        ladder.capture("a", lambda x: x * 2, fresh(lab, 4, 4))
    x = fresh(lab, 4, 4).t()
    assert_close(ladder("a", x), x * 2)
