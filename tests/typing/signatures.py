"""What type checkers see: decorated functions keep their signatures, unknown options are errors.

It is checked, not run, by mypy and by pyright: an ``ignore`` that hides no error is an error.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import cgraph


@cgraph.graphed
def plain(x: Tensor, scale: float = 1.0) -> Tensor:
    return x * scale


@cgraph.graphed(sizes=[1, 2, 4], outputs="static")
def sized(x: Tensor) -> tuple[Tensor, int]:
    return x, 1


@cgraph.eager_break
def eager(x: Tensor, times: int) -> list[Tensor]:
    return [x] * times


@cgraph.eager_break(name="named")
def named(x: Tensor) -> Tensor:
    return x


class Model(nn.Module):
    @cgraph.graphed
    def step(self, x: Tensor) -> Tensor:
        return x

    @cgraph.graphed(max_graphs=2)
    def sized(self, x: Tensor, *, rows: int) -> int:
        return rows


x, model = torch.ones(3), Model()
assert_type(plain(x), Tensor)
assert_type(plain(x, scale=2.0), Tensor)
assert_type(sized(x), tuple[Tensor, int])
assert_type(eager(x, 2), list[Tensor])
assert_type(named(x), Tensor)
assert_type(model.step(x), Tensor)
assert_type(model.sized(x, rows=3), int)
assert_type(plain.capture(x)(x), Tensor)
assert_type(plain.report().replays, int)
assert_type(cgraph.graphed(lambda: 3)(), int)

plain("x")  # type: ignore[arg-type]
plain(x, wrong=1)  # type: ignore[call-arg]
sized(x, 3)  # type: ignore[call-arg]
model.step()  # type: ignore[call-arg]
eager(x)  # type: ignore[call-arg]
cgraph.graphed(plain.__wrapped__, size=[1])  # type: ignore[call-overload]
cgraph.graphed(outputs="stale")  # type: ignore[call-overload]
cgraph.eager_break(nome="x")  # type: ignore[call-overload]
