"""Views that somebody makes anew before each call, of tensors that a graph reads where they lie."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import cgraph
from graphed_calls import near, numbers
from lab import Lab, fresh

TABLE = torch.zeros(0)

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "slice": lambda table: table[:3],
    "view": lambda table: table[:3].view(3, 4),
    "detached": lambda table: table[:3].detach(),
    "turned": lambda table: table[:, :3].t(),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_of_one_place_that_are_made_anew_are_one_graph(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    table, module, context = fresh(lab, 4, 4), nn.Module(), SimpleNamespace()
    module.register_buffer("table", table)
    graphed = [
        cgraph.graphed(lambda x: x + context.table),
        cgraph.graphed(lambda x: x + TABLE),
        cgraph.graphed(lambda x: x + module.table),
    ]
    with torch.no_grad():
        for _ in range(8):
            table.copy_(fresh(lab, 4, 4))
            view = VIEWS[name](table)
            context.table, module.table = view, VIEWS[name](table)
            monkeypatch.setitem(globals(), "TABLE", VIEWS[name](table))
            for one in graphed:
                x = fresh(lab, 3, 4)
                assert near(one(x), x + view)
    assert [numbers(one) for one in graphed] == [(1, 8, 0)] * 3


def test_what_a_graph_writes_through_a_view_is_written_to_what_it_is_of(lab: Lab) -> None:
    cache, context = fresh(lab, 6, 4), SimpleNamespace()

    def store(x: Tensor) -> Tensor:
        context.rows.copy_(x)
        return context.rows.sum(0)

    graphed = cgraph.graphed(store)
    for _ in range(4):
        context.rows, x = cache[2:5], fresh(lab, 3, 4)
        assert near(graphed(x), x.sum(0))
        assert torch.equal(cache[2:5], x)
    assert numbers(graphed) == (1, 4, 0)


@pytest.mark.parametrize(
    "other",
    [
        lambda table: table[1:4],
        lambda table: table[:3].flip(0),
        lambda table: table[:, :3].t(),
        lambda table: table[:3].clone(),
        lambda table: torch.view_as_complex(table[:3].view(3, 2, 2)).conj(),
    ],
)
def test_a_view_of_another_place_is_captured_anew(
    lab: Lab, other: Callable[[Tensor], Tensor]
) -> None:
    table, context = fresh(lab, 4, 4), SimpleNamespace()
    graphed = cgraph.graphed(lambda x: x + context.table.sum())
    with torch.no_grad():
        for view in (VIEWS["slice"], other, VIEWS["slice"], other):
            context.table, x = view(table), fresh(lab, 3, 4)
            assert near(graphed(x), x + context.table.sum())
    assert graphed.report().keys[0].rerecorded[0].argument.startswith("context.table")


def test_a_tensor_that_gets_gradients_is_another_one_if_it_is_made_anew(lab: Lab) -> None:
    net = nn.Linear(4, 2).to(lab.device)
    graphed = cgraph.graphed(net)
    for _ in range(3):
        net.weight = nn.Parameter(net.weight.data)
        x = fresh(lab, 3, 4)
        graphed(x).sum().backward()
        assert net.weight.grad is not None
        assert near(net.weight.grad, x.sum(0).expand(2, 4))


def test_a_view_that_has_an_attribute_is_another_one_if_it_is_made_anew(lab: Lab) -> None:
    table, context = fresh(lab, 4), SimpleNamespace()
    graphed = cgraph.graphed(lambda x: x * context.table * getattr(context.table, "scale", 1.0))
    with torch.no_grad():
        for scale in (2.0, 2.0, 5.0, 3.0):
            context.table, x = table.view(4), fresh(lab, 3, 4)
            context.table.scale = scale
            assert near(graphed(x), x * table * scale)


def test_a_view_that_requires_a_gradient_is_another_one_if_it_is_made_anew(lab: Lab) -> None:
    table, context = fresh(lab, 4), SimpleNamespace()
    graphed = cgraph.graphed(lambda x: (x * context.table, context.table.requires_grad))
    with torch.no_grad():
        for requires in (False, True, False):
            context.table, x = table.detach().requires_grad_(requires), fresh(lab, 3, 4)
            result, does = graphed(x)
            assert near(result, x * table)
            assert does is requires
