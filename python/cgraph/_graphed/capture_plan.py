"""The plan for capturing a call of a graphed function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cgraph import _driver
from cgraph._graphed.call import Call
from cgraph._graphed.observation import Observation, Reads
from cgraph._graphed.options import Options
from cgraph._graphed.static_memory import PoolUse

__all__ = ["CapturePlan"]


@dataclass(frozen=True)
class CapturePlan:
    """The plan for one capture.

    Attributes:
        function: The function to capture.
        name: Its name in errors.
        reads: What it reads of Python.
        options: Its options.
        driver: The driver in force.
        pool: The pool of the capture.
        use: The use of the pool of captures without gradients.
        stream: The stream of the capture: captures on one stream of a pool share memory.
        call: The call.
        before: The observation of the previous call.
        lines: True if the lines of operators are noted.
    """

    function: Callable[..., Any]
    name: str
    reads: Reads
    options: Options
    driver: _driver.Driver
    pool: Any
    use: PoolUse
    stream: Any
    call: Call
    before: Observation
    lines: bool
