"""CUDA libraries that a thread has not used before its first capture."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

HEAD = """
import threading
import torch
import cgraph

x = torch.rand(64, 64, device="cuda") + torch.eye(64, device="cuda") * 64
of = {
    "matrix product": lambda x: x @ x,
    "solver": lambda x: torch.linalg.solve_ex(x, x)[0] + torch.linalg.cholesky_ex(x)[0],
    "transform": lambda x: torch.fft.fft(x).real,
    "convolution": torch.nn.Conv2d(1, 4, 3).cuda(),
    "recurrence": torch.nn.LSTM(64, 8).cuda(),
}
function, x = of[KIND], x[None, None] if KIND == "convolution" else x
first = lambda result: result[0] if isinstance(result, tuple) else result
"""

# cuDNN has memory of its own from its first use in the process, and a handle for each thread.
CALLS = """
def work():
    with torch.no_grad():
        graphed = cgraph.graphed(function)
        for _ in range(3):
            x.mul_(1.25)
            torch.testing.assert_close(first(graphed(x)), first(function(x)))
        print(graphed.report().keys[0].state, graphed.report().keys[0].eager_calls)

if WHERE == "thread":
    first(function(x))
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
else:
    work()
"""

PLAIN = """
graph = cgraph.CUDAGraph()
with torch.no_grad(), cgraph.graph(graph):
    function(x)
"""


# Libraries whose first use in a process no capture allows.
REFUSED = ["solver", "transform"]


def run(kind: str, where: str, text: str) -> subprocess.CompletedProcess[str]:
    """Run a program in its own process: libraries stay ready in one that has used them."""
    whole = f"KIND, WHERE = {kind!r}, {where!r}\n{HEAD}{text}"
    environment = {**os.environ, "CGRAPH_DRIVER": "cuda"}
    command = [sys.executable, "-c", whole]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("where", ["process", "thread"])
@pytest.mark.parametrize(
    "kind", ["matrix product", "solver", "transform", "convolution", "recurrence"]
)
def test_a_function_is_captured_although_a_library_is_new_to_the_thread(
    kind: str, where: str
) -> None:
    done = run(kind, where, CALLS)
    assert done.returncode == 0, done.stderr
    state, eager_calls = done.stdout.split()
    assert (state, eager_calls) == ("captured", "1")


@pytest.mark.parametrize("kind", REFUSED)
def test_the_error_of_a_plain_capture_says_that_a_library_is_new(kind: str) -> None:
    done = run(kind, "process", PLAIN)
    assert done.returncode == 1
    assert "call the function once before the capture, in the same thread" in done.stderr


FORK = """
import os, sys
import torch, cgraph

x, graph = torch.rand(64, device="cuda"), cgraph.CUDAGraph()
function = cgraph.graphed(lambda x: x * 2)
for _ in range(3):
    function(x)
with cgraph.graph(graph):
    y = x + 1
graph.register_destroy_callback(lambda: print("callback", os.getpid() == parent, flush=True))
parent = os.getpid()
pid = os.fork()
if pid == 0:
    for use in (graph.replay, lambda: function(x), lambda: cgraph.CUDAGraph().capture_begin()):
        try:
            use()
        except cgraph.errors.StateError as error:
            assert "forked" in str(error)
        else:
            os._exit(3)
    del graph, function
    sys.exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
graph.replay()
assert torch.equal(y, x + 1)
"""


def test_a_fork_of_a_process_with_cuda_graphs_gets_errors_and_ends() -> None:
    ran = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split("\n")[:-1] == ["0", "callback True"], ran.stderr
