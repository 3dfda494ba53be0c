"""Deliberate breakages of the package, each with the tests that must notice it. Run `python -m mutants`."""
