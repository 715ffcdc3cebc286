"""Loops of a step: what is published, the capture, and a run as the host sees it."""
