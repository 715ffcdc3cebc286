"""Captures and their memory on both drivers, as ``cgraph._driver`` requires them."""
