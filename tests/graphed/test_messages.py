"""The whole text of messages about the most frequent mistakes, and where else causes are told."""

from __future__ import annotations

import ast
import logging
import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from cgraph import Cause
from cgraph.errors import ArgumentError, CaptureError, EagerWarning
from lab import Lab, fresh

FILE = "graphed/test_messages.py"
seen: list[int] = []
total = 0.0
cache = torch.zeros(0)


def loss_of(x: Tensor) -> float:
    return x.sum().item()


def clipped(x: Tensor) -> Tensor:
    if x.sum().item() > 100:
        return x * 0
    return x * 2


def shown(x: Tensor) -> Tensor:
    print(x)
    return x * 2


def scaled(x: Tensor, scale: Tensor) -> Tensor:
    return x * scale.to(x.device)


def noted(x: Tensor) -> Tensor:
    seen.append(x.shape[0])
    return x * 2


def counted(x: Tensor) -> Tensor:
    global total
    total += 1.0
    return x * total


def cached(x: Tensor) -> Tensor:
    global cache
    cache = torch.cat([cache.to(x.device), x])
    return cache.sum()


def told_of(function: Callable[..., Any], *args: Any) -> str:
    """Return the only warning about a graphed function that never gets a graph."""
    graphed = cgraph.graphed(function)
    with pytest.warns(EagerWarning) as caught:
        for _ in range(12):
            graphed(*args)
    [warning] = caught
    assert isinstance(warning.message, EagerWarning)
    cause = warning.message.cause
    assert cause is not None and str(warning.message).endswith(f" (cgraph why {cause.code})")
    assert cause.code in {key.code for key in graphed.report().keys}
    return str(warning.message).partition(" (cgraph why")[0]


def line_of(function: Callable[..., Any], number: int) -> str:
    return f"{FILE}:{function.__code__.co_firstlineno + number}"


def test_a_host_read_is_told_with_its_line(lab: Lab) -> None:
    assert told_of(loss_of, fresh(lab, 3)) == (
        f"{line_of(loss_of, 1)} `return x.sum().item()`: aten.item cannot be captured, as it reads"
        " a value on the host, which waits for the device. loss_of runs eagerly for (x: float32[3],"
        " grad). Fix: return the tensor and read it after the replay; or mark the work with"
        " @cgraph.eager_break"
    )


def test_a_branch_on_a_value_is_told_with_torch_where(lab: Lab) -> None:
    assert told_of(clipped, fresh(lab, 3)) == (
        f"{line_of(clipped, 1)} `if x.sum().item() > 100:`: aten.item cannot be captured, as it"
        " lets a value on the device decide in Python, which waits for the device. clipped runs"
        " eagerly for (x: float32[3], grad). Fix: choose on the device with torch.where, or decide"
        " outside and capture each case; or mark the work with @cgraph.eager_break"
    )


