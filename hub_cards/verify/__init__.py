"""Verify a model folder in a process with only the packages of its readers.

Empty on purpose: that process imports the files of this folder without the package.
"""
