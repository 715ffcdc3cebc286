"""Calls of fewer rows than a graph has."""
