"""`weak_ref`: tensors that own no memory of their pool."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import cgraph
from cgraph import MemPool, _torch, weak_ref
from cgraph.errors import ArgumentError
from lab import CudaLab, Lab, fresh
from pools import MIB, capture


class Owner:
    """What a tensor may keep."""


def of_device(lab: Lab, *shape: int) -> tuple[Tensor, Any]:
    """Return a tensor that a graph has computed in a pool, and what keeps the pool."""
    x = fresh(lab, *shape)
    graph, y = capture(lambda: x * 2, MemPool())
    graph.replay()
    return y, (graph, x)


def test_outputs_of_which_only_weak_references_are_left_lie_where_later_captures_write(
    lab: Lab,
) -> None:
    pool, kept = MemPool(), []
    for rows in (8, 4, 2, 1):
        x = fresh(lab, rows, MIB)
        graph, y = capture(lambda x=x: x * 2, pool)
        kept.append((graph, x, weak_ref(y)))
        del y
    assert pool.stats()["reserved"] == 8 * 4 * MIB
    for graph, x, y in [*kept, *reversed(kept)]:
        x.normal_()
        graph.replay()
        assert torch.equal(y, x * 2)


def test_the_last_output_can_be_given_up_inside_of_the_capture(lab: Lab) -> None:
    pool, x = MemPool(), fresh(lab, MIB)
    graph = cgraph.CUDAGraph()
    with cgraph.graph(graph, pool=pool):
        y = weak_ref(x * 2)
    before = pool.stats()["reserved"]
    other, z = capture(lambda: x * 3, pool)
    assert pool.stats()["reserved"] == before
    graph.replay()
    assert torch.equal(y, x * 2)
    other.replay()
    assert torch.equal(z, x * 3)


def test_a_tree_keeps_its_form_and_what_is_no_tensor_of_the_device(lab: Lab) -> None:
    y, _keeps = of_device(lab, 4, 2)
    host, empty = torch.ones(2), y[:0]
    found = weak_ref({"y": [y, 3, "text"], "host": (host, None), "empty": empty})
    assert found["y"][1:] == [3, "text"]
    assert found["host"][0] is host
    assert found["host"][1] is None
    assert found["empty"] is empty
    assert torch.equal(found["y"][0], y)
    assert found["y"][0].data_ptr() == y.data_ptr()


def test_tensors_that_share_memory_share_it_again(lab: Lab) -> None:
    y, _keeps = of_device(lab, 4, 2)
    whole, rows, turned = weak_ref((y, y[1:3], y.t()))
    assert torch.equal(rows, y[1:3])
    assert torch.equal(turned, y.t())
    storages = {_torch.storage_id(one.untyped_storage()) for one in (whole, rows, turned)}
    assert len(storages) == 1


def test_a_weak_tensor_lies_in_its_storage_as_the_one_that_it_stands_for(lab: Lab) -> None:
    y, _keeps = of_device(lab, 6, 4)
    for one in (y, y[:2], y[3:], y.t(), y[2, 1], y[:, None], y.as_strided((2, 1, 2), (2, 7, 1))):
        found = weak_ref(one)
        places = [(t.data_ptr(), t.shape, t.stride(), t.storage_offset()) for t in (one, found)]
        assert places[0] == places[1]
        assert found.untyped_storage().nbytes() == y.untyped_storage().nbytes()
        assert torch.equal(found, one)


def test_each_dtype_and_lazy_views_come_out_as_they_are(lab: Lab) -> None:
    for dtype in (torch.bfloat16, torch.int8, torch.bool, torch.complex64, torch.float64):
        x = fresh(lab, 8).to(dtype)
        graph, y = capture(lambda x=x: x.clone(), MemPool())
        graph.replay()
        assert torch.equal(weak_ref(y), x)
        if dtype.is_complex:
            found = weak_ref(y.conj())
            assert found.is_conj()
            assert torch.equal(found, x.conj())


def test_a_weak_tensor_has_no_history_and_cannot_be_resized(lab: Lab) -> None:
    y, _keeps = of_device(lab, 4)
    found = weak_ref(y.requires_grad_() * 1 if lab.device == "cuda" else y)
    assert found.grad_fn is None
    assert not found.requires_grad
    for resize in (found.resize_, found.untyped_storage().resize_):
        with pytest.raises(RuntimeError, match="not resizable"):
            resize(1000)


@pytest.mark.gpu
def test_record_stream_of_a_weak_tensor_does_nothing() -> None:
    lab = CudaLab()
    with torch.cuda.use_mem_pool(pool := MemPool()):
        y = fresh(lab, MIB)
    stream, address = torch.cuda.Stream(), y.data_ptr()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
    weak_ref(y).record_stream(stream)
    del y
    # Its block would wait for the stream.
    with torch.cuda.use_mem_pool(pool):
        assert fresh(lab, MIB).data_ptr() == address


def test_modes_do_not_see_that_a_weak_tensor_is_made(lab: Lab) -> None:
    y, _keeps = of_device(lab, 4)
    with FakeTensorMode():
        found = weak_ref(y)
    assert type(found) is Tensor
    with torch.device("meta"):
        assert torch.equal(weak_ref(y), y)


class Derived(Tensor):
    """A class of tensors of the user's."""


def test_a_tensor_of_the_device_that_is_more_than_its_memory_is_refused(lab: Lab) -> None:
    y, _keeps = of_device(lab, 4)
    with pytest.raises(ArgumentError, match="plain strided tensors"):
        weak_ref(y.as_subclass(Derived))


@pytest.mark.gpu
def test_a_sparse_tensor_of_the_device_is_refused() -> None:
    with pytest.raises(ArgumentError, match="plain strided tensors"):
        weak_ref(torch.eye(4, device="cuda").to_sparse())


def test_tensors_without_contents_stay_as_they_are(lab: Lab) -> None:
    with FakeTensorMode():
        fake = torch.ones(3)
    meta = torch.ones(3, device="meta")
    found = weak_ref([fake, meta])
    assert found[0] is fake
    assert found[1] is meta


@pytest.mark.parametrize("is_inference", [False, True])
def test_an_owner_lives_as_long_as_anything_over_the_memory(lab: Lab, is_inference: bool) -> None:
    with torch.inference_mode(is_inference):
        y = fresh(lab, 8)
        owner = Owner()
        (found,) = _torch.unowned([y], owner)
    assert found.is_inference() == is_inference
    alive = weakref.ref(owner)
    del owner
    exported: Any = torch.utils.dlpack.to_dlpack(found[2:])
    rows = found.view(2, 4)
    del found
    gc.collect()
    assert alive() is not None
    del rows
    assert alive() is not None
    del exported
    assert alive() is None


def test_a_capsule_that_nobody_takes_lets_its_owner_go() -> None:
    owner = Owner()
    alive = weakref.ref(owner)
    from cgraph import _core

    with pytest.raises(cgraph.errors.ArgumentError, match="number of strides is 2"):
        _core.lent_memory(4096, ((1, 8), [8], [1, 1]), None, owner)
    capsule = _core.lent_memory(4096, ((1, 8), [8], [1]), None, owner)
    del owner
    assert alive() is not None
    del capsule
    assert alive() is None
