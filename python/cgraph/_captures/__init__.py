"""Captures and their memory on both drivers, as ``cgraph._driver`` asks for them."""
