"""What functions read of Python: values, and the places that they are found at."""
