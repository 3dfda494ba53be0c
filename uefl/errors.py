"""The errors a user sees as one line: what was given is wrong (exit code 2), or the run cannot go on now (3)."""

from collections.abc import Iterable


class InputError(ValueError):
    """Something the user gave is wrong; the message names it and what is allowed."""


class Stopped(RuntimeError):
    """A run cannot go on now, and can be resumed: the command line prints one line and exits with code 3."""


def unknown(kind: str, value: object, allowed: Iterable[str]) -> InputError:
    """Name the value that is not known and the ones that are."""
    return InputError(f"unknown {kind} '{value}'; known: {', '.join(allowed)}")
