"""Guards: each way to a place, each check there, and no user code that runs."""

from __future__ import annotations

import collections
import enum
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from cgraph import _core, _driver, _torch
from cgraph._captures.last_stream import last_stream
from cgraph.errors import ArgumentError
from guarded import Derived, Plain, Slotted, World, cell_of
from one_place import guards_on, plain
from readers import reader_by_fields

NOTHING: frozenset[str] = frozenset()
Pair = collections.namedtuple("Pair", "a b")


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Noisy:
    """An object that fails if its own code runs, however it is accessed."""

    def fail(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("code of the user's has run")

    __eq__ = __hash__ = __len__ = __iter__ = __bool__ = __contains__ = fail  # type: ignore[assignment]
    __getattr__ = __getattribute__ = __getitem__ = __repr__ = fail  # type: ignore[assignment]


class NoisyMeta(type):
    """A metaclass whose classes fail when they are asked for anything."""

    def __getattribute__(cls, name: str) -> Any:
        raise AssertionError("code of the user's has run")


class NoisyList(list[Any]):
    __len__ = __getitem__ = __iter__ = __eq__ = Noisy.fail  # type: ignore[assignment]


class NoisyDict(dict[Any, Any]):
    __len__ = __getitem__ = __iter__ = __eq__ = __contains__ = get = Noisy.fail  # type: ignore[assignment]


class NoisyDeque(collections.deque[Any]):
    __len__ = __getitem__ = __iter__ = __eq__ = Noisy.fail  # type: ignore[assignment]


class NoisySet(set[Any]):
    __len__ = __iter__ = __eq__ = __contains__ = Noisy.fail  # type: ignore[assignment]


def change_slot(one: Slotted) -> None:
    del one.a


def slotted() -> Slotted:
    made = Slotted()
    made.a = 1
    return made


MODULE = types.ModuleType("some")
MODULE.value = 1  # type: ignore[attr-defined]

STEPS: list[tuple[Callable[[], Any], tuple[Any, ...], Callable[[Any], object]]] = [
    (lambda: plain(a=1), ("attr", "a"), lambda one: setattr(one, "a", 2)),
    (lambda: MODULE, ("attr", "value"), lambda one: vars(one).pop("value")),
    (slotted, ("slot", Slotted.__dict__["a"]), lambda one: setattr(one, "a", 2)),
    (slotted, ("slot", Slotted.__dict__["a"]), change_slot),
    (lambda: [0, 1], ("item", 1), lambda one: one.reverse()),
    (lambda: [0, 1], ("item", 1), lambda one: one.pop()),
    (lambda: collections.deque([0, 1]), ("item", 1), lambda one: one.rotate()),
    (lambda: {"k": 1}, ("item", "k"), lambda one: one.clear()),
    (lambda: {Color.RED: 1}, ("item", Color.RED), lambda one: one.update({Color.RED: 2})),
    (lambda: {(1, 2): 1}, ("item", (1, 2)), lambda one: one.pop((1, 2))),
    (lambda: collections.OrderedDict(k=1), ("item", "k"), lambda one: one.update(k=True)),
    (lambda: cell_of(1), ("cell",), lambda one: setattr(one, "cell_contents", 2)),
    (lambda: cell_of(1), ("cell",), lambda one: delattr(one, "cell_contents")),
]


@pytest.mark.parametrize(
    ("make", "step", "change"),
    STEPS,
    ids=[f"{step[0]} {i}" for i, (_, step, _) in enumerate(STEPS)],
)
def test_each_step_leads_to_what_is_there(
    make: Callable[[], Any], step: tuple[Any, ...], change: Callable[[Any], object]
) -> None:
    root = make()
    guards = guards_on(root, step, check=("plain", 1))
    assert guards.fits() and guards.fits() and guards.changed() == []
    change(root)
    assert not guards.fits()
    assert [place for place, *_ in guards.changed()] == [1]


def test_what_is_changed_is_said_with_what_is_there() -> None:
    root = plain(a=1, b=plain(c=1))
    places = [
        (-1, ("root", root), ("object", Plain, NOTHING)),
        (0, ("attr", "a"), ("plain", 1)),
        (0, ("attr", "b"), ("kind", Plain)),
        (2, ("attr", "c"), ("plain", 1)),
        (0, ("attr", "d"), ("missing",)),
    ]
    guards = _core.Guards(places)
    root.a, root.b, root.d = 5, 6, None  # type: ignore[attr-defined]
    assert guards.changed() == [(1, 5, True)]
    assert guards.changed(all=True) == [(1, 5, True), (2, 6, True), (4, None, True)]
    del root.a
    assert guards.changed() == [(1, None, False)]


def test_a_class_is_looked_through_with_those_it_is_derived_from() -> None:
    for root in (Derived(), Derived):
        guards = _core.Guards(
            [(-1, ("root", root), ("is", root)), (0, ("class", "shared"), ("plain", 1))]
        )
        assert guards.fits()
        Derived.shared = 2
        assert not guards.fits()
        del Derived.shared
        assert guards.fits()


def test_what_a_class_has_comes_without_its_descriptor() -> None:
    class Owner:
        @property
        def value(self) -> Any:
            raise AssertionError("code of the user's has run")

    descriptor = Owner.__dict__["value"]
    guards = _core.Guards(
        [(-1, ("root", Owner()), ("kind", Owner)), (0, ("class", "value"), ("is", descriptor))]
    )
    assert guards.fits()


def test_objects_of_a_call_are_looked_into() -> None:
    places = [
        (-1, ("object", 1), ("object", Plain, NOTHING)),
        (0, ("attr", "a"), ("plain", 1)),
    ]
    guards = _core.Guards(places)
    one, other = plain(a=1), plain(a=1)
    for _ in range(3):
        assert guards.fits([None, one]) and guards.fits([None, one])
        assert guards.fits([None, other])
    other.a = 2
    assert guards.fits([None, one]) and not guards.fits([None, other])
    assert guards.changed([None, other]) == [(1, 2, True)]
    assert not guards.fits([None]) and not guards.fits()
    assert not guards.fits([None, Derived()])


EQUAL: list[tuple[Any, Any]] = [
    (float("1.5"), 3 / 2),
    (float("nan"), float("nan")),
    (10**30, int("1" + "0" * 30)),
    ("ab" * 50, "".join(["ab"] * 50)),
    (b"ab" * 50, bytes(bytearray(b"ab" * 50))),
    (complex("1+2j"), complex(1, 2)),
    ((1.5, ("a", 10**30)), (float("1.5"), ("a", 10**15 * 10**15))),
    (Pair(1.5, 2), Pair(float("1.5"), 2)),
    (torch.Size([2, 1000]), torch.Size([2, 10**3])),
    (Color.RED, Color.RED),
    (torch.float32, torch.float32),
    (torch.device("cpu"), torch.device("cpu")),
    (np.float32(1.5), np.float32(1.5)),
    (np.float64(1.5), np.float64(1.5)),
    (np.int64(7), np.int64(7)),
    (np.datetime64("2020-01-01"), np.datetime64("2020-01-01")),
    (None, None),
]
UNEQUAL: list[tuple[Any, Any]] = [
    (1, True),
    (1, 1.0),
    (0.0, -0.0),
    (0j, -0.0j),
    ("a", "b"),
    ((1, 2), (1, 2.0)),
    ((1, 2), (1, 2, 3)),
    (Pair(1, 2), (1, 2)),
    (Color.RED, Color.BLUE),
    (torch.float32, torch.float16),
    (torch.device("cpu"), torch.device("meta")),
    (np.float32(1.5), np.float64(1.5)),
    (np.float32(1.5), np.float32(2.5)),
    (np.float64(1.5), 1.5),
    (np.datetime64(1, "s"), np.datetime64(1, "ms")),
    ([1], [1]),
    (np.zeros(2), np.zeros(2)),
    (None, 0),
]


@pytest.mark.parametrize(
    ("one", "other"), EQUAL, ids=[f"{one!r} and {other!r}" for one, other in EQUAL]
)
def test_equal_values_fit(one: Any, other: Any) -> None:
    root = plain(a=one)
    guards = guards_on(root, ("attr", "a"), check=("plain", one))
    assert guards.fits()
    root.a = other
    assert guards.fits() and guards.changed() == []


@pytest.mark.parametrize(
    ("one", "other"), UNEQUAL, ids=[f"{one!r} and {other!r}" for one, other in UNEQUAL]
)
def test_other_values_do_not_fit(one: Any, other: Any) -> None:
    for before, after in ((one, other), (other, one)):
        root = plain(a=before)
        guards = guards_on(root, ("attr", "a"), check=("plain", before))
        assert guards.fits()
        root.a = after
        assert not guards.fits() and guards.changed() == [(1, after, True)]
        root.a = before
        assert guards.fits()


CHECKS: list[tuple[Any, tuple[Any, ...], list[Any]]] = [
    ([1], ("list", list, 1), [[], [1, 2], (1,)]),
    ((1,), ("list", tuple, 1), [(), (1, 2), [1]]),
    (collections.deque([1]), ("list", collections.deque, 1), [collections.deque(), [1]]),
    ({1}, ("list", set, 1), [set(), frozenset([1])]),
    ({"a": 1}, ("dict", dict, ("a",), NOTHING), [{}, collections.OrderedDict(a=1)]),
    (
        {"a": 1, 2: 1},
        ("dict", dict, ("a", 2), NOTHING),
        [{2: 1, "a": 1}, {"a": 1, 3: 1}, {"a": 1, 2: 1, 3: 1}],
    ),
    (
        collections.OrderedDict(a=1, b=2),
        ("dict", collections.OrderedDict, ("a", "b"), NOTHING),
        [collections.OrderedDict(b=2, a=1), {"a": 1, "b": 2}],
    ),
    ({"a": 1}, ("dict", dict, None, frozenset("b")), [{"a": 1, "b": 1}, [1]]),
    ({"a", "b"}, ("set", set, frozenset(["a", "b"])), [{"a"}, {"a", "c"}, frozenset("ab")]),
    ({1, 2}, ("set", set, frozenset([1, 2])), [{True, 2}, {1, 2, 3}]),
    (frozenset([Color.RED]), ("set", frozenset, frozenset([Color.RED])), [frozenset([Color.BLUE])]),
    (plain(a=1), ("object", Plain, frozenset("b")), [plain(b=1), Derived(), 1]),
    (Derived(), ("kind", Derived), [Plain(), Derived]),
]


@pytest.mark.parametrize(
    ("fitting", "check", "others"),
    CHECKS,
    ids=[f"{check[0]} {i}" for i, (_, check, _) in enumerate(CHECKS)],
)
def test_each_check_tells_others_apart(
    fitting: Any, check: tuple[Any, ...], others: list[Any]
) -> None:
    root = plain(a=fitting)
    guards = guards_on(root, ("attr", "a"), check=check)
    assert guards.fits()
    for other in others:
        root.a = other
        assert not guards.fits() and guards.changed() == [(1, other, True)]
        root.a = fitting
        assert guards.fits()
    del root.a
    assert not guards.fits() and guards.changed() == [(1, None, False)]


def test_equal_sets_fit_whatever_objects_their_members_are() -> None:
    root = plain(a={"x" * 30, "y"})
    guards = guards_on(root, ("attr", "a"), check=("set", set, frozenset(root.a)))
    root.a = {"".join(["x"] * 30), "y"}
    assert guards.fits()
    root.a.add("z")
    assert not guards.fits()


def test_the_very_same_object_is_not_an_equal_one() -> None:
    one: list[int] = []
    root = plain(a=one)
    guards = guards_on(root, ("attr", "a"), check=("is", one))
    assert guards.fits()
    root.a = []
    assert not guards.fits()


def test_an_absent_name_is_seen_when_it_comes() -> None:
    root = plain(a=1)
    guards = guards_on(root, check=("object", Plain, frozenset(["shared"])))
    assert guards.fits()
    root.other = 1  # type: ignore[attr-defined]
    assert guards.fits()
    root.shared = 2
    assert not guards.fits() and guards.changed() == [(0, root, True)]
    del root.other  # type: ignore[attr-defined]
    assert not guards.fits()
    del root.shared
    assert guards.fits()


NOISY: dict[str, Callable[[], Any]] = {
    "object": Noisy,
    "list": lambda: NoisyList([1]),
    "dict": lambda: NoisyDict(a=1),
    "deque": lambda: NoisyDeque([1]),
    "set": lambda: NoisySet([1]),
    "metaclass": lambda: NoisyMeta("Quiet", (), {})(),
}


@pytest.mark.parametrize("name", NOISY)
def test_no_code_of_the_users_runs(name: str) -> None:
    noisy = NOISY[name]()
    kind = type(noisy)
    checks: list[tuple[Any, ...]] = [("plain", 1), ("plain", 1.5), ("plain", (1,)), ("is", 1)]
    checks += [("kind", int), ("list", list, 1), ("dict", dict, ("a",), NOTHING), ("missing",)]
    checks += [("set", set, frozenset([1])), ("object", Plain, NOTHING), ("tensor", torch.ones(1))]
    for check in checks:
        guards = _core.Guards([(-1, ("object", 0), check)], reader_by_fields())
        assert not guards.fits([noisy]) and len(guards.changed([noisy])) == 1
    steps: list[tuple[Any, ...]] = [("attr", "a"), ("class", "a"), ("item", 5), ("item", "b")]
    steps += [("cell",), ("slot", Slotted.__dict__["a"])]
    for step in steps:
        places = [(-1, ("object", 0), ("kind", kind)), (0, step, ("missing",))]
        guards = _core.Guards(places)
        assert guards.fits([noisy]) and guards.changed([noisy]) == []


def test_containers_of_the_users_are_looked_into_as_pythons_own() -> None:
    cases: list[tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = [
        (NoisyList([1]), ("list", NoisyList, 1), ("item", 0)),
        (NoisyDeque([1]), ("list", NoisyDeque, 1), ("item", 0)),
        (NoisyDict(a=1), ("dict", NoisyDict, ("a",), NOTHING), ("item", "a")),
    ]
    for root, check, step in cases:
        guards = _core.Guards([(-1, ("root", root), check), (0, step, ("plain", 1))])
        assert guards.fits() and guards.changed() == []
    guards = _core.Guards([(-1, ("root", NoisySet([1])), ("set", NoisySet, frozenset([1])))])
    assert guards.fits()


def test_no_reader_is_needed_without_tensors() -> None:
    assert _core.Guards([(-1, ("root", 1), ("plain", 1))], None).fits()
    with pytest.raises(ArgumentError, match="a TensorReader"):
        _core.Guards([(-1, ("root", 1), ("tensor", torch.ones(1)))])


@pytest.mark.parametrize(
    "place",
    [
        (0, ("attr", "a"), ("missing",)),
        (-1, ("attr", "a"), ("missing",)),
        (-1, ("nowhere",), ("missing",)),
        (-1, ("root", 1), ("nothing",)),
        (-1, ("slot", 1), ("missing",)),
    ],
)
def test_places_that_cannot_be_are_refused(place: Any) -> None:
    with pytest.raises(ArgumentError):
        _core.Guards([place])


def test_entries_ask_the_guards_about_objects_among_the_arguments() -> None:
    called: list[object] = []
    places = [
        (-1, ("object", 1), ("object", Plain, NOTHING)),
        (0, ("attr", "a"), ("plain", 1)),
    ]
    entry = _core.Entry(
        [("object", Derived), ("tuple", [("object", Plain)])],
        [],
        is_in_order=False,
        modes=(True, False, None),
        work=lambda *args: called.append(args),
        outputs=None,
        last_stream=last_stream(_driver.current()),
        lock=None,
        guards=_core.Guards(places),
    )

    class Function(_core.Dispatcher):
        def _miss(self, args: Any, kwargs: Any) -> str:
            return "missed"

    off, on, none = lambda: False, lambda: True, lambda: None
    function = Function(
        off, off, {"_current_level": -1}, on, off, off, none, {}, [], _torch.torch_settings()
    )
    function.add(entry)
    first, second = Derived(), plain(a=1)
    assert function(first, (second,)) is None and called == [(first, (second,))]
    assert function(first, (first,)) == "missed"
    second.a = 2
    assert function(first, (second,)) == "missed"
    second.a = 1
    assert function(first, (second,)) is None and entry.replays == 2


@pytest.mark.parametrize("seed", range(100))
def test_random_changes_are_seen(seed: int) -> None:
    World(seed).run(_core.Guards, 60)
