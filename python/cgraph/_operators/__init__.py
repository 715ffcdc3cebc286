"""Operators of torch, observed as they run."""
