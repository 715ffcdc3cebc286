"""Hooks around captures and replays, as a profiler has them, and labels of nodes."""

import os

import torch

import cgraph

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cpu":
    os.environ.setdefault("CGRAPH_DRIVER", "sim")  # CPU tensors stand for a GPU's

seen = []
with (
    cgraph.register_graph_capture_end_hook(lambda graph: seen.append("captured")),
    cgraph.register_graph_replay_end_hook(lambda graph: seen.append("replayed")),
):
    x, graph = torch.ones(4, device=device), cgraph.CUDAGraph(keep_graph=True)
    with cgraph.graph(graph, enable_annotations=True), cgraph.annotate("double"):
        y = x * 2
    graph.replay()
    graph.replay()
assert seen == ["captured", "replayed", "replayed"]
cgraph.picture.save(graph, "graph.svg")
print(seen, graph)
