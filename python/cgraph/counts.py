"""``metrics``: the counts of a process in one dictionary, named as Prometheus names samples.

>>> import torch, cgraph
>>> with cgraph.sim.use():
...     @cgraph.graphed
...     def step(x):
...         return x * 2
...     for _ in range(3):
...         y = step(torch.ones(3))
...     print(cgraph.metrics()['cgraph_replays_total{door="graphed",function="step"}'])
2
"""

from __future__ import annotations

from collections import defaultdict

from cgraph import functions, trees
from cgraph._trees.skips import EAGER

__all__ = ["metrics"]


def metrics() -> dict[str, float]:
    """Count what graphed functions and graph trees have done so far; it waits for nothing.

    A line ``name value`` for each item is the text format that Prometheus reads. All names have the
    labels ``door`` (``"graphed"`` or ``"trees"``) and ``function``; functions of one name are
    counted together. Any thread may call it.

    Returns:
        The counts by name. They grow as long as there is the function; those of trees begin anew
        with ``reset()``.

        - ``cgraph_replays_total``: calls that were a replay.
        - ``cgraph_eager_calls_total``: calls that ran without a graph; for trees with the label
          ``cause``, the code of the reason.
        - ``cgraph_captures_total``: captures whose graph was kept.
        - ``cgraph_recaptures_total``: those of them that took the place of an earlier one.
        - ``cgraph_capture_seconds_total``: of graphed functions.
        - ``cgraph_keys``: keys of graphed functions, with the label ``state``; eager ones with
          ``cause`` as well.
        - ``cgraph_memory_bytes``: of graphed functions and of the trees of each ``device``.
    """
    found = defaultdict[str, float](int)
    for function in functions.report().functions:
        about = {"door": "graphed", "function": function.name}
        for name, count in function.totals.items():
            found[_name(f"{name}_total", about)] += count
        for key in function.keys:
            cause = {"cause": key.code} if key.state == "eager" and key.code else {}
            found[_name("keys", {**about, "state": key.state, **cause})] += 1
        found[_name("memory_bytes", about)] += function.memory_bytes
    report = trees.report()
    for one in report.functions:
        about = {"door": "trees", "function": one.name, "mode": one.mode}
        found[_name("replays_total", about)] += one.replays
        found[_name("captures_total", about)] += one.graphs
        found[_name("recaptures_total", about)] += one.rerecords
        for reason, count in one.eager.items():
            cause = {"cause": EAGER[reason].cause.code}
            found[_name("eager_calls_total", {**about, **cause})] += count
    for tree in report.trees:
        place = {"door": "trees", "device": str(tree.device)}
        found[_name("memory_bytes", place)] += tree.reserved_bytes
    return dict(found)


def _name(name: str, labels: dict[str, str]) -> str:
    """Return the name of a sample with its labels, whose values are escaped."""
    pairs = ",".join(f'{key}="{_escaped(one)}"' for key, one in labels.items())
    return f"cgraph_{name}{{{pairs}}}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
