"""Python's values that functions read, and the places where they are found."""
