"""Calls of fewer rows than their graph has."""
