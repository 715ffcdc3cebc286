"""Autograd's records, and the effects of forward and backward graphs on each other."""
