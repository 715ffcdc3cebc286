"""The parts of ``graphed``: keys, guards, captures and replays of one function."""
