"""One key of a graphed function: what its calls have in common, its capture and what that made."""
