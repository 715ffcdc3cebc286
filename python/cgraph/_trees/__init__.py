"""Graph trees: see :mod:`cgraph.trees`."""
