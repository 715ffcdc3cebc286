"""Functions, or breaks in them, that give tensors of modules other memory."""

from __future__ import annotations

import copy
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from graphed_calls import quiet, states
from lab import Lab, fresh


class Given(nn.Module):
    """Reads a bias before and after it gets other memory."""

    index: Tensor

    def __init__(self, lab: Lab) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2).to(lab.device)
        self.banks = (self.linear.bias.data, torch.rand(2, device=lab.device))
        self.register_buffer("index", torch.zeros((), dtype=torch.int64, device=lab.device))

    def swap(self) -> None:
        self.linear.bias.data = self.banks[1]

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.swap()
        return self.linear(y)  # type: ignore[no-any-return]


class Swapped(Given):
    """Has two biases in turn, in a break."""

    @cgraph.eager_break
    def swap(self) -> None:
        self.index.add_(1)
        self.linear.bias.data = self.banks[int(self.index) % 2]


class Loaded(nn.Module):
    """Takes its bias from one of two banks, in a break."""

    def __init__(self, lab: Lab, how: Callable[[nn.Linear, Tensor], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2).to(lab.device)
        self.banks = tuple(
            nn.Parameter(torch.rand(2, device=lab.device), requires_grad=False) for _ in range(2)
        )
        self.how = how
        self.which = 0
        how(self.linear, self.banks[0])

    @cgraph.eager_break
    def load(self) -> None:
        self.how(self.linear, self.banks[self.which])

    def forward(self, x: Tensor) -> Tensor:
        self.load()
        return self.linear(x)  # type: ignore[no-any-return]


def gives_memory(linear: nn.Linear, bank: Tensor) -> None:
    linear.bias.data = bank.data


def exchanges(linear: nn.Linear, bank: Tensor) -> None:
    linear.bias = bank  # type: ignore[assignment]


@pytest.mark.filterwarnings("ignore:.*runs eagerly for:UserWarning")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("warmup", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", [Given, Swapped])
def test_a_function_that_gives_a_parameter_other_memory_is_not_replayed(
    lab: Lab, kind: type[Given], warmup: int, grad: bool
) -> None:
    torch.manual_seed(1)
    module = kind(lab)
    torch.manual_seed(1)
    other = kind(lab)
    other.load_state_dict(module.state_dict())
    graphed = cgraph.graphed(module, warmup=warmup)
    with torch.set_grad_enabled(grad):
        for _ in range(6):
            x = fresh(lab, 3, 2)
            assert torch.equal(graphed(x), other(x))
            assert torch.equal(module.linear.bias, other.linear.bias)
            assert torch.equal(module.index, other.index)
    # A bias that is given the same memory in each call has moved once.
    assert states(graphed) == ["captured" if kind is Given else "eager"]


@pytest.mark.parametrize("how", [gives_memory, exchanges])
def test_a_break_that_moves_what_segments_read_is_told(
    lab: Lab, how: Callable[[nn.Linear, Tensor], None]
) -> None:
    module = Loaded(lab, how)
    graphed = cgraph.graphed(module)
    with torch.no_grad():
        for which in (0, 1, 0):
            if which != module.which:
                module.which = which
                with pytest.raises(cgraph.errors.StateError, match="a break has moved or replaced"):
                    graphed(fresh(lab, 3, 2))
            for _ in range(2):
                x = fresh(lab, 3, 2)
                y = nn.functional.linear(x, module.linear.weight, module.banks[which])
                assert torch.equal(graphed(x), y)
    assert states(graphed) == ["captured"]


@pytest.mark.parametrize("where", ["list", "dict", "nested", "tuple", "global", "module"])
def test_a_tensor_that_is_exchanged_in_a_container_is_read(lab: Lab, where: str) -> None:
    holder = _Holder(lab, where)
    graphed = cgraph.graphed(holder.read)
    for _ in range(3):
        for _ in range(2):
            x = fresh(lab, 3)
            assert torch.equal(graphed(x), x + holder.tensor)
        holder.exchange(torch.rand(3, device=lab.device))
    assert states(graphed) == ["captured"]
    (key,) = graphed.report().keys
    assert {one.reason for one in key.rerecorded} == {"moved"}


def test_another_item_of_a_container_does_not_matter(lab: Lab) -> None:
    kept: dict[str, Any] = {"tensor": torch.rand(3, device=lab.device), "calls": 0}
    graphed = cgraph.graphed(lambda x: x + kept["tensor"])
    for _ in range(4):
        x = fresh(lab, 3)
        assert torch.equal(graphed(x), x + kept["tensor"])
        kept["calls"] += 1
    (key,) = graphed.report().keys
    assert not key.rerecorded and key.replays == 4


def test_containers_may_be_made_anew_with_what_they_have(lab: Lab) -> None:
    kept: Any = types.SimpleNamespace(caches=[torch.rand(3, device=lab.device)], one={"seen": 0})
    models: Any = {"a": nn.Linear(3, 3).to(lab.device)}

    def run(x: Tensor) -> Tensor:
        return models["a"](x) + kept.caches[0]  # type: ignore[no-any-return]

    graphed = cgraph.graphed(run)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for place in range(8):
            x = fresh(lab, 2, 3)
            assert torch.equal(graphed(x), run(x))
            kept.caches = [*kept.caches, torch.rand(3, device=lab.device)]
            models["b"] = nn.Linear(3, 3).to(lab.device)
            models["n"] = place
    (key,) = graphed.report().keys
    assert key.replays == 8 and not key.rerecorded


def test_a_tensor_in_two_containers_is_read_in_the_one_that_is_used(lab: Lab) -> None:
    class Two:
        def __init__(self) -> None:
            self.first = [torch.rand(3, device=lab.device)]
            self.other = self.first

        def read(self, x: Tensor) -> Tensor:
            return x + self.other[0]

    two = Two()
    graphed = cgraph.graphed(two.read)
    for _ in range(3):
        x = fresh(lab, 3)
        assert torch.equal(graphed(x), two.read(x))
        two.other = [torch.rand(3, device=lab.device)]


@pytest.mark.parametrize("kind", ["gru", "list", "dict"])
def test_parameters_that_a_module_also_has_in_a_container_have_not_moved(
    lab: Lab, kind: str
) -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.weights: Any = []

        def forward(self, x: Tensor) -> Tensor:
            if kind == "list":
                self.weights = [self.linear.weight]
                return nn.functional.linear(x, self.weights[0])
            self.weights = dict(self.named_parameters())
            return nn.functional.linear(x, self.weights["linear.weight"])

    net = (nn.GRU(4, 4) if kind == "gru" else Listed()).to(lab.device)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    graphed = cgraph.graphed(net)
    for _ in range(8):
        x = fresh(lab, 5, 2, 4)
        y, right = (run(x)[0] if kind == "gru" else run(x) for run in (graphed, net))
        torch.testing.assert_close(y, right)
        optimizer.zero_grad()
        y.sum().backward()
        optimizer.step()
        del y, right
    (key,) = graphed.report().keys
    assert key.state == "captured" and not key.rerecorded


@pytest.mark.parametrize("warmup", [0, 1, 3])
def test_a_capture_copies_the_weights_of_no_recurrent_module(
    lab: Lab, warmup: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = nn.Sequential(nn.GRU(4, 4)).to(lab.device)
    copied: list[nn.Module] = []
    monkeypatch.setattr(nn.GRU, "flatten_parameters", lambda self: copied.append(self))
    with torch.no_grad():
        net(fresh(lab, 5, 2, 4))
    graphed = cgraph.graphed(net, warmup=warmup)
    for _ in range(3):
        graphed(fresh(lab, 5, 2, 4))[0].sum().backward()
        net(fresh(lab, 5, 2, 4))[0].sum().backward()
    assert states(graphed) == ["captured"]
    assert not copied


def test_a_break_may_add_modules_that_no_segment_reads(lab: Lab) -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3).to(lab.device)
            self.calls = 0

        @cgraph.eager_break
        def grow(self) -> None:
            self.calls += 1
            if self.calls % 7 == 0:
                self.linear.add_module(f"extra{self.calls}", nn.Identity())

        def forward(self, x: Tensor) -> Tensor:
            self.grow()
            return self.linear(x)  # type: ignore[no-any-return]

    module = Growing()
    graphed = cgraph.graphed(module)
    with torch.no_grad():
        for _ in range(9):
            x = fresh(lab, 2, 3)
            assert torch.equal(graphed(x), nn.functional.linear(x, *module.linear.parameters()))


def test_a_module_that_is_exchanged_in_a_list_is_noticed(lab: Lab) -> None:
    layers = [nn.Linear(3, 3).to(lab.device) for _ in range(2)]

    def run(x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x)
        return x

    graphed = cgraph.graphed(run)
    with torch.no_grad():
        for _ in range(3):
            x = fresh(lab, 2, 3)
            assert torch.equal(graphed(x), run(x))
            layers[1] = nn.Linear(3, 3).to(lab.device)


TABLE: dict[str, list[Tensor]] = {}


class _Holder:
    """Has a tensor in a container."""

    def __init__(self, lab: Lab, where: str) -> None:
        self.where = where
        self.tensor = torch.rand(3, device=lab.device)
        self.items = [self.tensor]
        self.table = {"one": self.tensor}
        self.deep = {"layers": [{"k": self.tensor}]}
        self.pairs: Any = {"kv": [(self.tensor, self.tensor)]}
        self.module = nn.Module()
        self.module.caches = [self.tensor]  # type: ignore[assignment]
        TABLE["it"] = self.items

    def read(self, x: Tensor) -> Tensor:
        if self.where == "list":
            return x + self.items[0]
        if self.where == "dict":
            return x + self.table["one"]
        if self.where == "nested":
            return x + self.deep["layers"][0]["k"]
        if self.where == "tuple":
            return x + self.pairs["kv"][0][1]
        if self.where == "global":
            return x + TABLE["it"][0]
        return x + self.module.caches[0]  # type: ignore[index,operator]

    def exchange(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.items[0] = self.table["one"] = tensor
        self.deep["layers"] = [{"k": tensor}]
        self.pairs["kv"] = [(tensor, tensor)]
        self.module.caches = [tensor]  # type: ignore[assignment]
        TABLE["it"] = [tensor]


@pytest.mark.parametrize("grad", [False, True])
def test_a_parameter_that_the_first_call_makes_anew_is_followed_beside_other_tensors(
    lab: Lab, grad: bool
) -> None:
    net = nn.Linear(2, 2, bias=False).to(lab.device)
    other = fresh(lab, 2)
    calls: list[int] = []

    def function(x: Tensor) -> Tensor:
        if not calls:
            net.weight = nn.Parameter(net.weight.detach().clone())
        calls.append(1)
        return net(x) + other  # type: ignore[no-any-return]

    graphed = cgraph.graphed(function)
    with torch.set_grad_enabled(grad):
        for turn in range(5):
            if turn == 3:
                net.weight.data = fresh(lab, 2, 2)
            x = fresh(lab, 1, 2)
            assert torch.allclose(graphed(x), net(x) + other)
    assert states(graphed) == ["captured"]


LAID_ANEW: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda weight: weight.t(),
    "cut": lambda weight: weight[:2],
    "expanded": lambda weight: weight[:1].expand(4, 4),
    "transposed and cut": lambda weight: weight.t()[:3],
}


@pytest.mark.parametrize("how", LAID_ANEW)
@pytest.mark.parametrize("grad", [False, True])
def test_a_parameter_that_is_laid_out_anew_where_it_lies_is_captured_anew(
    lab: Lab, how: str, grad: bool
) -> None:
    net = nn.Linear(4, 4, bias=False).to(lab.device)
    graphed = cgraph.graphed(net)
    for _ in range(2):
        for _ in range(2):
            x = fresh(lab, 3, 4)
            with torch.set_grad_enabled(grad):
                torch.testing.assert_close(graphed(x), net(x))
        net.weight.data = LAID_ANEW[how](net.weight.data)
    assert graphed.report().keys[0].rerecorded[0].reason == "moved"


@pytest.mark.parametrize("change", [Tensor.t_, lambda one: one.resize_(2, 3)])
def test_a_tensor_that_is_laid_out_anew_in_place_is_captured_anew(lab: Lab, change: Any) -> None:
    held = fresh(lab, 3, 3)
    graphed = cgraph.graphed(lambda x: held @ x)
    for _ in range(2):
        for _ in range(2):
            x = fresh(lab, 3)
            torch.testing.assert_close(graphed(x), held @ x)
        change(held)
    (key,) = graphed.report().keys
    assert [one.reason for one in key.rerecorded] == ["moved"]


@pytest.mark.parametrize("dimensions", [2, 5, 6, 7])
def test_a_buffer_of_any_dimensions_that_is_laid_out_anew_is_captured_anew(
    lab: Lab, dimensions: int
) -> None:
    held = fresh(lab, *([2] * dimensions))
    graphed = cgraph.graphed(lambda x: held * x)
    for _ in range(2):
        for _ in range(2):
            x = fresh(lab, 2)
            torch.testing.assert_close(graphed(x), held * x)
        held.transpose_(0, 1)
    (key,) = graphed.report().keys
    assert [one.reason for one in key.rerecorded] == ["moved"]


class Displacing(nn.Module):
    """Gives one of its tensors other memory in each call."""

    buffer: Tensor

    def __init__(self, lab: Lab, way: str) -> None:
        super().__init__()
        self.way = way
        self.plain = fresh(lab, 4)
        self.register_buffer("buffer", fresh(lab, 4))
        self.weight = nn.Parameter(fresh(lab, 4))

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "set_":
            self.plain.set_(self.plain + 1)
            return x + self.plain
        if self.way == "grows":
            self.plain.resize_(8)
            self.plain.fill_(3)
            return x + self.plain[:4]
        owned = getattr(self, self.way)
        owned.data = owned.data + 1
        return x + owned


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("way", ["plain", "buffer", "weight", "set_", "grows"])
def test_a_tensor_that_each_call_gives_other_memory_is_what_eager_calls_make_of_it(
    lab: Lab, way: str, warmup: int
) -> None:
    own = Displacing(lab, way)
    eager = copy.deepcopy(own)
    function = cgraph.graphed(own, warmup=warmup)
    with torch.no_grad(), quiet():
        for _ in range(6):
            x = fresh(lab, 2, 4)
            assert torch.equal(function(x), eager(x))
            for name in ("plain", "buffer", "weight"):
                assert torch.equal(getattr(own, name), getattr(eager, name)), name
    # What has grown once is as large as it has to be.
    assert states(function) == (["captured"] if way == "grows" else ["eager"])
