"""Guards in Pythons with and without watchers of dictionaries, none of which needs torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cgraph import _core

SCRIPT = Path(__file__).parents[2] / "support" / "watched.py"
PYENV = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
TELL = "import sys; print(*sys.version_info[:3], sys.implementation.name)"


def interpreters(version: str) -> list[str]:
    """Return the installed interpreters of a version such as ``3.12``."""
    named = shutil.which(f"python{version}")
    built = sorted(PYENV.glob(f"{version}.*/bin/python3"))
    found = [sys.executable] if version == "{}.{}".format(*sys.version_info) else []
    return [*found, *([named] if named else []), *map(str, built)]


def wanted(major: int, minor: int, micro: int) -> str:
    """Return the required mode: Python 3.13.0 reports hardly any changes of attributes."""
    if minor < 12 or (minor, micro) == (13, 0):
        return "compares"
    return "watches" if minor == 12 else "either"


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13", "3.14"])
def test_changes_are_seen_in_each_python(version: str) -> None:
    tried = []
    for python in interpreters(version):
        told = subprocess.run([python, "-c", TELL], capture_output=True, text=True)
        if told.returncode:
            continue  # One of pyenv's names for versions that are not chosen.
        *numbers, implementation = told.stdout.split()
        release = tuple(map(int, numbers))
        if implementation != "cpython" or release in tried:
            continue
        tried.append(release)
        command = [python, str(SCRIPT), str(_core.__file__), wanted(*release)]
        seen = subprocess.run(command, capture_output=True, text=True)
        assert seen.stdout == "seen\n", seen.stderr
    if not tried:
        pytest.skip(f"there is no Python {version} here")
