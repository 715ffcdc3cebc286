"""Cost of `import cgraph` beyond `import torch`, in fresh interpreters, in turns.

python benches/python/import_time.py [--results folder]
"""

from __future__ import annotations

import statistics
import subprocess
import sys

from common import parsed, publish

ROUNDS = 7
TIMED = (
    "import time, torch; start = time.perf_counter(); {statement};"
    " print((time.perf_counter() - start) * 1e3)"
)


def milliseconds(statement: str) -> float:
    """Return the time of a statement after ``import torch``."""
    code = TIMED.format(statement=statement)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    options = parsed(__doc__)
    times = [milliseconds("import cgraph") for _ in range(ROUNDS)]
    row = [f"{statistics.median(times):.1f}", f"{min(times):.1f}", f"{max(times):.1f}"]
    head = ["median ms", "least ms", "most ms"]
    publish("import", "import cgraph, after import torch", head, [row], options.results)


if __name__ == "__main__":
    main()
