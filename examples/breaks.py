"""Work that no graph can have, in the middle of one: it stays eager, the rest is replayed."""

import os

import torch

import cgraph

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cpu":
    os.environ.setdefault("CGRAPH_DRIVER", "sim")  # CPU tensors stand for a GPU's

first, second = (torch.nn.Linear(16, 16).to(device) for _ in range(2))


@cgraph.eager_break
def longest(x, lengths):
    """Read a value on the host, as ragged attention does."""
    return x[:, : int(lengths.max().item())].mean(1)


def layer(x, lengths):
    return second(longest(first(x).relu(), lengths))


fast = cgraph.graphed(layer)
with torch.no_grad():
    for most in (3, 3, 5, 2):
        x = torch.randn(4, 8, 16, device=device)
        lengths = torch.tensor([1, most, 1, 1], device=device)
        assert torch.allclose(fast(x, lengths), layer(x, lengths), atol=1e-5)
print(fast.report())
