"""Findings for ``explain`` and the errors of captures: lines that a capture refuses or freezes."""
