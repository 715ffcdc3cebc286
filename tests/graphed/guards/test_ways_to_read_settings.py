"""Ways of Python to read a setting that callers change between calls: names, methods and others."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import cgraph
from engines import Settings
from graphed_calls import Case, alike_after, exchanges, quiet, sets, twins_agree
from lab import Lab, fresh

SCALE = 2.0
SETTINGS: Any = Settings(2.0)


class Layer(nn.Module):
    """A layer of a user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight: Any = nn.Parameter(torch.rand(3))
        self.weight.scale = self.layout = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def test_a_distribution_that_is_exchanged_is_read(lab: Lab) -> None:
    def normal() -> torch.distributions.Distribution:
        zero, width = torch.zeros(3, device=lab.device), fresh(lab, 3).abs() + 1
        return torch.distributions.Normal(zero, width, validate_args=False)

    policy: Any = SimpleNamespace(prior=normal())
    changes = sets(policy, "prior", normal(), normal())
    alike_after(lab, lambda x: policy.prior.log_prob(x), *changes, grad=True, rtol=1.3e-6)


def test_a_function_that_takes_from_its_own_list_runs_eagerly(lab: Lab) -> None:
    def storing(lab: Lab) -> Case:
        free, cache = [*range(10)], torch.zeros(10, device=lab.device)

        def store(x: Tensor) -> Tensor:
            cache[free.pop()] = x
            return cache * 1

        return Case(store, state=lambda: (free, cache), shape=(1,))

    twins_agree(lab, storing)


def test_settings_behind_thousands_of_places_are_followed(lab: Lab) -> None:
    model = nn.Sequential(*(Layer() for _ in range(1500))).to(lab.device)

    class Whole:
        scale = 2.0

        def run(self, x: Tensor) -> Tensor:
            return model[0](x) * self.scale

    whole = Whole()
    alike_after(lab, whole.run, *sets(whole, "scale", 3.0), calls=1)


def test_globals_may_change(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = [
        lambda scale=scale: globals().update(SCALE=scale, SETTINGS=Settings(-scale))
        for scale in (0.5, 3.0)
    ]
    for name in ("SCALE", "SETTINGS"):
        monkeypatch.setitem(globals(), name, globals()[name])
    alike_after(lab, lambda x: x * SCALE + SETTINGS.scale, *changes, grad=True, calls=1)


def test_variables_of_a_closure_may_change(lab: Lab) -> None:
    by = 2.0

    def change() -> None:
        nonlocal by
        by = 0.5 if by == 2.0 else 3.0

    alike_after(lab, lambda x: x * by, change, change, grad=True, calls=1)


def test_how_much_a_dropout_drops_may_change(lab: Lab) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).to(lab.device)
    graphed = cgraph.graphed(net)
    with torch.no_grad():
        graphed(fresh(lab, 4, 3))
        for drop, is_any in ((1.0, False), (0.0, True)):
            net[1].p = drop
            x = fresh(lab, 4, 3)
            expected = net[0](x) if is_any else torch.zeros_like(x)
            assert_close(graphed(x), expected)


class Scaling:
    def scaled(self, x: Tensor) -> Tensor:
        return x * SCALE


class Named(NamedTuple):
    number: float = 1.0

    def scaled(self, x: Tensor) -> Tensor:
        return x * SCALE


class OfDict(dict[str, int], Scaling):
    pass


class OfList(list[int], Scaling):
    pass


class OfText(str, Scaling):
    pass


class Number(enum.IntEnum):
    ONE = 1

    def scaled(self, x: Tensor) -> Tensor:
        return x * SCALE


class OfTensor(Tensor):
    def scaled(self, x: Tensor) -> Tensor:
        return x * SCALE


class Meta(type):
    def scaled(cls, x: Tensor) -> Tensor:
        return x * SCALE


class OfMeta(metaclass=Meta):
    pass


