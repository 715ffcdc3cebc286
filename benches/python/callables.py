"""P2 and P3: what a call of a graphed callable costs the host, for torch and cgraph.

P2: a sum of 1, 4, 16 and 64 inputs of 16 KiB without gradients, with new inputs at each call and
with the static ones. P3: forward and backward pass of an 8-layer MLP (batch 64, width 256), with
gradients that are dropped before each step (``set_to_none``) and with gradients that are added up.
The last column is an autograd function with as many inputs, outputs and gradients that launches
nothing: the part that belongs to autograd, Python and the kernels of the accumulation.

    python benches/python/callables.py [--markdown results.md]
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import cgraph
from common import calls_us, host_us, publish


def total(*tensors: torch.Tensor) -> torch.Tensor:
    """The sum of all."""
    result = tensors[0] * 2
    for tensor in tensors[1:]:
        result = result + tensor
    return result


def calls(count: int) -> list[str]:
    """One row of P2."""
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
    """As many inputs and gradients as a graphed MLP, and no work."""

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
    """The rows of P3."""
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)]).cuda()
    sample = torch.randn(64, 256, device="cuda", requires_grad=True)
    x = torch.randn(64, 256, device="cuda", requires_grad=True)
    eager, theirs, ours, empty = (copy.deepcopy(model) for _ in range(4))
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
    models = [(eager, eager), (theirs, theirs), (ours, ours), (ours, ours), (nothing, empty)]

    def step(call: Callable[..., Any], owner: nn.Module, drop: bool) -> Callable[[], None]:
        def run() -> None:
            if drop:
                owner.zero_grad(set_to_none=True)
                x.grad = None
            call(x).sum().backward()

        return run

    for call, owner in models[:3]:
        step(call, owner, True)()
    for ours_grad, grad in zip(ours.parameters(), eager.parameters(), strict=True):
        assert torch.allclose(ours_grad.grad, grad.grad, rtol=1e-3, atol=1e-3), "gradients differ"
    rows = []
    for name, drop in (("dropped", True), ("added up", False)):
        eager_us, torch_us, our_us, again, floor = host_us(
            [step(call, owner, drop) for call, owner in models], 10
        )
        rows.append(
            [
                name,
                f"{eager_us:.0f}",
                f"{torch_us:.0f}",
                f"{our_us:.0f} / {again:.0f}",
                f"{our_us / torch_us:.2f}",
                f"{floor:.0f}",
            ]
        )
    with torch.no_grad():
        torch_us, our_us, again = host_us([lambda: theirs(x), lambda: ours(x), lambda: ours(x)], 20)
    ratio = f"{our_us / torch_us:.2f}"
    rows.append(["forward only", "", f"{torch_us:.1f}", f"{our_us:.1f} / {again:.1f}", ratio, ""])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--markdown", type=Path, help="append the tables to this file")
    options = parser.parse_args()
    head = ["inputs", "torch µs", "cgraph µs (twice)", "torch / cgraph", "cgraph, unchanged µs"]
    rows = [calls(count) for count in (1, 4, 16, 64)]
    publish("P2: host time of a call of a graphed callable", head, rows, options.markdown)
    head = [
        "gradients",
        "eager µs",
        "torch µs",
        "cgraph µs (twice)",
        "cgraph / torch",
        "autograd alone µs",
    ]
    title = "P3: host time of forward and backward of a graphed MLP"
    publish(title, head, training(), options.markdown)


if __name__ == "__main__":
    main()
