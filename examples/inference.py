"""Inference: a module whose calls are replays, for whatever shapes come."""

import os

import torch

import cgraph

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cpu":
    os.environ.setdefault("CGRAPH_DRIVER", "sim")  # CPU tensors stand for a GPU's

model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 10))
model = model.to(device).eval()
fast = cgraph.graphed(model)

with torch.no_grad():
    for rows in (32, 32, 32, 8, 8, 8):
        x = torch.randn(rows, 64, device=device)
        assert torch.allclose(fast(x), model(x), atol=1e-5)
print(fast.report())
