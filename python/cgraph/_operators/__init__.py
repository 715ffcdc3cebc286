"""What operators of torch do, seen as they run."""
