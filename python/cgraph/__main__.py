"""``python -m cgraph``: the command ``cgraph``."""

from __future__ import annotations

from cgraph._cli.app import app

__all__ = ["main"]


def main() -> None:
    """Run the command line; it ends the process."""
    app(prog_name="cgraph")


if __name__ == "__main__":
    main()
