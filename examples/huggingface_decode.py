"""Decoding with a model of Hugging Face: a static cache, and one graph for each step.

Needs ``pip install transformers``. The model is small and has random weights, so nothing is loaded.
"""

import os

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
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
model = LlamaForCausalLM(config).to(device).eval()
PROMPT, NEW, REQUESTS = 8, 24, 2


cache = StaticCache(config=config, max_cache_len=PROMPT + NEW)


def decode(token, position):
    """Run one step: the next token of each request. The cache is read and written where it lies."""
    positions = position[None].expand(REQUESTS, 1)
    logits = model(token, past_key_values=cache, position_ids=positions).logits
    return logits[:, -1].argmax(-1, keepdim=True)


def generate(prompt, step):
    """Return the new tokens of each request; the prompt runs eagerly."""
    cache.reset()
    token = model(prompt, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)
    tokens = [token]
    for number in range(PROMPT, PROMPT + NEW - 1):
        token = step(token, torch.tensor([number], device=device))
        tokens.append(token)
    return torch.cat(tokens, 1)


graphed = cgraph.graphed(decode)
with torch.no_grad():
    for _ in range(3):
        prompt = torch.randint(256, (REQUESTS, PROMPT), device=device)
        assert torch.equal(generate(prompt, graphed), generate(prompt, decode))
print(graphed.report())
