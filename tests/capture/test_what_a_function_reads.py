"""What a function reads, in words that another process can compare."""

from __future__ import annotations

import decimal
import enum
import functools
import importlib
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from cgraph._saved.reads import arguments_in_words, difference, reads_of
from cgraph._saved.source_files import other_file
from cgraph.errors import ArgumentError

FACTOR: Any = 2.0


def helper(x: Tensor) -> Tensor:
    return x * FACTOR


class Scale:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __matmul__(self, x: Tensor) -> Tensor:
        return x * self.scale


class Layer(nn.Module):
    kind = "plain"

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale: Any = 0.5
        self.box = {"shift": 1.0}
        self.part = Scale(3.0)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        found = helper(self.linear(x)) * self.scale + self.box["shift"]
        return self.part @ found if self.kind == "plain" else found


def changed(function: Callable[..., Any], change: Callable[[], object]) -> str | None:
    before = reads_of(function).words
    assert difference(reads_of(function).words, before) is None
    change()
    return difference(reads_of(function).words, before)


def recompiled(function: Any, text: str) -> None:
    """Give a function other code, as an edit of its file does."""
    scope: dict[str, Any] = {}
    exec(text, scope)
    made = scope[function.__name__].__code__
    function.__code__ = made.replace(co_filename=function.__code__.co_filename)


def edits(layer: Any) -> dict[str, Callable[[], object]]:
    return {
        "self.scale is 0.7, and was 0.5": lambda: setattr(layer, "scale", 0.7),
        r"self.box\['shift'\] is 2.0, and was 1.0": lambda: layer.box.update(shift=2.0),
        "self.part.scale is": lambda: setattr(layer.part, "scale", 4.0),
        "self.training is False": layer.eval,
        "self.linear.bias is None": lambda: setattr(layer.linear, "bias", None),
        "self.linear.weight is .*float64.*was .*float32": lambda: layer.linear.double(),
        "self.linear is .*Sequential.*was .*Linear": lambda: setattr(
            layer, "linear", nn.Sequential()
        ),
    }


@pytest.mark.parametrize("text", edits(Layer()))
def test_a_change_in_a_module_is_seen_by_its_name(text: str) -> None:
    layer = Layer()
    found = changed(layer, edits(layer)[text])
    assert found is not None
    assert re.search(text, found), found


def test_other_code_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer()
    new = "def helper(x):\n    return x * FACTOR + 1"
    code = helper.__code__
    try:
        assert "the code of helper is" in str(changed(layer, lambda: recompiled(helper, new)))
    finally:
        helper.__code__ = code
    method: Any = Scale.__matmul__
    code = method.__code__
    new = "def __matmul__(self, x):\n    return x + self.scale"
    try:
        assert "__matmul__" in str(changed(layer, lambda: recompiled(method, new)))
    finally:
        method.__code__ = code
    inner: Any = vars(Layer.forward)["__wrapped__"]
    code = inner.__code__
    new = "def forward(self, x):\n    return helper(self.linear(x)) * self.scale"
    try:
        assert "forward" in str(changed(layer, lambda: recompiled(inner, new)))
    finally:
        inner.__code__ = code
    assert changed(layer, lambda: monkeypatch.setattr(Layer, "kind", "none")) is not None
    assert changed(layer, lambda: monkeypatch.setitem(globals(), "FACTOR", 3.0)) is not None


