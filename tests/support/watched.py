"""Changes that guards see in a Python without torch: a script for `test_dictionary_watchers.py`.

Its arguments are the native library and the required behaviour in this Python: ``watches``,
``compares`` or ``either``.
"""

from __future__ import annotations

import collections
import gc
import importlib.machinery
import importlib.util
import sys
import threading
import weakref
from typing import Any

from guarded import Key, Plain, World

NOTHING: frozenset[str] = frozenset()


def load(path: str) -> Any:
    """Load the native library alone: its package needs torch."""
    loader = importlib.machinery.ExtensionFileLoader("cgraph._core", path)
    spec = importlib.util.spec_from_loader("cgraph._core", loader, origin=path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def guards_on_a(one: Any, value: Any) -> Any:
    root = (-1, ("root", one), ("object", type(one), NOTHING))
    return core.Guards([root, (0, ("attr", "a"), ("plain", value))])


def each_store_is_seen() -> None:
    def store(one: Any, value: Any) -> None:
        one.a = value

    for before in (False, True):
        one = Plain()
        if before:
            vars(one)
        one.a = 0
        guards = guards_on_a(one, 0)
        for value in range(1, 300):
            store(one, value)
            assert not guards.fits(), value
            store(one, 0)
            assert guards.fits(), value
        del one.a
        assert not guards.fits()
        store(one, 0)
        assert guards.fits()


def each_read_leaves_the_watch() -> None:
    """Python 3.12 takes an unshared dictionary away from its object."""

    def read(one: Any) -> Any:
        return one.a

    one = Plain()
    one.a = 0
    guards = guards_on_a(one, 0)
    for _ in range(300):
        assert guards.fits()
        assert read(one) == 0
    one.a = 1
    assert not guards.fits()


def globals_are_seen() -> None:
    names: dict[str, Any] = {}
    exec("number = 0\ndef store(value):\n    global number\n    number = value", names)
    root = (-1, ("root", names), ("dict", dict, None, frozenset(["absent"])))
    guards = core.Guards([root, (0, ("item", "number"), ("plain", 0))])
    for value in range(1, 300):
        names["store"](value)
        assert not guards.fits()
        names["store"](0)
        assert guards.fits()
    names["other"] = 1
    assert guards.fits()
    names["absent"] = 1
    assert not guards.fits()


def an_item_that_moves_to_the_end_is_seen() -> None:
    for kind in (dict, collections.OrderedDict):
        own = kind(a=0, b=1)
        root = (-1, ("root", own), ("dict", kind, ("a", "b"), NOTHING))
        items = [(0, ("item", name), ("plain", own[name])) for name in own]
        guards = core.Guards([root, *items])
        assert guards.fits() and guards.fits()
        own["a"] = own.pop("a")
        assert not guards.fits()
        own["b"] = own.pop("b")
        assert guards.fits()
        if kind is collections.OrderedDict:
            own.move_to_end("a")
            assert not guards.fits()


def changes_of_a_whole_dictionary_are_seen() -> None:
    for kind in (dict, collections.OrderedDict):
        own = kind(a=0)
        root = (-1, ("root", own), ("dict", kind, ("a",), NOTHING))
        guards = core.Guards([root, (0, ("item", "a"), ("plain", 0))])
        for change in (
            lambda own: own.clear(),
            lambda own: own.popitem(),
            lambda own: own.update(a=1),
            lambda own: own.update({Key: 1}),
            lambda own: own.setdefault("b", 1),
            lambda own: own.__ior__({"a": 1}),
        ):
            assert guards.fits()
            change(own)
            assert not guards.fits()
            own.clear()
            own["a"] = 0


def many_guards_share_a_dictionary() -> None:
    one = Plain()
    one.a = 0
    all_guards = [guards_on_a(one, 0) for _ in range(5)]
    while all_guards:
        assert all(guards.fits() for guards in all_guards)
        one.a = 1
        assert not any(guards.fits() for guards in all_guards)
        one.a = 0
        all_guards.pop()
    one.a = 2


def what_was_replaced_goes() -> None:
    outer = Plain()
    outer.a = Plain()
    outer.a.a = 0
    places = [
        (-1, ("root", outer), ("object", Plain, NOTHING)),
        (0, ("attr", "a"), ("object", Plain, NOTHING)),
        (1, ("attr", "a"), ("plain", 0)),
    ]
    guards = core.Guards(places)
    assert guards.fits()
    gone = weakref.ref(outer.a)
    outer.a = Plain()
    outer.a.a = 0
    assert guards.fits()
    gc.collect()
    assert gone() is None
    outer.a.a = 1
    assert not guards.fits()


def an_object_of_one_call_goes_with_it() -> None:
    places = [
        (-1, ("object", 0), ("object", Plain, NOTHING)),
        (0, ("attr", "a"), ("kind", Plain)),
    ]
    guards = core.Guards(places)
    for _ in range(20):
        one, inner = Plain(), Plain()
        one.a = inner
        assert guards.fits([one])
        gone = weakref.ref(one), weakref.ref(inner)
        del one, inner
        assert gone[0]() is None and gone[1]() is None
    one = Plain()
    one.a = Plain()
    for _ in range(20):
        assert guards.fits([one])
    one.a = 1
    assert not guards.fits([one])
    other = Plain()
    other.a = Plain()
    assert guards.fits([other])
    gone = weakref.ref(one), weakref.ref(other)
    del one, other
    assert gone[0]() is None and gone[1]() is None


def guards_in_a_cycle_are_collected() -> None:
    one = Plain()
    one.a = 0
    one.guards = guards_on_a(one, 0)
    assert one.guards.fits()
    gone = weakref.ref(one)
    del one
    gc.collect()
    assert gone() is None


def each_thread_has_its_own_attributes() -> None:
    local = threading.local()
    local.a = 0
    kind = type(local)
    places = [(-1, ("root", local), ("kind", kind)), (0, ("attr", "a"), ("plain", 0))]
    guards = core.Guards(places)
    answers = []

    def ask() -> None:
        answers.append(guards.fits())
        local.a = 0
        answers.append(guards.fits())

    for _ in range(2):
        assert guards.fits()
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    assert answers == [False, True] * 2
    assert guards.fits()
    local.a = 1
    assert not guards.fits()


def a_key_that_changes_all_when_it_is_compared_does_no_harm() -> None:
    class Key(str):
        def __hash__(self) -> int:
            return hash("a")

        def __eq__(self, other: object) -> bool:
            nonlocal is_armed
            if is_armed:
                is_armed = False
                inner.clear()
                outer.clear()
                outer[Key("b")] = 1
                answers.append(guards.fits())
                gc.collect()
            return False

    is_armed, answers = False, []
    for _ in range(20):
        inner: list[object] = [object()]
        outer: dict[Any, Any] = {Key("b"): 1, "inner": inner}
        places = [
            (-1, ("root", outer), ("dict", dict, None, frozenset(["a"]))),
            (0, ("item", "a"), ("missing",)),
            (0, ("item", "inner"), ("list", list, 1)),
            (2, ("item", 0), ("kind", object)),
        ]
        guards = core.Guards(places)
        is_armed = True
        assert not guards.fits()
        is_armed = False
    assert not any(answers) and len(answers) == 20


def random_changes_are_seen() -> None:
    counts = [0, 0]
    for seed in range(200):
        fitted, changed = World(seed).run(core.Guards, 60)
        counts[0] += fitted
        counts[1] += changed
    assert min(counts) > 1000, counts


if __name__ == "__main__":
    core = load(sys.argv[1])
    does = "watches" if core.watches_dictionaries() else "compares"
    assert sys.argv[2] in (does, "either"), does
    assert "torch" not in sys.modules
    for check in (
        each_store_is_seen,
        each_read_leaves_the_watch,
        globals_are_seen,
        an_item_that_moves_to_the_end_is_seen,
        changes_of_a_whole_dictionary_are_seen,
        many_guards_share_a_dictionary,
        what_was_replaced_goes,
        an_object_of_one_call_goes_with_it,
        guards_in_a_cycle_are_collected,
        each_thread_has_its_own_attributes,
        a_key_that_changes_all_when_it_is_compared_does_no_harm,
        random_changes_are_seen,
    ):
        check()
    print("seen")
