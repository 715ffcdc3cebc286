"""Streams of other libraries: cuda.core, CuPy and Numba make them, cgraph replays on them.

Needs a GPU and one of ``pip install cuda-core``, ``cupy-cuda13x``, ``numba-cuda``. All have the
protocol ``__cuda_stream__``, which gives the address that ``torch.cuda.ExternalStream`` takes.
"""

import torch

import cgraph


def stream_of_core():
    """Return a stream of cuda.core's."""
    from cuda.core import Device

    device = Device()
    device.set_current()
    return device.create_stream()


def stream_of_cupy():
    """Return a stream of CuPy's."""
    import cupy

    return cupy.cuda.Stream(non_blocking=True)


def stream_of_numba():
    """Return a stream of Numba's."""
    from numba import cuda

    return cuda.stream()


def replay_on(theirs):
    """Capture and replay on a stream that another library owns, and wait for it there."""
    _, address = theirs.__cuda_stream__()
    stream = torch.cuda.ExternalStream(address)
    x = torch.zeros(1024, device="cuda")
    graph = cgraph.CUDAGraph()
    torch.cuda.synchronize()
    with cgraph.graph(graph, stream=stream):
        x += 1
    with torch.cuda.stream(stream):
        for _ in range(3):
            graph.replay()
    stream.synchronize()
    assert x.eq(3).all()


if not torch.cuda.is_available():
    raise SystemExit("this example needs a GPU: the simulator has no streams of other libraries")
torch.cuda.init()
for make in (stream_of_core, stream_of_cupy, stream_of_numba):
    try:
        theirs = make()
    except ImportError as error:
        print(f"{make.__name__}: left out, {error}")
        continue
    replay_on(theirs)
    print(f"{make.__name__}: three replays on {theirs}")
