"""``explain``: operations that a capture of a function would refuse or silently freeze.

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

import inspect
import types
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TextIO

from cgraph import _core, _driver
from cgraph._captures.busy import busy
from cgraph._explanation.findings import Finding, Log
from cgraph._python.assignments import Assignments
from cgraph._python.changing_lines import line_that_changes
from cgraph._python.guards import Guards
from cgraph._python.libraries import is_library_module
from cgraph._python.named_objects import named_by
from cgraph._text import print_fitted, table
from cgraph.breaks import breakable
from cgraph.causes import Cause
from cgraph.errors import ArgumentError, CaptureError, add_note

__all__ = ["Explanation", "Finding", "explain"]


@dataclass(frozen=True)
class Explanation:
    """The findings of :func:`explain`.

    Attributes:
        findings: Each finding once for each line, in the order of its first occurrence.
        result: The function's result.
    """

    findings: tuple[Finding, ...]
    result: Any = field(repr=False, default=None)

    @property
    def ok(self) -> bool:
        """True if a capture refuses nothing that was found."""
        return not any(finding.severity == "refused" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return ``ok`` and the findings as plain values, without the result."""
        return {"ok": self.ok, "findings": [finding.to_dict() for finding in self.findings]}

    def __str__(self) -> str:
        """Return the findings as a table, with a fix for each kind below."""
        if not self.findings:
            return "nothing that a capture refuses or freezes"
        head = ("", "what", "where", "operator", "times", "line")
        rows = [
            (one.severity, one.kind, one.place, one.operator, str(one.count), _short(one.source))
            for one in self.findings
        ]
        causes = dict.fromkeys(finding.cause for finding in self.findings)
        fixes = [
            f"{one.kind}: {one.what}. Fix: {one.fix} (cgraph why {one.code})." for one in causes
        ]
        return "\n".join([table(head, rows), "", *fixes])

    def show(self, file: TextIO | None = None) -> None:
        """Print the table, to standard output unless a file is given."""
        print_fitted(self, file)


def explain(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """Call a function once, without a capture, and list the operations that a capture cannot do.

    The findings are reads of values on the host (``item()``, ``cpu()``, ``print(x)``, ``if x:``),
    waits for the device, shapes that depend on values, copies between the device and host memory
    that is not pinned, tensors on the host in work of the device, numbers read from such tensors,
    random numbers of Python and NumPy (of generators that existed before), changes of values of
    Python that the code names, printing, generators and optimizers that a capture does not accept,
    and streams that are not forked or not joined; on
    CUDA also every other operator that torch knows to wait for the device. The work of a
    :func:`cgraph.eager_break` is left out: it stays eager.

    The run is real and leaves its effects in tensors, gradients, random state and Python objects.
    :func:`cgraph.dry_run` leaves none. It uses a stream of its own, as a capture does; afterwards
    the device has finished. Operations that only a first call does, such as loading a library, are
    found too: call the function once before. Functions that ``torch.compile`` would compile run as
    written.

    On the simulator the CPU's tensors stand for a GPU's. Operations that a GPU refuses are found
    there as well, even where the simulator's captures accept them: ``cpu()``, ``tolist()``,
    printing, and writes of a tensor through a mask. No tensor is on the host then, and
    ``to("cpu")`` names the device.

    Args:
        function: The function to check.
        *args: Its arguments.
        **kwargs: Its keyword arguments.

    Returns:
        The findings and the function's result.

    Raises:
        ArgumentError: ``function`` cannot be called.
        CaptureError: A capture is open.

    An exception of the function comes out unchanged, with the findings so far as a note.
    """
    if not callable(function):
        raise ArgumentError(f"function is {function!r}, expected something that can be called")
    if isinstance(function, _core.Dispatcher):
        # A graphed function's own handling of a call does not concern the user.
        function = function.__wrapped__  # type: ignore[attr-defined]
    driver = _driver.current()
    if driver.is_capturing():
        raise CaptureError("explain() inside a capture: end the capture first")
    from cgraph._explanation.inspector import inspected

    log = Log()
    named = named_by(function, [("args", args), ("kwargs", kwargs)], callees=True)
    state = Assignments(Guards(named, compares=False), named.names)
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
    for change in state.changed():
        # Libraries load parts of themselves.
        is_module = isinstance(change.target.holder, types.ModuleType)
        if not (is_module and is_library_module(change.target.holder)):
            log.add(Cause.PYTHON_STATE, change.target.name, _line_of(change.target.name, function))
    return Explanation(log.findings(), result)


def _line_of(name: str, function: Callable[..., Any]) -> tuple[str, int]:
    """Return the line of a function that changes a place, or its first; nothing without code."""
    inner = getattr(function, "forward", function)
    code = getattr(inspect.unwrap(getattr(inner, "__func__", inner)), "__code__", None)
    if code is None:
        return "", 0
    file, _, line = (line_that_changes(name, [code]) or "").rpartition(":")
    return (file, int(line)) if line else (code.co_filename, code.co_firstlineno)


def _short(source: str) -> str:
    return source if len(source) <= 48 else f"{source[:47]}…"
