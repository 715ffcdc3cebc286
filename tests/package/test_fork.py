"""A fork of a process that has used cgraph gets clear errors, never hangs and runs no callback."""

from __future__ import annotations

import subprocess
import sys

import pytest

BEGIN = """if True:
    import gc, os, sys, threading
    import torch, cgraph

    def ended(child):
        # Where nothing uses cgraph the child ends as any program does: with its destructors.
        pid = os.fork()
        if pid == 0:
            try:
                child()
            except SystemExit:
                os._exit(3)
            sys.exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""
USED = """
    simulator = cgraph.sim.use()
    simulator.__enter__()
    x, graph = torch.ones(64), cgraph.CUDAGraph()
    with cgraph.graph(graph):
        y = x * 2
    graph.register_destroy_callback(lambda: print("callback", os.getpid() == parent))
    function, parent = cgraph.graphed(lambda x: x * 2), os.getpid()
    for _ in range(3):
        function(x)

    def uses():
        for use in (
            lambda: function(x),
            graph.replay,
            lambda: cgraph.CUDAGraph().capture_begin(),
            lambda: function.capture(x),
            lambda: cgraph.graphed(lambda x: x + 1)(x),
        ):
            try:
                use()
            except cgraph.errors.StateError as error:
                assert "forked" in str(error) and "spawn" in str(error)
            else:
                raise SystemExit("no error")

    def drops():
        global graph, function
        graph.reset()
        del graph, function
        gc.collect()
"""
THREADS = """
    going = True

    def replays():
        while going:
            function(x)
            graph.replay()

    threads = [threading.Thread(target=replays) for _ in range(3)]
    for thread in threads:
        thread.start()
    codes = [ended(child) for child in (uses, drops, int) for _ in range(2)]
    going = False
    for thread in threads:
        thread.join()
    print(set(codes))
"""


def ran(program: str) -> list[str]:
    run = subprocess.run(
        [sys.executable, "-c", BEGIN + program], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.split("\n")[:-1]


@pytest.mark.parametrize("child", ["uses", "drops", "int"])
def test_a_fork_of_a_process_that_used_cgraph_runs_no_callback(child: str) -> None:
    assert ran(USED + f"    print(ended({child}))") == ["0", "callback True"]


def test_a_fork_does_not_hang_while_other_threads_replay() -> None:
    assert ran(USED + THREADS) == ["{0}", "callback True"]


def test_a_fork_before_the_first_use_is_a_process_of_its_own() -> None:
    child = """
    def child():
        with cgraph.sim.use():
            x, function = torch.ones(4), cgraph.graphed(lambda x: x * 3)
            for _ in range(3):
                assert torch.equal(function(x), x * 3)

    print(ended(child))
    child()
    """
    assert ran(child) == ["0"]
