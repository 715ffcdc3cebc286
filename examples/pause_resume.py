"""Memory of graphs given to others for a while: a pause, and the same addresses afterwards."""

import os

import torch

import cgraph

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cpu":
    os.environ.setdefault("CGRAPH_DRIVER", "sim")  # CPU tensors stand for a GPU's

model = torch.nn.Linear(512, 512).to(device)
x = torch.randn(64, 512, device=device)
pool, graph = cgraph.MemPool(limit=256 << 20), cgraph.CUDAGraph()
with torch.no_grad(), cgraph.graph(graph, pool=pool):
    y = model(x)
print(graph.memory().name, pool)

pool.pause()
print(pool)  # its bytes are free for others
pool.resume()
graph.replay()
with torch.no_grad():
    assert torch.allclose(y, model(x), atol=1e-4)
cgraph.memory().show()
