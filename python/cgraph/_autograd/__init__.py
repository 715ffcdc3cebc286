"""What autograd has noted, and what graphs of forward and backward passes leave each other."""