class Wrapping:
    """A wrapper made by the function that reads it."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    @property
    def scaled(self) -> Tensor:
        return self.x * SCALE

    @functools.cached_property
    def kept(self) -> Tensor:
        return self.x * SCALE


named, number, meta = Named(), Number.ONE, OfMeta
of_dict, of_list, of_text = OfDict(one=1), OfList([1]), OfText("one")
of_tensor = torch.ones(2).as_subclass(OfTensor)
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "a named tuple": lambda x: named.scaled(x),
    "a dictionary": lambda x: of_dict.scaled(x),
    "a list": lambda x: of_list.scaled(x),
    "a text": lambda x: of_text.scaled(x),
    "a member of an enumeration": lambda x: number.scaled(x),
    "a tensor": lambda x: of_tensor.scaled(x),
    "a class of a metaclass": lambda x: meta.scaled(x),
    "a property": lambda x: Wrapping(x).scaled,
    "a cached property": lambda x: Wrapping(x).kept,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_number_that_a_method_or_getter_reads_is_followed(
    lab: Lab, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    alike_after(lab, FUNCTIONS[name], *sets(globals(), "SCALE", 5.0, 2.0, 5.0))


class Holding(nn.Module):
    """A module with a value that is neither a parameter nor a buffer."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


@pytest.mark.parametrize("depth", [1, 2])
def test_a_tensor_of_a_module_that_a_method_of_a_plain_object_reads_is_followed(
    lab: Lab, depth: int
) -> None:
    inner = Holding(fresh(lab, 3))
    outer: Any = inner if depth == 1 else Holding(inner)

    class Reader:
        def shifted(self, x: Tensor) -> Tensor:
            return x + (outer.value if depth == 1 else outer.value.value)

    reader = Reader()
    alike_after(lab, lambda x: reader.shifted(x), *exchanges(inner, "value"))


@pytest.mark.parametrize("key", ["four", 4])
def test_a_key_that_code_tries_in_vain_is_noticed_once_it_is_there(lab: Lab, key: Any) -> None:
    space, table = SimpleNamespace(known={3: fresh(lab, 3)}), {3: fresh(lab, 3)}

    def shifted(x: Tensor) -> Tensor:
        try:
            x = x + (space.known[4] if key == 4 else space.known["four"])
        except KeyError:
            x = x * 3
        try:
            return x + (table[4] if key == 4 else table["four"])
        except KeyError:
            return x * 5

    known = {3: fresh(lab, 3), key: fresh(lab, 3)}
    alike_after(lab, shifted, *sets(table, key, fresh(lab, 3)), *sets(space, "known", known))


def test_whether_a_tensor_requires_a_gradient_counts_where_an_array_is_read(lab: Lab) -> None:
    scale, plain = numpy.array([2.0]), fresh(lab, 3)

    def shifted(x: Tensor) -> Tensor:
        return (x + plain) * float(scale[0])

    function = cgraph.graphed(shifted)
    with quiet():
        for is_asked in (False, True, False):
            plain.requires_grad_(is_asked)
            for _ in range(2):
                assert function(fresh(lab, 3)).requires_grad == is_asked


class OfClasses(type):
    """A class of classes."""

    scale = 2.0


class ByClass(metaclass=OfClasses):
    """An object that reads an attribute of its class's class."""

    def __call__(self, x: Tensor) -> Tensor:
        return x * type(self).scale


BY_CLASS = ByClass()


@pytest.mark.parametrize("function", [lambda x: x * ByClass.scale, lambda x: BY_CLASS(x)])
def test_an_attribute_of_a_metaclass_is_seen(
    lab: Lab, function: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OfClasses, "scale", 2.0)
    alike_after(lab, function, *sets(OfClasses, "scale", 3.0, 2.0), grad=True, calls=4)


def test_layouts_whose_words_once_made_one_number_are_told_apart(lab: Lab) -> None:
    multiplier, mask = 0x9E3779B97F4A7C15, (1 << 64) - 1

    def rotated(value: int) -> int:
        return ((value << 5) | (value >> 59)) & mask

    def mixed(*words: int) -> int:
        number = 0
        for word in words:
            number = (rotated(number) ^ word) * multiplier & mask
        return number

    pairs = (
        (step, 1 ^ rotated(mixed(2, 1, 1)) ^ rotated(mixed(2, step, 1))) for step in range(2, 40)
    )
    step, other = next((step, other) for step, other in pairs if other < 1 << 62)
    memory = torch.arange(100.0, device=lab.device)
    box = SimpleNamespace(rows=memory.as_strided((2, 1), (1, 1)))
    fast = cgraph.graphed(lambda x: x + box.rows)
    x = torch.zeros(2, 1, device=lab.device)
    for _ in range(3):
        fast(x)
    # The stride of a dimension of one means nothing.
    box.rows = memory.as_strided((2, 1), (step, other))
    assert torch.equal(fast(x), box.rows)
