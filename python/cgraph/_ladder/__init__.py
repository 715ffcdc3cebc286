"""``GraphLadder`` behind its face: the graph of a key, and the file that keeps graphs."""
