"""Graphs in a file: what Python keeps beside the graphs, and memory by its name."""
