"""A whole step of training in one graph: forward, loss, backward, clipping, optimizer, schedule."""

import os

import torch

import cgraph

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cpu":
    os.environ.setdefault("CGRAPH_DRIVER", "sim")  # CPU tensors stand for a GPU's

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
model = model.to(device)
# A rate in a tensor: a schedule writes it, and one graph reads it.
rate = torch.tensor(0.02, device=device)
optimizer = torch.optim.AdamW(model.parameters(), lr=rate, capturable=True)


@cgraph.graphed
def step(x, target):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), target)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


losses = []
for number in range(60):
    x = torch.randn(64, 16, device=device)
    rate.fill_(0.02 * (1 - number / 60))
    losses.append(step(x, x.sum(1, keepdim=True) * 0.1))
print(f"loss {losses[0].item():.3f} -> {losses[-1].item():.3f}")
assert losses[-1] < losses[0] / 2
print(step.report())
