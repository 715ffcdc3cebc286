"""Models in pieces: their split, compilation, captures by size, and dispatch."""
