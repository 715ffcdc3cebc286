"""«Guarded» of the contract: code, classes, library functions, and Python's holders of values."""

from __future__ import annotations

import array
import contextvars
import os
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cgraph
from contract_calls import equal
from graphed_calls import numbers, quiet
from lab import Lab, fresh


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def follows(lab: Lab, function: Callable[[Tensor], Tensor], change: Callable[[], object]) -> Any:
    """Require results of eager before and after a change, with replays both times."""
    graphed = cgraph.graphed(function)
    for _ in range(4):
        x = fresh(lab, 5)
        equal(graphed(x), function(x))
    assert numbers(graphed)[0] >= 1, "the function is not replayed before the change"
    change()
    for _ in range(4):
        x = fresh(lab, 5)
        equal(graphed(x), function(x))
    return graphed


class _Holder:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


def test_a_tensor_that_no_operator_took_counts_by_its_form(lab: Lab) -> None:
    holder = _Holder(limit=fresh(lab, 3))

    def function(x: Tensor) -> Tensor:
        return x * holder.limit.shape[0]

    follows(lab, function, lambda: setattr(holder, "limit", fresh(lab, 7)))


def test_a_library_function_that_is_exchanged_counts(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def function(x: Tensor) -> Tensor:
        return F.relu(x - 0.5)

    follows(lab, function, lambda: monkeypatch.setattr(F, "relu", torch.sigmoid))


def test_what_a_function_in_place_of_a_librarys_reads_counts(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, relu = _Holder(by=2.0), F.relu
    monkeypatch.setattr(F, "relu", lambda x: relu(x) * holder.by)

    def function(x: Tensor) -> Tensor:
        return F.relu(x - 0.5)

    follows(lab, function, lambda: setattr(holder, "by", 3.0))


def test_a_method_that_a_library_class_gets_counts(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = nn.Linear(5, 5).to(lab.device)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = linear

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    def other(self: nn.Linear, x: Tensor) -> Tensor:
        return x * 3

    follows(lab, Model(), lambda: monkeypatch.setattr(nn.Linear, "forward", other))


@pytest.mark.parametrize("part", ["__code__", "__defaults__", "__kwdefaults__"])
def test_the_parts_of_a_function_count(lab: Lab, part: str) -> None:
    def inner(x: Tensor, by: float = 2.0, *, to: float = 1.0) -> Tensor:
        return x * by + to

    def other(x: Tensor, by: float = 5.0, *, to: float = 7.0) -> Tensor:
        return x - by - to

    def function(x: Tensor) -> Tensor:
        return inner(x)

    follows(lab, function, lambda: setattr(inner, part, getattr(other, part)))


def test_a_class_attribute_that_appears_counts(lab: Lab) -> None:
    class Scale:
        pass

    scale: Any = Scale()

    def function(x: Tensor) -> Tensor:
        return x * getattr(scale, "factor", 2.0)

    follows(lab, function, lambda: setattr(Scale, "factor", 9.0))


def test_a_module_that_is_imported_inside_counts(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: Any = types.ModuleType("settings_of_the_test")
    settings.factor = 2.0
    settings.__file__ = __file__
    monkeypatch.setitem(__import__("sys").modules, settings.__name__, settings)

    def function(x: Tensor) -> Tensor:
        import settings_of_the_test  # type: ignore[import-not-found]

        return x * settings_of_the_test.factor

    follows(lab, function, lambda: setattr(settings, "factor", 4.0))


def test_a_builtin_that_a_global_hides_counts(lab: Lab) -> None:
    scope: dict[str, Any] = {}
    exec("def function(x):\n    return x * max(2.0, 3.0)\n", scope)
    follows(lab, scope["function"], lambda: scope.update(max=min))


def test_a_context_variable_counts(lab: Lab) -> None:
    variable: contextvars.ContextVar[float] = contextvars.ContextVar("variable", default=2.0)

    def function(x: Tensor) -> Tensor:
        return x * variable.get()

    follows(lab, function, lambda: variable.set(5.0))


def test_a_value_of_the_thread_counts(lab: Lab) -> None:
    local = threading.local()
    local.factor = 2.0

    def function(x: Tensor) -> Tensor:
        return x * local.factor

    follows(lab, function, lambda: setattr(local, "factor", 5.0))


def test_a_variable_of_the_environment_counts(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FACTOR_OF_THE_TEST", "2")

    def function(x: Tensor) -> Tensor:
        return x * float(os.environ["FACTOR_OF_THE_TEST"])

    follows(lab, function, lambda: monkeypatch.setenv("FACTOR_OF_THE_TEST", "5"))


def test_the_dictionary_behind_a_mapping_proxy_counts(lab: Lab) -> None:
    values = {"factor": 2.0}
    proxy = types.MappingProxyType(values)

    def function(x: Tensor) -> Tensor:
        return x * proxy["factor"]

    follows(lab, function, lambda: values.update(factor=5.0))


def test_an_array_of_python_makes_the_call_eager(lab: Lab) -> None:
    values = array.array("d", [2.0])

    def function(x: Tensor) -> Tensor:
        return x * values[0]

    graphed = cgraph.graphed(function)
    with quiet():
        for number in range(5):
            values[0] = float(number)
            x = fresh(lab, 5)
            equal(graphed(x), function(x))
    assert numbers(graphed)[0] == 0


def test_a_setting_of_torch_belongs_to_the_key(lab: Lab) -> None:
    def function(x: Tensor) -> Tensor:
        return x + torch.ones(5, device=x.device).to(torch.get_default_dtype())

    before = torch.get_default_dtype()
    try:
        graphed = follows(lab, function, lambda: torch.set_default_dtype(torch.float64))
    finally:
        torch.set_default_dtype(before)
    assert len(graphed.report().keys) == 2


def test_a_name_that_names_nothing_raises_with_the_nearest(lab: Lab) -> None:
    holder = _Holder(scale=2.0)

    def function(x: Tensor) -> Tensor:
        return x * holder.scale

    graphed = cgraph.graphed(function, guards=["holder.scal"])
    with pytest.raises(cgraph.errors.ArgumentError, match=r"holder\.scale"):
        graphed(fresh(lab, 5))