def test_a_print_is_told_with_its_line(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    if lab.device == "cpu":
        about = (
            "Tensor.__repr__ cannot be captured, as it reads a value on the host, which waits for"
            " the device"
        )
        more = "; or mark the work with @cgraph.eager_break"
    else:
        about = (
            "it reads a value on the host, which waits for the device (CUDA error: operation not"
            " permitted when stream is capturing)"
        )
        more = ""
    assert told_of(shown, fresh(lab, 3)) == (
        f"{line_of(shown, 1)} `print(x)`: {about}. shown runs eagerly for (x: float32[3], grad)."
        f" Fix: return the tensor and read it after the replay{more}"
    )


def test_a_list_that_grows_is_told_with_the_line_that_changes_it(lab: Lab) -> None:
    seen.clear()
    assert told_of(noted, fresh(lab, 3)) == (
        f"{line_of(noted, 1)} `seen.append(x.shape[0])`: the function changes seen: it has other"
        " items or attributes. noted runs eagerly for (x: float32[3], grad). Fix: return the"
        " value and change it after the call, or keep it in a tensor that is written in place;"
        " side_effects= lets graphed skip changes of plain values that nothing reads"
    )


def test_a_global_with_another_value_in_each_call_is_told_with_the_line_that_sets_it(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "total", 0.0)
    assert told_of(counted, fresh(lab, 3)) == (
        f"{line_of(counted, 2)} `total += 1.0`: total had a new value in 8 calls in a row (now 9.0"
        "). counted runs eagerly for (x: float32[3], grad). Fix: make it a tensor;"
        " guards={'total': False} would freeze it at the value of the capture"
    )


def test_a_cache_that_grows_is_told_to_have_one_size(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "cache", torch.zeros(3, device=lab.device))
    assert told_of(cached, fresh(lab, 3)) == (
        f"{line_of(cached, 2)} `cache = torch.cat([cache.to(x.device), x])`: cache had a new value"
        " in 8 calls in a row (now float32[33]). cached runs eagerly for (x: float32[3], grad)."
        " Fix: write into a tensor of one size, with cache.index_copy_(dim, position, new) and a"
        " position of shape [1]: each other shape needs a graph of its own"
    )


def test_an_argument_with_a_new_shape_in_each_call_is_told_once(lab: Lab) -> None:
    graphed, grown = cgraph.graphed(lambda x: x * 2), fresh(lab, 1)
    with pytest.warns(EagerWarning) as caught:
        for _ in range(40):
            grown = torch.cat([graphed(grown), fresh(lab, 1)])
    [warning] = caught
    assert isinstance(warning.message, EagerWarning)
    assert warning.message.cause is Cause.MANY_SHAPES
    assert re.search(
        r"x had a new shape in 16 calls in a row \(now float32\[17\]\), and no call was a replay\."
        r" Each of them ran \S+ eagerly\. Fix: give sizes= .* cache\.index_copy_",
        str(warning.message),
    )


def test_new_shapes_between_replays_are_not_told_of(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda x: x * 2)
    for rows in range(1, 40):
        for length in (rows, 1):
            graphed(fresh(lab, length))


@pytest.mark.gpu
def test_a_tensor_on_the_host_is_told_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CGRAPH_DRIVER", "cuda")
    text = told_of(scaled, torch.ones(3, device="cuda"), torch.ones(3))
    assert text.partition("`: ")[2] == (
        "tensor elsewhere: scale is on cpu. scaled runs eagerly for (x: float32[3], scale:"
        " float32[3], grad). Fix: move the tensor to the device before the call"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_call_without_a_gpu_is_told_of_the_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CGRAPH_DRIVER", "cuda")
    text = told_of(noted, torch.ones(3))
    assert text.partition("`: ")[2] == (
        "no GPU: x is on cpu. noted runs eagerly for (x: float32[3], grad). Fix: to work without a"
        " GPU, choose the simulator by name: CGRAPH_DRIVER=sim, or cgraph.sim.use()"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("backend", ["cgraph", "cgraph_aot"])
def test_a_compiled_function_without_a_gpu_is_told_of_the_simulator(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CGRAPH_DRIVER", "cuda")
    torch.compiler.reset()
    fast = torch.compile(lambda x: x * 2, backend=backend)
    with pytest.warns(EagerWarning) as caught:
        assert torch.equal(fast(torch.ones(3)), torch.full((3,), 2.0))
    [warning] = [one for one in caught if issubclass(one.category, EagerWarning)]
    assert re.fullmatch(
        r"skipping cudagraphs due to no GPU: tensors are on the host\. <lambda>"
        r" \(test_messages\.py:\d+\) runs without a graph\. Fix: to work without a GPU, choose the"
        r" simulator by name: CGRAPH_DRIVER=sim, or cgraph\.sim\.use\(\) \(cgraph why CG-NO-GPU\)",
        str(warning.message),
    )


def test_an_argument_of_a_wrong_dtype_is_named_with_the_right_one(lab: Lab) -> None:
    ladder, linear = cgraph.GraphLadder(), nn.Linear(3, 3).to(lab.device)
    with torch.no_grad():
        ladder.capture(1, linear, fresh(lab, 2, 3))
    with pytest.raises(ArgumentError) as caught:
        ladder(1, fresh(lab, 2, 3).double())
    at = lab.device if lab.device == "cpu" else f"{lab.device}:0"
    assert str(caught.value) == (
        f"argument 0 is a torch.float64 tensor of shape [2, 3] on {at}, expected a torch.float32"
        f" tensor of shape [2, 3] on {at}"
    )


def test_a_failed_capture_has_its_cause_as_an_attribute(lab: Lab) -> None:
    graphed = cgraph.graphed(loss_of, on_fail="raise")
    graphed(fresh(lab, 3))
    with pytest.raises(CaptureError, match="CG-HOST-READ") as caught:
        graphed(fresh(lab, 3))
    assert caught.value.cause is Cause.HOST_READ


def test_a_code_can_be_silenced_alone(lab: Lab) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", message="(?s).*CG-HOST-READ")
        for function in (loss_of, clipped):
            graphed = cgraph.graphed(function)
            for _ in range(3):
                graphed(fresh(lab, 3))
    assert [getattr(one.message, "cause", None) for one in caught] == [Cause.BRANCH]


@pytest.mark.filterwarnings("ignore:.*runs eagerly:cgraph.errors.EagerWarning")
def test_each_capture_recapture_and_failure_is_one_line_of_the_log(
    lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    weight = [fresh(lab, 3)]

    def weighted(x: Tensor) -> Tensor:
        return x * weight[0]

    caplog.set_level(logging.INFO, "cgraph")
    graphed = cgraph.graphed(weighted)
    for number in range(6):
        if number == 3:
            weight[0] = fresh(lab, 3)
        graphed(fresh(lab, 3))
    stays_eager = cgraph.graphed(loss_of)
    for _ in range(3):
        stays_eager(fresh(lab, 3))
    lines = [one.getMessage() for one in caplog.records if one.name.startswith("cgraph")]
    name = weighted.__qualname__
    assert [one.startswith(f"{name} (x: float32[3]") for one in lines] == [True] * 3 + [False]
    assert ["is captured: " in lines[0], "drops its graph: weight[0]" in lines[1]] == [True, True]
    assert "is captured: " in lines[2] and lines[3].endswith("(cgraph why CG-HOST-READ)")


@pytest.mark.filterwarnings("ignore:.*runs eagerly:cgraph.errors.EagerWarning")
def test_calls_that_are_eager_for_one_reason_are_one_line_of_the_log(
    lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cgraph")
    graphed = cgraph.graphed(lambda x, items: x * sum(items))
    for rows in range(1, 9):
        graphed(fresh(lab, rows), iter([1, 2]))
    [line] = [one.getMessage() for one in caplog.records if one.name.startswith("cgraph")]
    assert line.endswith("(cgraph why CG-ITERATOR)")


def test_a_refusal_that_raises_is_a_line_of_the_log(
    lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cgraph")
    graphed = cgraph.graphed(loss_of, on_fail="raise")
    graphed(fresh(lab, 3))
    with pytest.raises(CaptureError):
        graphed(fresh(lab, 3))
    assert [one.name for one in caplog.records if "CG-HOST-READ" in one.getMessage()] == [
        "cgraph.graphed"
    ]


def test_a_failed_capture_by_hand_has_its_cause_and_a_line_of_the_log(
    lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cgraph")
    x = fresh(lab, 3)
    with pytest.raises(RuntimeError) as caught, cgraph.graph(cgraph.CUDAGraph()):
        loss_of(x)
    if lab.device == "cpu":  # on a GPU it is torch's own error
        assert isinstance(caught.value, CaptureError) and caught.value.cause is Cause.HOST_READ
    [line] = [one.getMessage() for one in caplog.records if one.name == "cgraph.capture"]
    assert line.startswith("the capture has failed: ") and "CG-HOST-READ" in line


def test_a_cause_that_changes_its_values_is_told_once(lab: Lab) -> None:
    kept = [torch.zeros(0, device=lab.device)]

    def appended(x: Tensor) -> Tensor:
        kept[0] = torch.cat([kept[0], x])
        return kept[0].sum()

    assert "write into a tensor of one size" in told_of(appended, fresh(lab, 3))


def test_a_pickled_error_has_its_cause_by_name() -> None:
    text = pickle.dumps(Cause.HOST_READ)
    assert pickle.loads(text) is Cause.HOST_READ and b"reads a value" not in text


def test_every_warning_of_the_package_has_a_cause() -> None:
    root = Path(cgraph.__file__).parent
    for file in sorted(root.glob("**/*.py")):
        tree = [*ast.walk(ast.parse(file.read_text()))]
        named = [
            one for one in tree if isinstance(one, ast.ImportFrom) and one.module == "warnings"
        ]
        calls = [ast.unparse(one.func) for one in tree if isinstance(one, ast.Call)]
        warns = {"warnings.warn", "warnings.warn_explicit"}.intersection(calls)
        assert file.name == "_reason.py" or not (named or warns), file


def test_each_code_has_a_page_with_an_example() -> None:
    folder = Path(cgraph.__file__).parent / "codes"
    assert {one.stem for one in folder.glob("*.md")} == {one.code for one in Cause}
    for cause in Cause:
        own = (folder / f"{cause.code}.md").read_text()
        assert own.count("```") >= 2 and len(own.split()) > 40, cause
        assert cause.page.startswith(f"# {cause.code}\n\nIt {cause.what}.\n"), cause
        assert cause.page.endswith(own) and Cause.of_code(cause.code.lower()) is cause
    with pytest.raises(ValueError, match="code is 'CG-READ', expected one as CG-HOST-READ"):
        Cause.of_code("CG-READ")
