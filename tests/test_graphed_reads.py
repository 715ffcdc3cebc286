"""What a function reads of Python, and somebody changes between its calls."""

from __future__ import annotations

import functools
import gc
import importlib
import random
import sys
import types
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

import cgraph
from cgraph import eager_break
from cgraph.errors import StateError
from engines import Doubled, Engine, Inherited, Minus, Mode, Settings
from graphed_calls import states
from lab import Lab, fresh

CHANGES: dict[str, Callable[[Engine], object]] = {
    "number": lambda one: setattr(one, "scale", -0.3),
    "same number of another class": lambda one: setattr(one, "scale", 2),
    "enumeration": lambda one: setattr(one, "mode", Mode.MULTIPLY),
    "text": lambda one: setattr(one, "name", "b"),
    "none": lambda one: setattr(one, "missing", 3.0),
    "none to a tensor": lambda one: setattr(one, "missing", torch.full_like(one.layer.bias, 3.0)),
    "tuple": lambda one: setattr(one, "shape", (2, 3)),
    "attribute of an object": lambda one: setattr(one.settings, "scale", 3.0),
    "object": lambda one: setattr(one, "settings", Settings(4.0)),
    "object of another class": lambda one: setattr(one, "settings", Doubled(0.5)),
    "class of an object": lambda one: setattr(one.settings, "__class__", Doubled),
    "number of an object's class": lambda one: setattr(one, "settings", Inherited()),
    "one of two ways": lambda one: setattr(one, "second", Settings(7.0)),
    "list to a tuple": lambda one: setattr(one, "skipped", (0,)),
    "numbers of another class in a set": lambda one: setattr(one, "chosen", {True}),
    "callable object": lambda one: setattr(one, "strategy", Minus()),
    "class": lambda one: setattr(one, "kind", nn.Tanh),
    "slot": lambda one: setattr(one.slotted, "scale", 0.7),
    "farther object": lambda one: setattr(one.space, "inner", Settings(-1.0)),
    "more in a list": lambda one: one.skipped.append(1),
    "less in a list": lambda one: one.skipped.pop(),
    "other in a list": lambda one: one.skipped.__setitem__(0, 2),
    "list": lambda one: setattr(one, "skipped", [1, 2]),
    "more in a set": lambda one: one.chosen.add(2),
    "other in a set": lambda one: one.chosen.symmetric_difference_update({0, 1}),
    "dictionary": lambda one: one.factors.update(a=0.2),
    "which of a dictionary": lambda one: setattr(one, "active", "b"),
    "function": lambda one: setattr(one, "activation", torch.tanh),
    "function of Python": lambda one: setattr(one, "activation", functional.silu),
    "more functions": lambda one: one.steps.append(torch.cos),
    "other function": lambda one: one.steps.__setitem__(0, torch.cos),
    "partial": lambda one: setattr(one, "partial", functools.partial(torch.mul, other=5.0)),
    "own instead of the class's": lambda one: setattr(one, "by_class", 9.0),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("grad", [False, True])
def test_what_a_function_reads_may_change_between_calls(lab: Lab, change: str, grad: bool) -> None:
    engine = Engine().to(lab.device)
    graphed = cgraph.graphed(engine, measure=False)
    with torch.set_grad_enabled(grad):
        for is_changed in (False, True):
            if is_changed:
                CHANGES[change](engine)
            for _ in range(3):
                x = fresh(lab, 4, 3).requires_grad_(grad)
                y = x.detach().clone().requires_grad_(grad)
                found, expected = graphed(x), engine(y)
                assert_close(found, expected)
                if grad:
                    gradients = torch.autograd.grad(found.sum(), [x, engine.layer.weight])
                    wanted = torch.autograd.grad(expected.sum(), [y, engine.layer.weight])
                    assert_close(gradients, wanted)
                del found
    assert set(states(graphed)) == {"captured"}
    assert sum(key.replays for key in graphed.report().keys) == 6


def test_a_class_may_get_another_number_for_all_its_objects(lab: Lab) -> None:
    class Scaled:
        by = 2.0

        def run(self, x: Tensor) -> Tensor:
            return x * self.by

    one = Scaled()
    graphed = cgraph.graphed(one.run, measure=False)
    for by in (2.0, 3.0, 2.0):
        Scaled.by = by
        x = fresh(lab, 3)
        assert torch.equal(graphed(x), x * by)
    assert states(graphed) == ["captured"] * 2


SCALE = 2.0
SETTINGS: Any = Settings(2.0)


def scaled(x: Tensor) -> Tensor:
    """By globals."""
    return x * SCALE + SETTINGS.scale  # type: ignore[no-any-return]


def test_globals_and_variables_of_a_closure_may_change(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    by = 2.0

    def closed(x: Tensor) -> Tensor:
        return x * by

    module = sys.modules[__name__]
    graphed, other = cgraph.graphed(scaled, measure=False), cgraph.graphed(closed, measure=False)
    for scale in (2.0, 0.5, 3.0):
        monkeypatch.setattr(module, "SCALE", scale)
        monkeypatch.setattr(module, "SETTINGS", Settings(-scale))
        by = scale
        x = fresh(lab, 3)
        assert torch.equal(graphed(x), x * scale - scale)
        assert torch.equal(other(x), x * scale)


def test_numbers_that_take_turns_have_a_graph_each(lab: Lab) -> None:
    engine = Engine().to(lab.device)
    graphed = cgraph.graphed(engine, measure=False)
    with torch.no_grad():
        for turn in range(12):
            engine.scale, engine.name = (2.0, "b") if turn % 2 else (0.25, "a")
            x = fresh(lab, 4, 3)
            assert_close(graphed(x), engine(x))
    first, second = graphed.report().keys
    assert (first.replays, second.replays) == (6, 6)
    assert not first.rerecorded and not second.rerecorded
    assert "scale = 2.0" in second.key and "name = 'b'" in second.key


def test_a_number_that_is_equal_is_the_same_one(lab: Lab) -> None:
    engine = Engine().to(lab.device)
    graphed = cgraph.graphed(engine, measure=False)
    with torch.no_grad():
        for _ in range(4):
            engine.scale, engine.name = float("2.0"), "".join(["a"])
            engine.shape, engine.chosen = tuple([1, 3]), {1}
            x = fresh(lab, 4, 3)
            assert_close(graphed(x), engine(x))
    (key,) = graphed.report().keys
    assert key.replays == 4 and not key.rerecorded


def test_a_number_that_each_call_changes_makes_calls_run_eagerly_with_advice(lab: Lab) -> None:
    engine = Engine().to(lab.device)
    graphed = cgraph.graphed(engine, measure=False)
    with torch.no_grad(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for turn in range(30):
            engine.scale = turn + 0.5
            x = fresh(lab, 4, 3)
            assert_close(graphed(x), engine(x))
    texts = [str(one.message) for one in told if "runs eagerly" in str(one.message)]
    assert len(texts) == 1 and "give as tensors the numbers that change" in texts[0]
    assert graphed.report().captured == 8


def test_what_nobody_reads_may_change(lab: Lab) -> None:
    engine: Any = Engine().to(lab.device)
    engine.count, engine.log = 0, []
    graphed = cgraph.graphed(engine, measure=False)
    with torch.no_grad():
        for turn in range(4):
            engine.count, engine.settings.other = turn, turn
            engine.log.append(turn)
            x = fresh(lab, 4, 3)
            assert_close(graphed(x), engine(x))
    (key,) = graphed.report().keys
    assert key.replays == 4 and not key.rerecorded


def test_what_only_breaks_read_may_change(lab: Lab) -> None:
    kept, seen = types.SimpleNamespace(factor=1.0, rows=[1.0]), list[float]()

    @eager_break
    def scaled_by(x: Tensor) -> Tensor:
        seen.append(kept.factor)
        return x * kept.factor + kept.rows[0]

    graphed = cgraph.graphed(lambda x: scaled_by(x + 1) * 2, measure=False)
    for factor in (1.0, 2.0, 3.0, 4.0):
        kept.factor, kept.rows[0] = factor, -factor
        x = fresh(lab, 3)
        assert_close(graphed(x), ((x + 1) * factor - factor) * 2)
    (key,) = graphed.report().keys
    assert key.replays == 4 and not key.rerecorded


def test_a_frozen_function_names_the_number_that_is_new(lab: Lab) -> None:
    engine = Engine().to(lab.device)
    graphed = cgraph.graphed(engine, sizes=[2, 4], measure=False)
    with torch.no_grad():
        graphed.capture(fresh(lab, 4, 3), progress=False)
        for scale in (2.0, 3.0):
            engine.scale = scale
            for rows in (1, 2, 3, 4):
                x = fresh(lab, rows, 3)
                assert_close(graphed(x), engine(x))
        graphed.freeze()
        engine.scale = 4.0
        with pytest.raises(StateError, match=r"needs a capture, of the key .*scale = 4\.0"):
            graphed(fresh(lab, 4, 3))
        engine.scale = 3.0
        x = fresh(lab, 3, 3)
        assert_close(graphed(x), engine(x))
    assert graphed.report().captured == 4


def test_how_much_a_dropout_drops_may_change(lab: Lab) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).to(lab.device)
    graphed = cgraph.graphed(net, measure=False)
    with torch.no_grad():
        graphed(fresh(lab, 4, 3))
        for drop, is_any in ((1.0, False), (0.0, True)):
            net[1].p = drop
            x = fresh(lab, 4, 3)
            expected = net[0](x) if is_any else torch.zeros_like(x)
            assert_close(graphed(x), expected)


def test_random_choices_of_what_is_set_are_those_of_eager(lab: Lab) -> None:
    engine = Engine().to(lab.device)
    graphed = cgraph.graphed(engine, measure=False)
    choices: list[tuple[str, list[Any]]] = [
        ("scale", [1.0, 2.0]),
        ("active", ["a", "b"]),
        ("activation", [torch.relu, torch.tanh]),
        ("missing", [None, 2.0]),
        ("skipped", [[0], [0, 1], []]),
    ]
    with torch.no_grad():
        for _ in range(40):
            name, values = random.choice(choices)
            setattr(engine, name, random.choice(values))
            x = fresh(lab, 4, 3)
            assert_close(graphed(x), engine(x))


def test_constants_of_installed_libraries_are_not_watched(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    name = f"cg_installed_{lab.device}"
    (folder / f"{name}.py").write_text("BY = 2.0\ndef times(x):\n    return x * BY\n")
    monkeypatch.syspath_prepend(str(folder))
    library = importlib.import_module(name)
    graphed = cgraph.graphed(library.times, measure=False)
    x = fresh(lab, 3)
    assert torch.equal(graphed(x), x * 2)
    library.BY = 3.0
    assert torch.equal(graphed(x), x * 2)
    del sys.modules[name]


def test_numbers_of_modules_that_are_gone_are_not_kept(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda engine, x: engine(x), max_graphs=1, measure=False)
    gone: list[weakref.ref[Tensor]] = []
    with torch.no_grad():
        # What some modules among the arguments have is remembered.
        for scale in range(24):
            engine = Engine().to(lab.device)
            engine.scale = float(scale)
            for _ in range(2):
                x = fresh(lab, 4, 3)
                assert_close(graphed(engine, x), engine(x))
            gone.append(weakref.ref(engine.layer.weight))
    gc.collect()
    assert sum(one() is not None for one in gone) <= 17
