"""Errors that a user reads as one line: wrong input (exit code 2), or a run that stopped and can be resumed (3)."""

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """The user's input is invalid; the message names the invalid value and the allowed ones."""


class ResumableError(RuntimeError):
    """A run had to stop; the same command resumes it later."""


def unknown_value_error(kind: str, value: object, allowed: Iterable[str]) -> InputError:
    """Return an error that names the unknown value and the allowed ones."""
    return InputError(f"unknown {kind} '{value}'; known: {', '.join(allowed)}")


def suggest_name(name: str, known: Iterable[str]) -> str:
    """Return a hint at the known name that is nearest to a misspelt one, in brackets, or an empty text."""
    close = difflib.get_close_matches(name, sorted(known), 1)
    return f" (did you mean '{close[0]}'?)" if close else ""
