"""Batches of any size on a few graphs: a call is padded to the next size, its results are cut."""

import os

import torch

import cgraph

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cpu":
    os.environ.setdefault("CGRAPH_DRIVER", "sim")  # CPU tensors stand for a GPU's

model = torch.nn.Linear(32, 32).to(device)


@cgraph.graphed(sizes=[4, 8, 16])
def score(x):
    return model(x).softmax(-1)


with torch.no_grad():
    score.capture(torch.randn(16, 32, device=device), progress=False).freeze()
    for rows in (16, 3, 7, 1, 12):
        x = torch.randn(rows, 32, device=device)
        got = score(x)
        assert got.shape == (rows, 32)
        assert torch.allclose(got, model(x).softmax(-1), atol=1e-5)
print(score.report())
