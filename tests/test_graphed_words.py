"""What a graphed function says of its keys: what differs between them, and how to mend them."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

import torch

import cgraph
from lab import Lab, fresh


def texts(graphed: cgraph.functions.GraphedFunction) -> list[str]:
    return [key.key for key in graphed.report().keys]


def test_a_container_of_another_kind_is_named_and_its_items_as_in_others(lab: Lab) -> None:
    class Pair:
        def __init__(self, *parts: Any) -> None:
            self.parts = parts

    torch.utils._pytree.register_pytree_node(
        Pair, lambda pair: ([*pair.parts], None), lambda parts, _: Pair(*parts)
    )
    graphed = cgraph.graphed(lambda d: torch.utils._pytree.tree_leaves(d)[0] * 2)
    x, size = fresh(lab, 3), torch.Size([2])
    with torch.no_grad():
        for one in ({"a": x}, OrderedDict(a=x), OrderedDict(a=[x, size]), Pair(x), deque([x])):
            assert torch.equal(graphed(one), x * 2)
    assert texts(graphed) == [
        "d['a']: float32[3]",
        "d: OrderedDict, d['a']: float32[3]",
        "d: OrderedDict, d['a'][0]: float32[3], d['a'][1]=torch.Size([2])",
        f"d: {Pair.__qualname__}, d.0: float32[3]",
        "d: deque, d[0]: float32[3]",
    ]


def test_a_long_constant_is_shown_as_far_as_it_goes(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda x, name: x + len(name))
    with torch.no_grad():
        graphed(fresh(lab, 2), "a" * 60)
    assert texts(graphed) == ["x: float32[2], name='" + "a" * 39 + "…"]
