"""``python -m cgraph``: the demo, and what cgraph finds on this machine."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

import cgraph
from cgraph import _core, _torch
from cgraph.errors import CgraphError, TorchError

__all__ = ["main"]

_DESCRIPTION = """\
CUDA graphs for PyTorch, from one Rust core: the names of torch.cuda (CUDAGraph, graph, …), faster
replays, errors that say what went wrong, and a simulator that captures and replays without a GPU.
"""
_EPILOG = """\
examples:
  python -m cgraph info                  what was found here, and what is missing
  python -m cgraph demo                  train, write, compare; on the simulator if there is no GPU
  python -m cgraph demo --quick          the same in half the time
  python -m cgraph demo --driver sim     on the simulator, GPU or not

environment:
  CGRAPH_DRIVER    cuda (default) or sim; only the demo takes the simulator unasked, and says so

exit status: 0 all is well, 1 a check failed or there is no driver, 2 wrong usage
"""
_DEMO = """\
Trains a small transformer on Alice's Adventures in Wonderland with the whole training step
(forward, loss, backward, Adam, dropout) in one graph, then writes text with a captured decode step
over a static cache. Each captured step is compared with the same step done eagerly, and the loss
must fall. Prints the text and a table, and draws the decode graph.
"""
# The means of the loss at the two ends must not overlap.
_FEWEST_STEPS = 40


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: The arguments; by default those of the command line.

    Returns:
        The exit status: 0, or 1 for a failed check or a missing driver. Wrong usage exits with 2.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command == "info":
        return _info()
    if options.command == "demo":
        return _demo(options, parser)
    parser.print_help()
    return 2


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m cgraph", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=raw
    )
    parser.add_argument("--version", action="version", version=f"cgraph {cgraph.__version__}")
    commands = parser.add_subparsers(dest="command", title="commands", metavar="command")
    demo = commands.add_parser(
        "demo",
        help="train and write with captured graphs, and check each step",
        description=_DEMO,
        formatter_class=raw,
    )
    demo.add_argument("--steps", type=_steps, metavar="N", help="training steps, at least 40")
    demo.add_argument("--seed", type=int, default=0, metavar="N", help="of all that is random (0)")
    demo.add_argument(
        "--out",
        type=Path,
        default=Path("cgraph-demo"),
        metavar="DIR",
        help="folder for decode.svg, decode.dot and text.txt (./cgraph-demo)",
    )
    demo.add_argument(
        "--driver",
        choices=("auto", "cuda", "sim"),
        default="auto",
        help="auto: CGRAPH_DRIVER, else a GPU, else the simulator",
    )
    demo.add_argument("--quick", action="store_true", help="fewer steps, just enough to learn")
    commands.add_parser("info", help="versions, driver and devices found here, and what is needed")
    return parser


def _steps(text: str) -> int:
    steps = int(text)
    if steps < _FEWEST_STEPS:
        raise argparse.ArgumentTypeError(f"{steps}, expected at least {_FEWEST_STEPS}")
    return steps


def _demo(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from cgraph import demo

    name = options.driver
    if name == "auto":
        name = os.environ.get("CGRAPH_DRIVER", "auto")
    if name not in ("auto", "cuda", "sim"):
        parser.error(f'CGRAPH_DRIVER is "{name}", expected "cuda" or "sim"')
    if name == "auto" and not torch.cuda.is_available():
        print(
            "No CUDA GPU here: running a smaller size on cgraph's simulator (no speed is claimed).",
            flush=True,
        )
        name = "sim"
    plan = demo.ON_SIMULATOR if name == "sim" else demo.ON_GPU
    if options.quick:
        plan = replace(plan, steps=plan.quick_steps, characters=plan.characters // 2)
    if options.steps is not None:
        plan = replace(plan, steps=options.steps)
    plan = replace(plan, seed=options.seed)
    try:
        with _simulator() if name == "sim" else _gpu() as device:
            demo.run(plan, device, options.out)
    except demo.CheckError as error:
        print(f"check failed: {error}", file=sys.stderr)
        return 1
    except CgraphError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


@contextmanager
def _simulator() -> Iterator[torch.device]:
    """Yield the device of tensors, with a new simulator in force."""
    threads = torch.get_num_threads()
    # The operators are so small that a second thread mostly waits, and for long on a busy machine.
    torch.set_num_threads(1)
    try:
        with cgraph.sim.use():
            yield torch.device("cpu")
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _gpu() -> Iterator[torch.device]:
    """Yield the current GPU, with CUDA as the driver in force."""
    os.environ["CGRAPH_DRIVER"] = "cuda"
    _torch.require_cuda()
    _core.Device.cuda(0)
    yield torch.device("cuda", torch.cuda.current_device())


def _info() -> int:
    rows = [
        ("cgraph", f"{cgraph.__version__}, {Path(cgraph.__file__).parent}"),
        ("python", f"{platform.python_version()} (needed: 3.10 or newer)"),
        ("torch", f"{torch.__version__} (needed: 2.8 or newer, built for CUDA)"),
        ("torch's names", _torch_names()),
        ("CUDA driver", _cuda_driver()),
        *((f"cuda:{ordinal}", _gpu_name(ordinal)) for ordinal in range(torch.cuda.device_count())),
        ("driver chosen", _chosen()),
        ("simulator", "always there: CGRAPH_DRIVER=sim, or `with cgraph.sim.use():`"),
    ]
    for name, value in rows:
        print(textwrap.fill(value, 100, initial_indent=f"{name:<15}", subsequent_indent=" " * 15))
    return 0


def _torch_names() -> str:
    """Return whether torch has every name that cgraph uses, as text."""
    try:
        _torch.require_cuda()
    except TorchError as error:
        return f"missing: {error}"
    return "all there that cgraph uses"


def _cuda_driver() -> str:
    """Return the version of CUDA's driver, or why there is none."""
    needed = "needed: 12.4 or newer"
    try:
        version = _core.Device.cuda(0).driver_version
    except CgraphError as error:
        return f"none ({needed}): {error}"
    return f"{version // 1000}.{version % 1000 // 10} ({needed})"


def _gpu_name(ordinal: int) -> str:
    """Return a GPU's name, memory and compute capability."""
    found = torch.cuda.get_device_properties(ordinal)
    return f"{found.name}, {found.total_memory / 2**30:.0f} GiB, sm_{found.major}{found.minor}"


def _chosen() -> str:
    """Return the name of the driver that captures will use, and why."""
    name = os.environ.get("CGRAPH_DRIVER")
    return "cuda (CGRAPH_DRIVER is not set)" if name is None else f"{name} (CGRAPH_DRIVER)"


if __name__ == "__main__":
    sys.exit(main())
