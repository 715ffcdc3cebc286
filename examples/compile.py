"""torch.compile with graphs behind it: Inductor's code, captured in trees; outputs last."""

import os

import torch

import cgraph

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cpu":
    os.environ.setdefault("CGRAPH_DRIVER", "sim")  # CPU tensors stand for a GPU's

model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
model = model.to(device)
fast = torch.compile(model, backend="cgraph")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept = []
for _ in range(6):
    loss = fast(torch.randn(8, 16, device=device)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    kept.append(loss.detach())
print("losses", [round(one.item(), 3) for one in kept])
print(cgraph.trees.report())
