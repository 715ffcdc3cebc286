"""P2 and P3: host cost of a call of a graphed callable, for torch and cgraph.

P2: a sum of 1, 4, 16 and 64 inputs of 16 KiB without gradients, with new inputs at each call and
with the static ones. P3: forward and backward pass of an 8-layer MLP (batch 64, width 256), with
gradients that are dropped before each step (``set_to_none``) and with gradients that are added up.
The last column is an autograd function with as many inputs, outputs and gradients that launches
nothing: the part that belongs to autograd, Python and the kernels of the accumulation.

    python benches/python/callables.py [--results folder]
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import cgraph
from common import calls_us, host_us, parsed, publish


def total(*tensors: torch.Tensor) -> torch.Tensor:
    """Return the sum of all."""
    result = tensors[0] * 2
    for tensor in tensors[1:]:
        result = result + tensor
    return result


def calls(count: int) -> list[str]:
    """Return one row of P2."""
    samples, new, other = (
        [torch.randn(64, 64, device="cuda") for _ in range(count)] for _ in range(3)
    )
    turns = [new, other]
    with torch.no_grad():
        theirs = torch.cuda.make_graphed_callables(total, tuple(samples))
        ours = cgraph.make_graphed_callables(
            total, tuple(torch.randn_like(sample) for sample in samples)
        )
        assert torch.equal(theirs(*new), ours(*new)), "torch's callable and cgraph's differ"
        figures = calls_us([(theirs, turns), (ours, turns), (ours, turns), (ours, [new])])
    torch_us, our_us, again, same_us = figures
    return [
        str(count),
        f"{torch_us:.1f}",
        f"{our_us:.1f} / {again:.1f}",
        f"{torch_us / our_us:.1f}",
        f"{same_us:.1f}",
    ]


class Nothing(torch.autograd.Function):
    """A node with the inputs and gradients of a graphed MLP, and no work."""

    @staticmethod
    def forward(ctx: Any, static: Any, *inputs: torch.Tensor) -> torch.Tensor:
        """Return the static output."""
        ctx.static = static
        return static["output"].detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Return the static gradients."""
        return (None, *(grad.detach() for grad in ctx.static["grads"]))


def training() -> list[list[str]]:
    """Return the rows of P3."""
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)]).cuda()
    sample = torch.randn(64, 256, device="cuda", requires_grad=True)
    x = torch.randn(64, 256, device="cuda", requires_grad=True)
    eager, theirs, ours, owner, empty = (copy.deepcopy(model) for _ in range(5))
    graphed = cgraph.graphed(owner)
    torch.cuda.make_graphed_callables(theirs, (sample,))
    cgraph.make_graphed_callables(ours, (sample.detach().clone().requires_grad_(),))
    surface = (x, *empty.parameters())
    static = {
        "output": torch.randn(64, 256, device="cuda"),
        "grads": [torch.randn_like(tensor) for tensor in surface],
    }

    def nothing(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = Nothing.apply(static, x, *empty.parameters())
        return result

    models: list[tuple[Callable[..., Any], nn.Module]]
    models = [(eager, eager), (theirs, theirs), (ours, ours), (graphed, owner), (nothing, empty)]

    def step(call: Callable[..., Any], owner: nn.Module, drop: bool) -> Callable[[], None]:
        def run() -> None:
            if drop:
                owner.zero_grad(set_to_none=True)
                x.grad = None
            call(x).sum().backward()

        return run

    for call, one in models[:4]:
        for _ in range(3):
            step(call, one, True)()
    assert graphed.report().captured == 1, graphed.report()
    for one in (ours, owner):
        for found, right in zip(one.parameters(), eager.parameters(), strict=True):
            assert torch.allclose(found.grad, right.grad, rtol=1e-3, atol=1e-3), "gradients differ"
    rows = []
    for name, drop in (("dropped", True), ("added up", False)):
        eager_us, torch_us, our_us, graphed_us, floor = host_us(
            [step(call, one, drop) for call, one in models], 10
        )
        rows.append(
            [
                name,
                f"{eager_us:.0f}",
                f"{torch_us:.0f}",
                f"{our_us:.0f}",
                f"{graphed_us:.0f}",
                f"{our_us / torch_us:.2f} / {graphed_us / torch_us:.2f}",
                f"{floor:.0f}",
            ]
        )
    with torch.no_grad():
        for _ in range(3):
            graphed(x)
        figures = host_us([lambda: theirs(x), lambda: ours(x), lambda: graphed(x)], 20)
    torch_us, our_us, graphed_us = figures
    ratio = f"{our_us / torch_us:.2f} / {graphed_us / torch_us:.2f}"
    rows.append(["forward only", "", *(f"{one:.1f}" for one in figures), ratio, ""])
    return rows


def main() -> None:
    options = parsed(__doc__)
    head = ["inputs", "torch µs", "cgraph µs (twice)", "torch / cgraph", "cgraph, unchanged µs"]
    rows = [calls(count) for count in (1, 4, 16, 64)]
    title = "host time of a call of a graphed callable"
    publish("P2-callables", title, head, rows, options.results)
    head = [
        "gradients",
        "eager µs",
        "torch µs",
        "cgraph's callable µs",
        "graphed µs",
        "cgraph / torch",
        "autograd alone µs",
    ]
    title = "host time of forward and backward of a graphed MLP"
    publish("P3", title, head, training(), options.results)


if __name__ == "__main__":
    main()
