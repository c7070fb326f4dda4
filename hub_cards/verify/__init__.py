"""Verify a model folder in a process with only the packages of its readers.

Empty on purpose: that process imports the files of this folder without the package. Therefore all of them, except `verify.py`,
which starts the process, import only the standard library and each other; functions import other libraries.
"""
