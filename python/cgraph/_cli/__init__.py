"""The command ``cgraph``, also as ``python -m cgraph``."""
