"""``explain``: what a capture of a function would refuse, or silently freeze, and where.

>>> import torch, cgraph
>>> def step(x):
...     return x[x > 0].sum()
>>> with cgraph.sim.use():
...     explanation = cgraph.explain(step, torch.ones(3))
>>> explanation.ok, explanation.result
(False, tensor(3.))
>>> [(finding.kind, finding.operator) for finding in explanation.findings]
[('shape', 'aten.index')]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, TextIO

from cgraph import _core, _driver
from cgraph._captures.busy import busy
from cgraph._explanation.findings import KINDS, Finding, Log
from cgraph._text import table
from cgraph.breaks import breakable
from cgraph.errors import ArgumentError, CaptureError, add_note

__all__ = ["Explanation", "Finding", "explain"]


@dataclass(frozen=True)
class Explanation:
    """What :func:`explain` has found.

    Attributes:
        findings: Each thing once for each line, in the order in which it first happened.
        result: What the function has returned.
    """

    findings: tuple[Finding, ...]
    result: Any = field(repr=False, default=None)

    @property
    def ok(self) -> bool:
        """Whether nothing was found that a capture refuses."""
        return not any(finding.severity == "refused" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """``ok`` and the findings as plain values, without the result."""
        return {"ok": self.ok, "findings": [asdict(finding) for finding in self.findings]}

    def __str__(self) -> str:
        """Say it as a table, with a fix for each kind below."""
        if not self.findings:
            return "nothing that a capture refuses or freezes"
        head = ("", "what", "where", "operator", "times", "line")
        rows = [
            (one.severity, one.kind, one.place, one.operator, str(one.count), _short(one.source))
            for one in self.findings
        ]
        kinds = dict.fromkeys(finding.kind for finding in self.findings)
        fixes = [f"{kind}: {KINDS[kind].what}. Fix: {KINDS[kind].fix}." for kind in kinds]
        return "\n".join([table(head, rows), "", *fixes])

    def show(self, file: TextIO | None = None) -> None:
        """Print it, to standard output unless a file is given."""
        print(self, file=file or sys.stdout)


def explain(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """Call a function once, without a capture, and list what a capture of it would not do.

    Found are reads of values on the host (``item()``, ``cpu()``, ``print(x)``, ``if x:``), waits
    for the device, shapes that depend on values, copies between the device and host memory that is
    not pinned, tensors on the host in work of the device, numbers read from such tensors, random
    numbers of Python and NumPy (of generators that were there before), generators and optimizers
    that a capture does not take, and streams that are not forked or not joined. On CUDA also every
    other operator that torch knows to wait for the device. What a :func:`cgraph.eager_break` does
    is left out: it stays eager.

    The run is real and leaves its traces: in tensors, gradients, random state and objects of
    Python's. :func:`cgraph.dry_run` leaves none. It is on a stream of its own, as that of a capture
    is; afterwards the device has finished. What only a first call does, as loading a library, is
    found too: call the function once before. What ``torch.compile`` is to compile runs as it was
    written.

    On the simulator the CPU's tensors stand for a GPU's. What a GPU refuses is found there as well
    where the simulator's captures accept it: ``cpu()``, ``tolist()``, printing, and writes of a
    tensor through a mask. No tensor is on the host then, and ``to("cpu")`` names the device.

    Args:
        function: What is to be captured.
        *args: Its arguments.
        **kwargs: Its keyword arguments.

    Returns:
        The findings, and what the function has returned.

    Raises:
        ArgumentError: ``function`` cannot be called.
        CaptureError: A capture is open.

    An exception of the function's comes out as it is, with the findings so far as a note.
    """
    if not callable(function):
        raise ArgumentError(f"function is {function!r}, expected something that can be called")
    if isinstance(function, _core.Dispatcher):
        # What a call of it would do for its own sake is no concern of the user's.
        function = function.__wrapped__  # type: ignore[attr-defined]
    driver = _driver.current()
    if driver.is_capturing():
        raise CaptureError("explain() inside a capture: end the capture before")
    from cgraph._explanation.inspector import inspected

    log = Log()
    stream = driver.new_stream()
    driver.synchronize()  # the arguments come from other streams
    with driver.stream(stream):
        try:
            # Graphed functions are part of the capture, as they would be.
            with inspected(driver, log), breakable(log), busy():
                result = function(*args, **kwargs)
        except BaseException as error:
            if found := log.findings():
                add_note(error, f"cgraph.explain has found so far:\n{Explanation(found)}")
            with suppress(Exception):  # the function's own exception is the one to come out
                driver.synchronize()
            raise
    driver.synchronize()
    return Explanation(log.findings(), result)


def _short(source: str) -> str:
    return source if len(source) <= 48 else f"{source[:47]}…"
