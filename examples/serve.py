"""A small server in four ways: eager, ``reduce-overhead``, one graph a step, captured pieces.

Prompts run one by one, slots decode together; ``full`` has the model's code as it is. It prints
tokens a second, the host time of a decode step, and the share of tokens that are as in eager.
"""

import os
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

import cgraph
from cgraph.piecewise import PiecewiseBackend, mark_size


class config:  # of a decoder like Llama's; the prompt that runs, if one does: its slot and length
    layers, heads, width, vocab, slots, context, tokens, prompt = 8, 8, 512, 8192, 16, 384, 64, None


DECODE, PROMPTS = (1, 2, 4, 8, 16), (32, 64, 128, 256)
WAYS = "eager", "reduce-overhead", "full", "pieces"


@torch.library.custom_op("serve::attend", mutates_args=("cache", "out"))
def attend(qkv: Tensor, cache: Tensor, slots: Tensor, at: Tensor, out: Tensor) -> None:
    """Store keys and values of rows, and attend: qkv [3, rows, heads, d], out [rows, heads, d]."""
    cache[:, slots, at] = qkv[1:]
    if config.prompt is not None:  # known on the host only: a graph would keep one prompt's
        slot, length = config.prompt
        rows = (one[:length].transpose(0, 1) for one in (qkv[0], *cache[:, slot]))
        out[:length] = sdpa(*rows, is_causal=True).transpose(0, 1)
    else:
        seen = torch.arange(cache.shape[2], device=at.device) <= at[:, None]
        rows = (one.transpose(1, 2) for one in (qkv[0][:, None], *cache[:, slots]))
        out.copy_(sdpa(*rows, seen[:, None, None])[:, :, 0])


attend.register_fake(lambda qkv, cache, slots, at, out: None)


class Layer(nn.Module):
    """Attention with a cache, and gated linear layers."""

    def __init__(self) -> None:
        super().__init__()
        width, self.shape = config.width, (config.heads, config.width // config.heads)
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 6 * width), nn.Linear(3 * width, width)
        self.register_buffer("cache", torch.zeros(2, config.slots + 1, config.context, *self.shape))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, at: Tensor) -> Tensor:
        qkv = self.qkv(self.first(x)).view(-1, 3, *self.shape).transpose(0, 1)
        a, b = qkv[:2].chunk(2, -1)
        turned = torch.cat((a * cos - b * sin, a * sin + b * cos), -1)
        out = torch.empty_like(x).view(-1, *self.shape)
        torch.ops.serve.attend(torch.cat((turned, qkv[2:])), self.cache, slots, at, out)
        x = x + self.mix(out.flatten(1))
        gate, up = self.up(self.second(x)).chunk(2, -1)
        return x + self.down(nn.functional.silu(gate) * up)


class Decoder(nn.Module):
    """Layers between an embedding and a head of the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab, config.width)
        self.layers = nn.ModuleList(Layer() for _ in range(config.layers))
        self.norm, half = nn.RMSNorm(config.width), config.width // config.heads // 2
        self.register_buffer("speeds", 1e4 ** -(torch.arange(half) / half))

    def forward(self, rows: Tensor) -> Tensor:
        """Return the next token of each row: rows [n, 3] of token, slot and position; [n]."""
        tokens, slots, at = rows.unbind(1)
        x, angles = self.embedding(tokens), at[:, None, None] * self.speeds
        for layer in self.layers:
            x = layer(x, angles.cos(), angles.sin(), slots, at)
        return (self.norm(x) @ self.embedding.weight.T).argmax(-1)


def calls_of(way: str, model: Decoder, empty: dict[int, Tensor]) -> tuple[Callable, Callable]:
    """Return what runs prompts, and what decodes."""
    if way == "eager":
        return model, model
    if way == "reduce-overhead":
        return torch.compile(model, dynamic=True), torch.compile(model, mode=way, dynamic=False)
    backend = PiecewiseBackend(splitting_ops=["serve::attend"], capture_sizes=[*empty])
    pieces = torch.compile(model, backend=backend, fullgraph=True)
    backend.warm_up(lambda size: pieces(mark_size(empty[size])), freeze=True)
    if way == "pieces":
        return pieces, pieces
    with cgraph.capture_scope() as pool:
        ladder = cgraph.GraphLadder(pool)
        for size in reversed(DECODE):  # the largest first
            ladder.capture(size, model, empty[size], before=lambda n=size: model(empty[n]))
    return pieces, lambda rows: ladder(len(rows), rows)


def serve(prefill: Callable, decode: Callable, prompts: list[Tensor]) -> tuple[Tensor, list[float]]:
    """Return the prompts with the tokens that follow, and the host time of each step in µs."""
    text = prompts[0].new_zeros(config.slots + 1, config.context)
    waiting, active, done, times = [*range(len(prompts))], {}, {}, []

    def step(call: Callable, sizes: tuple[int, ...], rows: list, n: int = 0) -> None:
        rows += [(config.slots, 0)] * (next(one for one in sizes if one >= len(rows)) - len(rows))
        slots, at = torch.tensor(rows, pin_memory=text.is_cuda).to(text.device, non_blocking=True).T
        text[slots[n:], at[n:] + 1] = call(torch.stack((text[slots, at], slots, at), 1))[n:]

    while waiting or active:
        while waiting and (free := set(range(config.slots)) - active.keys()):
            slot, length = min(free), len(prompts[waiting[0]])
            config.prompt, text[slot, :length] = (slot, length), prompts[waiting[0]]
            step(prefill, PROMPTS, [(slot, n) for n in range(length)], length - 1)
            config.prompt, active[slot] = None, (waiting.pop(0), length)
        began = time.perf_counter()
        step(decode, DECODE, [(slot, at) for slot, (_, at) in active.items()])
        times.append((time.perf_counter() - began) * 1e6)
        for slot, (number, at) in list(active.items()):
            active[slot] = number, at + 1
            if at + 2 == len(prompts[number]) + config.tokens:
                done[number] = text[slot, : at + 2].clone()
                del active[slot]
    return torch.cat([done[number] for number in sorted(done)]), times


@torch.inference_mode()
def main(device: str, count: int = 48, ways: tuple = WAYS) -> None:
    """Serve so many prompts in each way, and print the table."""
    torch.manual_seed(0)
    model = Decoder().to(device)
    empty = {n: torch.zeros(n, 3, dtype=torch.int64, device=device) for n in (*DECODE, *PROMPTS)}
    prompts = [torch.randint(config.vocab, (5 + 5 * n,), device=device) for n in range(count)]
    right, _ = serve(model, model, prompts)
    print(f"{'way':16}{'tokens/s':>10}{'host µs a step':>16}{'as in eager':>13}")
    for way in ways:
        calls = calls_of(way, model, empty)
        serve(*calls, prompts)
        began = time.perf_counter()
        texts, times = serve(*calls, prompts)
        same = (texts == right).float().mean().item()  # waits for the device
        speed = count * config.tokens / (time.perf_counter() - began)
        print(f"{way:16}{speed:10.0f}{sorted(times)[len(times) // 2]:16.0f}{same:13.1%}")


if __name__ == "__main__":
    if torch.cuda.is_available():
        main("cuda")
    else:
        print("No GPU here: a small model on the simulator, no speed is claimed.", flush=True)
        os.environ["CGRAPH_DRIVER"] = "sim"
        config.layers, config.width, config.heads, config.slots, config.tokens = 2, 64, 2, 3, 7
        main("cpu", 5, ("eager", "full", "pieces"))
