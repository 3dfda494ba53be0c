"""The command line: one file per command, each with a function `register(app)` that `main` calls.

A command imports torch and other heavy modules inside its function, so that `uefl --help` answers at once.
"""
