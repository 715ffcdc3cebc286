"""How a call of a graphed function is to be captured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cgraph import _driver
from cgraph._graphed.call import Call
from cgraph._graphed.observation import Observation
from cgraph._graphed.options import Options

__all__ = ["CapturePlan"]


@dataclass(frozen=True)
class CapturePlan:
    """How a call is to be captured.

    Attributes:
        function: What is captured.
        name: What errors call it.
        options: The function's options.
        driver: The driver in force.
        pool: The pool of the capture.
        stream: The stream that it is made on.
        call: The call.
        before: What the call before has shown.
        lines: Whether the lines of operators are noted.
    """

    function: Callable[..., Any]
    name: str
    options: Options
    driver: _driver.Driver
    pool: Any
    stream: Any
    call: Call
    before: Observation
    lines: bool
