"""The page behind ``cgraph.view``: what is drawn, how it is laid out, and the files of others."""
