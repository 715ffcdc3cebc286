"""Guards of tensors: address, layout, and no user code that runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cgraph import _core
from one_place import guards_on, plain
from readers import EXCHANGE_API, reader_by_fields

NOTHING: frozenset[str] = frozenset()


def changed_tensors() -> dict[str, Callable[[Tensor], object]]:
    return {
        "moved": lambda one: one.set_(one.clone()),
        "resized": lambda one: one.resize_(3, 2),
        "turned": lambda one: one.t_(),
        "cut": lambda one: one.set_(one[:1]),
        "asked": lambda one: one.requires_grad_(),
    }


@pytest.mark.parametrize(
    ("change", "dims"),
    # Only matrices are transposed.
    [
        (name, dims)
        for name in changed_tensors()
        for dims in (2, 7)
        if (name, dims) != ("turned", 7)
    ],
)
def test_a_tensor_that_has_changed_does_not_fit(change: str, dims: int) -> None:
    one = torch.ones(2, 3) if dims == 2 else torch.ones(2, 3, 1, 1, 1, 1, 1)
    root = plain(a=one)
    guards = guards_on(root, ("attr", "a"), check=("tensor", one))
    assert guards.fits()
    one.add_(1)
    assert guards.fits() and guards.changed() == []
    changed_tensors()[change](one)
    assert not guards.fits() and [place for place, *_ in guards.changed()] == [1]


def test_another_tensor_at_the_same_place_fits() -> None:
    one = torch.ones(2, 3)
    root = plain(a=one)
    guards = guards_on(root, ("attr", "a"), check=("tensor", one))
    root.a = one.detach()
    assert guards.fits() and guards.changed() == []
    for other in (
        one.clone(),
        one.t(),
        one.view(torch.int32),
        one[:1],
        one.detach().requires_grad_(),
        torch.nn.Parameter(one, requires_grad=False),
        one.to("meta"),
    ):
        root.a = other
        assert not guards.fits(), other
        assert len(guards.changed()) == 1
    root.a = one.view(2, 3)
    assert guards.fits()


def test_parameters_of_modules_are_followed() -> None:
    layer = torch.nn.Linear(3, 3)
    places = [
        (-1, ("root", layer), ("object", torch.nn.Linear, frozenset(["forward"]))),
        (
            0,
            ("attr", "_parameters"),
            ("dict", type(layer._parameters), tuple(layer._parameters), NOTHING),
        ),
        (1, ("item", "weight"), ("tensor", layer.weight)),
        (0, ("attr", "training"), ("plain", True)),
        (0, ("class", "forward"), ("is", torch.nn.Linear.forward)),
    ]
    guards = _core.Guards(places, reader_by_fields())
    assert guards.fits()
    layer.eval()
    assert not guards.fits()
    layer.train()
    assert guards.fits()
    kept = layer.weight
    layer.weight = torch.nn.Parameter(kept.detach())
    assert guards.fits()
    layer.weight = torch.nn.Parameter(kept.detach().clone())
    assert guards.changed() == [(2, layer.weight, True)] and not guards.fits()
    layer.weight = kept
    kept.requires_grad_(False)
    assert not guards.fits()
    kept.requires_grad_(True)
    layer.forward = None  # type: ignore[assignment]
    assert not guards.fits()


@pytest.mark.parametrize("api", [None, EXCHANGE_API], ids=["by_python", "by_exchange"])
def test_tensors_of_the_users_classes_run_no_code(api: object) -> None:
    called: list[object] = []

    class Ours(Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, *_: Any, **__: Any) -> Any:
            called.append(function)

    with torch._C.DisableTorchFunctionSubclass():
        one = torch.ones(2).as_subclass(Ours)
        other = one.detach().as_subclass(Ours)
        elsewhere = one.clone().as_subclass(Ours)
    root = plain(a=one)
    places = [(-1, ("root", root), ("is", root)), (0, ("attr", "a"), ("tensor", one))]
    for reader in (_core.TensorReader(Tensor, api), reader_by_fields()):
        guards = _core.Guards(places, reader)
        assert guards.fits() and guards.changed() == []
        root.a = other
        assert guards.fits()
        root.a = elsewhere
        assert not guards.fits()
        root.a = one
    assert not called
