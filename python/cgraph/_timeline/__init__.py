"""The drawings of a timeline."""
