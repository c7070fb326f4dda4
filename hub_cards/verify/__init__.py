"""Verification of a model folder in a process that has only what its readers have.

Empty on purpose: that process imports this folder's files without the package.
"""
