"""Generating with a model of Hugging Face: `generate`, a replay a token, and one launch for all.

Needs ``pip install transformers``. The model is small and has random weights, so nothing is loaded.
"""

import os
import time

import torch

import cgraph

try:
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache
except ImportError:
    raise SystemExit("this example needs transformers: pip install transformers") from None

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cpu":
    os.environ.setdefault("CGRAPH_DRIVER", "sim")  # CPU tensors stand for a GPU's

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    eos_token_id=None,
    pad_token_id=0,
)
model = LlamaForCausalLM(config).to(device).eval()
PROMPT, NEW, REQUESTS = 8, 256 if device == "cuda" else 24, 2
cache = StaticCache(config=config, max_cache_len=PROMPT + NEW)


def step(token, position):
    """Choose the next token of each request; everything is changed where it lies."""
    positions = position.expand(REQUESTS, 1)
    logits = model(token, past_key_values=cache, position_ids=positions).logits
    token.copy_(logits[:, -1].argmax(-1, keepdim=True))
    position.add_(1)


def prefilled(prompt):
    """Run the prompt eagerly, and return its first new token, and the next position."""
    cache.reset()
    first = model(prompt, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)
    return first, torch.tensor([[PROMPT]], device=device)


def by_generate(prompt):
    """Let the library decode; on a GPU it compiles the step."""
    options = {"max_new_tokens": NEW, "do_sample": False, "cache_implementation": "static"}
    return model.generate(prompt, **options)[:, PROMPT:]


state = [torch.zeros(rows, 1, dtype=torch.long, device=device) for rows in (REQUESTS, 1)]
replayed = cgraph.graphed(step, static_args=("token", "position"))
looped = cgraph.loop(max_steps=NEW - 1, emit="token")(step)


def by_replays(prompt):
    """Replay a graph for each token, and read each as it comes."""
    for one, begin in zip(state, prefilled(prompt), strict=True):
        one.copy_(begin)
    tokens = [state[0].to("cpu", copy=True)]
    for _ in range(NEW - 1):
        replayed(*state)
        tokens.append(state[0].to("cpu", copy=True))
    return torch.cat(tokens, 1)


def by_loop(prompt):
    """Launch once, and read each token as it comes."""
    for one, begin in zip(state, prefilled(prompt), strict=True):
        one.copy_(begin)
    return torch.cat([state[0].to("cpu", copy=True), *looped(*state)], 1)


with torch.no_grad():
    for way in (by_generate, by_replays, by_loop):
        for _ in range(3):
            prompt = torch.randint(1, 1024, (REQUESTS, PROMPT), device=device)
            begin, cpu = time.perf_counter(), time.process_time()
            tokens = way(prompt).cpu()
            seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
        assert torch.equal(tokens, by_generate(prompt).cpu()), way
        rate = REQUESTS * NEW / seconds
        print(f"{way.__name__:12} {rate:8.0f} tokens a second, {cpu * 1e3:7.1f} ms of the host's")
print(looped.report())
