"""Comparison of a server's vectors with those of a model folder."""
