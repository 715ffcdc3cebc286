"""The demo as a program: ``python -m examples.demo --help``."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

import cgraph
from examples import demo

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> None:
    """Train a small transformer in one graph, check each step against eager, and write text."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=main.__doc__)
    parser.add_argument("--steps", type=int, help="training steps, at least 40")
    parser.add_argument("--seed", type=int, default=0, help="of all that is random")
    parser.add_argument("--out", type=Path, default=Path("cgraph-demo"), help="a folder for files")
    parser.add_argument("--quick", action="store_true", help="just enough steps to learn")
    given = parser.parse_args(arguments)
    if given.steps is not None and given.steps < 40:
        parser.error(f"--steps is {given.steps}, expected at least 40")
    on_gpu = os.environ.get("CGRAPH_DRIVER", "cuda") == "cuda" and torch.cuda.is_available()
    plan = demo.ON_GPU if on_gpu else demo.ON_SIMULATOR
    if given.quick:
        plan = replace(plan, steps=plan.quick_steps, characters=plan.characters // 2)
    plan = replace(plan, steps=given.steps or plan.steps, seed=given.seed)
    try:
        if on_gpu:
            demo.run(plan, torch.device("cuda"), given.out)
            return
        print("This runs on cgraph's simulator (no speed is claimed).", file=sys.stderr)
        # The operators are so small that a second thread mostly waits, and for long when busy.
        torch.set_num_threads(1)
        with cgraph.sim.use():
            demo.run(plan, torch.device("cpu"), given.out)
    except demo.CheckError as error:
        sys.exit(f"check failed: {error}")


if __name__ == "__main__":
    main()