class Normed(nn.Linear):
    """A module of torch's, with modules of torch's in it."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.norm, self.drop = nn.LayerNorm(4), nn.Dropout(0.1)
        self.conv, self.act = nn.Conv1d(4, 4, 1), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.act(self.drop(self.norm(super().forward(x))))
        return found


@pytest.mark.parametrize(
    ("text", "change"),
    [
        ("self.norm.eps is", lambda one: setattr(one.norm, "eps", 1e-3)),
        ("self.drop.p is", lambda one: setattr(one.drop, "p", 0.2)),
        ("self.conv.padding", lambda one: setattr(one.conv, "padding", (1,))),
        ("self.act.approximate is", lambda one: setattr(one.act, "approximate", "tanh")),
        ("the code of", lambda one: one.norm.register_forward_hook(lambda *_: None)),
        ("_forward_pre_hooks", lambda one: one.act.register_forward_pre_hook(print)),
    ],
)
def test_settings_and_hooks_of_torchs_modules_are_seen(text: str, change: Any) -> None:
    layer = Normed()
    assert text in str(changed(layer, lambda: change(layer)))


def test_cells_defaults_and_parts_of_a_call_are_seen() -> None:
    scale = 2.0

    @torch.no_grad()
    def closes(x: Tensor) -> Tensor:
        return x * scale

    def defaults(x: Tensor, by: float = 2.0, *, then: float = 1.0) -> Tensor:
        return x * by + then

    def double() -> None:
        nonlocal scale
        scale *= 2

    kinds: Any = defaults
    assert "scale is" in str(changed(closes, double))
    assert changed(defaults, lambda: setattr(kinds, "__defaults__", (3.0,))) is not None
    assert changed(defaults, lambda: setattr(kinds, "__kwdefaults__", {"then": 2.0})) is not None
    parts: Any = [functools.partial(defaults, by=one) for one in (4.0, 5.0)]
    assert difference(*(reads_of(one).words for one in parts)) is not None
    assert "closes" in str(reads_of(functools.partial(closes)).words)


def test_the_contents_of_a_tensor_on_the_host_are_seen() -> None:
    scale = torch.tensor(2.0)
    assert "scale is" in str(changed(lambda x: x * scale, lambda: scale.fill_(3.0)))


def test_a_compiled_module_is_seen_as_it_was_written() -> None:
    layer = Layer()
    compiled = torch.compile(layer)
    found = changed(compiled, lambda: setattr(layer, "scale", 0.7))
    assert found is not None
    assert "scale is" in found


class Mode(enum.Enum):
    """An enum whose members have values that are read."""

    BIG = 2.0


class Odd(float):
    """A float of a class of its own."""


def made(scale: float) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        return x * scale

    return run


def boxed(one: Any, other: Any = None) -> Callable[[Tensor], Any]:
    """Return a function that calls or reads two values of an object."""
    box = SimpleNamespace(one=one, other=other)

    def run(x: Tensor) -> Any:
        return box.one, box.other, x

    return run


LAYERS = [nn.Linear(2, 2) for _ in range(2)]
WITH_KEY: Any = nn.Parameter(torch.zeros(3))
WITH_OTHER: Any = nn.Parameter(torch.zeros(3))
WITH_KEY.k, WITH_OTHER.k = 2.0, 3.0


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (boxed(functional.relu), boxed(functional.silu)),
        (boxed(torch.sin), boxed(torch.cos)),
        (boxed(nn.ReLU), boxed(nn.SiLU)),
        (boxed({"act": torch.sin}), boxed({"act": torch.cos})),
        (boxed(made(2.0), made(3.0)), boxed(made(3.0), made(2.0))),
        (
            boxed(functools.partial(helper, y=1), functools.partial(helper, y=2)),
            boxed(functools.partial(helper, y=2), functools.partial(helper, y=1)),
        ),
        (boxed({"a" * 50: 1, "a" * 40 + "b": 2}), boxed({"a" * 50: 2, "a" * 40 + "b": 1})),
        (boxed([LAYERS[0], LAYERS[1], LAYERS[0]]), boxed([LAYERS[0], LAYERS[1], LAYERS[1]])),
        (boxed(torch.tensor(2.0)), boxed(torch.tensor(3.0))),
        (boxed(Odd(2.0)), boxed(Odd(3.0))),
        (boxed(decimal.Decimal(2)), boxed(decimal.Decimal(3))),
        (boxed(defaultdict(int)), boxed(defaultdict(float))),
        (boxed(defaultdict(made(2.0))), boxed(defaultdict(made(3.0)))),
        (boxed(WITH_KEY), boxed(WITH_OTHER)),
        (boxed(torch.zeros(2) + 1j), boxed((torch.zeros(2) + 1j).conj())),
        (boxed(torch.zeros(2, requires_grad=True)), boxed(torch.zeros(2))),
        (boxed(torch.ops.aten.sin), boxed(torch.ops.aten.cos)),
        (
            torch.autocast("cpu", torch.bfloat16)(made(2.0)),
            torch.autocast("cpu", torch.float16)(made(2.0)),
        ),
        (functools.lru_cache(made(2.0)), functools.lru_cache(made(3.0))),
    ],
)
def test_values_that_compute_something_else_have_other_words(one: Any, other: Any) -> None:
    assert difference(reads_of(one).words, reads_of(one).words) is None
    assert difference(reads_of(one).words, reads_of(other).words) is not None


def test_the_value_of_an_enum_member_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    mode = Mode.BIG
    found = changed(lambda x: x * mode.value, lambda: monkeypatch.setattr(mode, "_value_", 3.0))
    assert "Mode.BIG 3.0, and was" in str(found)


def test_the_number_of_a_hook_does_not_matter() -> None:
    words = []
    for _ in range(2):
        layer = Normed()
        layer.norm.register_forward_hook(lambda *_: None)
        torch.manual_seed(1)
        for one in layer.parameters():
            nn.init.normal_(one)
        words.append(reads_of(layer).words)
    assert difference(*words) is None


def test_hooks_of_all_modules_are_seen() -> None:
    layer = Layer()
    hooks: list[Any] = []
    try:
        hook = nn.modules.module.register_module_forward_hook
        assert "a global hook" in str(changed(layer, lambda: hooks.append(hook(print))))
    finally:
        hooks[0].remove()


def test_code_in_classes_that_are_made_inside_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(x: Tensor) -> Any:
        return Scale(1.0) @ x

    method: Any = Scale.__matmul__
    new = method.__code__.replace(co_consts=(*method.__code__.co_consts, 5))
    assert changed(run, lambda: monkeypatch.setattr(method, "__code__", new)) is not None


def test_a_function_that_holds_tells_of_each_change() -> None:
    layer = Layer()
    reads = reads_of(layer)
    assert reads.holds()
    layer.part.scale = 9.0
    assert not reads.holds()
    assert not reads_of(layer).is_like(reads)
    layer.part.scale = 3.0
    assert reads_of(layer).is_like(reads)


def test_a_write_to_a_tensor_on_the_host_is_told() -> None:
    scale = torch.tensor(2.0)
    reads = reads_of(lambda x: x * scale)
    assert reads.holds()
    scale.add_(1)
    assert not reads.holds()
    with torch.inference_mode():
        scale = torch.tensor(2.0)
    assert not reads_of(lambda x: x * scale).holds()


def test_an_edit_of_a_source_file_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "edited_inner.py").write_text("def act(x):\n    return x + 1\n")
    (tmp_path / "edited_outer.py").write_text("import edited_inner\ndef run(x):\n    return x\n")
    monkeypatch.syspath_prepend(tmp_path)
    files = reads_of(importlib.import_module("edited_outer").run).files
    assert {Path(one).name for one in files} == {"edited_inner.py", "edited_outer.py"}
    assert other_file(files) is None
    (tmp_path / "edited_inner.py").write_text("def act(x):\n    return x + 22\n")
    assert str(other_file(files)).endswith("edited_inner.py")


class Proxy:
    """An object whose attributes are items of a dictionary."""

    def __init__(self) -> None:
        self.d = {"scale": 2.0}

    def __getattr__(self, name: str) -> Any:
        return self.d[name]


def test_objects_that_raise_when_asked_are_described() -> None:
    class Holder:
        config = Proxy()

        @functools.lru_cache(1)  # noqa: B019
        def scale(self) -> float:
            return self.config.scale  # type: ignore[no-any-return]

    proxy, holder = Proxy(), Holder()
    found = reads_of(lambda x: x * proxy.scale * holder.scale())
    assert "the code of scale" in [name for name, *_ in found.words]
    wrapped: Any = torch.no_grad()(made(2.0))
    wrapped.__wrapped__ = wrapped  # a circle
    with pytest.raises(ArgumentError, match="has no code in Python"):
        reads_of(wrapped)


def test_what_cannot_be_compared_is_refused() -> None:
    array = numpy.zeros(3)
    with pytest.raises(ArgumentError, match="array is an array, whose contents are not compared"):
        reads_of(lambda x: x + array)
    steps = iter(range(3))
    with pytest.raises(ArgumentError, match=r"steps is a builtins.range_iterator, whose contents"):
        reads_of(lambda x: x + next(steps))
    scripted = torch.jit.script(nn.LeakyReLU(0.1))
    with pytest.raises(ArgumentError, match="scripted is scripted, and its settings"):
        reads_of(lambda x: scripted(x))
    with pytest.raises(ArgumentError, match="has no code in Python to compare"):
        reads_of(torch.relu)
    with pytest.raises(ArgumentError, match=r"argument args\[1\] is a SimpleNamespace, expected"):
        arguments_in_words((torch.zeros(3), SimpleNamespace()))


def test_arguments_differ_by_form_value_and_container() -> None:
    x = torch.zeros(4, 2)
    base = arguments_in_words(((x, 1), {"k": 2.0}))
    assert difference(arguments_in_words(((x.clone(), 1), {"k": 2.0})), base) is None
    for other in (
        ((x[:2], 1), {"k": 2.0}),
        ((x.double(), 1), {"k": 2.0}),
        ((x.t().contiguous().t(), 1), {"k": 2.0}),
        ((x, True), {"k": 2.0}),
        ((x, 1), {"k": -2.0}),
        ([x, 1], {"k": 2.0}),
    ):
        assert difference(arguments_in_words(other), base) is not None


PROGRAM = """
import json, torch
from torch import nn
from torch.nn import functional
from cgraph._saved.reads import reads_of
class Scale:
    by = 2
    def __call__(self, x):
        return functional.silu(x) * self.by
class Other:
    def __call__(self, x):
        return nn.functional.relu(x)
class Layer(nn.Module):
    names = frozenset(["a", "b", "c", "d"])
    def __init__(self):
        super().__init__()
        self.one, self.two, self.shared = nn.Linear(2, 2), nn.Linear(2, 2), {"x": 1, "y": 2}
        self.same, self.acts = self.shared, [Scale(), Other()]
    def forward(self, x):
        return other(self.one(x)) + self.two(x) if "e" in {"e", "f", "g"} else self.acts[0](x)
class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
    def forward(self, x):
        return functional.gelu(self.layers[0](x)) + nn.functional.silu(x)
def other(x):
    return torch.relu(x) * len(Layer.names) * box.shared["y"] * box.same["y"]
torch.manual_seed(1)
box = Layer()
words = reads_of(Whole()).words
print(len(words) > 20, json.dumps(words, sort_keys=True))
"""


def test_another_process_finds_the_same_words() -> None:
    found = set()
    for seed in range(6):
        run = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": str(seed), "CGRAPH_DRIVER": "sim"},
            capture_output=True,
            text=True,
            check=True,
        )
        found.add(run.stdout)
    assert len(found) == 1
    assert next(iter(found)).startswith("True ")
