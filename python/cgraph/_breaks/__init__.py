"""Behind ``eager_break`` and ``SegmentedGraph``: segments, and gradients through breaks."""
