"""What a graphed function says of its keys: what differs between them, and how to mend them."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from cgraph.errors import StateError
from lab import Lab, SimLab, fresh


def texts(graphed: cgraph.functions.GraphedFunction) -> list[str]:
    return [key.key for key in graphed.report().keys]


def test_what_is_given_in_another_way_has_other_words(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda x, y, n=1: x * y * n)
    x, y = fresh(lab, 3), fresh(lab, 3)
    with torch.no_grad():
        for args, kwargs in (((x, y), {}), ((x,), {"y": y}), ((x, y, 2), {}), ((x, y), {"n": 2})):
            graphed(*args, **kwargs)
    assert texts(graphed) == [
        "x: float32[3], y: float32[3]",
        "x: float32[3], y=float32[3]",
        "x: float32[3], y: float32[3], n=2",
        "x: float32[3], y: float32[3], n=2, given in way 2",
    ]
    graphed.freeze()
    said = r"x=float32\[3\], y=float32\[3\]\).*in another way"
    with torch.no_grad(), pytest.raises(StateError, match=said):
        graphed(x=x, y=y)


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


def test_objects_that_are_new_in_each_call_are_said_to_be_others(lab: Lab) -> None:
    @dataclass(frozen=True)
    class Values:
        factor: float = 2.0

    class Plain:
        factor = 2.0

    def scaled(x: Tensor, by: Any) -> Tensor:
        return x * by.factor

    of_values, of_objects = cgraph.graphed(scaled), cgraph.graphed(scaled)
    with pytest.warns(UserWarning, match=r"too many keys.*compares values, as a frozen dataclass"):
        for _ in range(9):
            x = fresh(lab, 3)
            assert torch.equal(of_values(x, Values()), x * 2)
            assert torch.equal(of_objects(x, Plain()), x * 2)
    assert (len(texts(of_values)), len(texts(of_objects))) == (1, 9)


def test_strides_are_those_that_a_graph_reads(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda x, y: x + y, static_argnums=1)
    rows = fresh(lab, 4, 8)
    given = rows[:, :4], rows[:, ::2], rows[:, :4].t(), rows[:, :4].contiguous()
    with torch.no_grad():
        for one in given:
            assert torch.equal(graphed(one, one), one * 2)
    assert texts(graphed) == [
        "x: float32[4, 4] not contiguous, y: float32[4, 4] strides [8, 1]",
        "x: float32[4, 4] not contiguous, y: float32[4, 4] strides [8, 2]",
        "x: float32[4, 4] strides [1, 4], y: float32[4, 4] strides [1, 8]",
        "x: float32[4, 4], y: float32[4, 4]",
    ]


def test_keys_that_differ_have_different_words(lab: Lab) -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0)).to(lab.device)
    graphed = cgraph.graphed(module)
    x = fresh(lab, 3, 3)
    for is_training in (True, False):
        module.train(is_training)
        graphed(x)
        with torch.no_grad():
            graphed(x)
    module[1].train()
    with torch.no_grad():
        graphed(x)
        graphed(x.t())
        with torch.autocast(lab.device, torch.bfloat16):
            graphed(x)
    module[0].weight.requires_grad_(False)
    graphed(x)
    assert texts(graphed) == [
        "input: float32[3, 3], grad, training, 2 weights with grad",
        "input: float32[3, 3], training",
        "input: float32[3, 3], grad, eval, 2 weights with grad",
        "input: float32[3, 3], eval",
        "input: float32[3, 3], training: 1 of 3 modules",
        "input: float32[3, 3] strides [1, 3], training: 1 of 3 modules",
        "input: float32[3, 3], autocast bfloat16, training: 1 of 3 modules",
        "input: float32[3, 3], grad, training: 1 of 3 modules, 1 weight with grad",
    ]


def test_a_long_constant_is_shown_as_far_as_it_goes(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda x, name: x + len(name))
    with torch.no_grad():
        graphed(fresh(lab, 2), "a" * 60)
    assert texts(graphed) == ["x: float32[2], name='" + "a" * 39 + "…"]


def test_a_frozen_function_names_what_its_missing_key_has(lab: Lab) -> None:
    module = nn.Linear(3, 3).to(lab.device).eval()
    graphed = cgraph.graphed(module)
    x = fresh(lab, 2, 3)
    with torch.no_grad():
        graphed.capture(x).freeze()
        module.train()
        with pytest.raises(StateError, match=r"the key \(input: float32\[2, 3\], training\)"):
            graphed(x)


def test_a_frozen_function_names_what_has_moved_and_keeps_its_graph(lab: Lab) -> None:
    module = nn.Linear(3, 3).to(lab.device).eval()
    graphed = cgraph.graphed(module)
    x, weight = fresh(lab, 2, 3), module.weight
    with torch.no_grad():
        graphed.capture(x).freeze()
        module.weight = nn.Parameter(fresh(lab, 3, 3))
        with pytest.raises(StateError, match=r"frozen, and weight is another one .*put it back"):
            graphed(x)
        module.weight = weight
        torch.testing.assert_close(graphed(x), module(x))


def test_a_call_that_raises_in_its_warm_up_leaves_no_key(lab: Lab) -> None:
    def wrong(x: Tensor) -> Tensor:
        raise ValueError("mine")

    graphed = cgraph.graphed(wrong)
    for _ in range(2):
        with pytest.raises(ValueError, match="mine"):
            graphed(fresh(lab, 2))
    assert texts(graphed) == []


FAILURES: list[tuple[Callable[[Tensor], object], str]] = [
    (lambda x: x * x.sum().item(), "return the tensor and read it after the replay"),
    (lambda x: x if x.sum() > 0 else -x, "choose on the device with torch.where"),
    (lambda x: x[x > 0], "keep the shape fixed"),
]


@pytest.mark.parametrize(("function", "fix"), FAILURES)
def test_a_failed_capture_says_how_to_mend_the_line(
    lab: Lab, function: Callable[[Tensor], object], fix: str
) -> None:
    graphed = cgraph.graphed(function)
    with pytest.warns(UserWarning, match=f"test_graphed_words.py.*What to do: {fix}"):
        graphed(fresh(lab, 4))
    (key,) = graphed.report().keys
    assert key.fix is not None and key.fix.startswith(fix)
    assert key.advice == f"{key.fix}; or mark the work with @cgraph.eager_break. Then call reset()"


def test_a_stream_that_is_not_joined_is_said_to_be_joined(sim: SimLab) -> None:
    def forgetful(x: Tensor) -> Tensor:
        side = sim.stream()
        sim.fork(side)
        with sim.use(side):
            x * 2
        return x + 1

    with pytest.warns(UserWarning, match="let the capturing stream wait for it afterwards"):
        cgraph.graphed(forgetful)(fresh(sim, 4))


def test_a_module_that_moves_too_often_is_captured_as_often_as_is_said(lab: Lab) -> None:
    runs = []

    def read(x: Tensor, cache: Tensor) -> Tensor:
        runs.append(cgraph.is_current_stream_capturing())
        return x + cache

    graphed = cgraph.graphed(read, static_argnames="cache", max_recording=2)
    x, caches = fresh(lab, 3), [fresh(lab, 3) for _ in range(4)]
    for cache in caches[:3]:
        graphed(x, cache)
    with pytest.warns(UserWarning, match="moved too often: cache, 3 times"):
        graphed(x, caches[3])
    (key,) = graphed.report().keys
    assert runs.count(True) == 3
    assert [(one.argument, one.count) for one in key.rerecorded] == [("cache", 2)]


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
def test_what_is_refused_for_an_iterator_is_no_matter_of_random_numbers(lab: Lab) -> None:
    def numbers() -> Iterator[int]:
        yield from range(100)

    source = numbers()
    graphed = cgraph.graphed(lambda x: x * next(source))
    for _ in range(2):
        graphed(fresh(lab, 3))
    (key,) = graphed.report().keys
    assert "takes" in str(key.reason) or "take it before" in str(key.reason)
    assert "register_generator_state" not in str(key.advice)


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
def test_a_pool_that_is_too_small_and_attributes_of_tensors_have_advice(lab: Lab) -> None:
    pool = cgraph.MemPool(limit=2 << 20)
    graphed = cgraph.graphed(lambda x: x * 2, pool=pool)
    x = fresh(lab, 1 << 21)
    assert torch.equal(graphed(x), x * 2)
    assert "a larger limit= of the pool" in str(graphed.report().keys[0].advice)
    tagged: Any = fresh(lab, 3)
    tagged.tag = 2.0
    other = cgraph.graphed(lambda x: x * getattr(x, "tag", 1.0))
    assert torch.equal(other(tagged), tagged * 2)
    assert other.report().keys[0].advice == "pass what they hold as arguments of their own"
