"""The one error a user can cause: the command line prints it as one line and exits with code 2."""

from collections.abc import Iterable


class InputError(ValueError):
    """Something the user gave is wrong; the message names it and what is allowed."""


def unknown(kind: str, value: object, allowed: Iterable[str]) -> InputError:
    """Name the value that is not known and the ones that are."""
    return InputError(f"unknown {kind} '{value}'; known: {', '.join(allowed)}")
