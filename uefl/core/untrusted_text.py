"""Make text of another machine safe to show: one line, no control codes, no markup, bounded length."""

from __future__ import annotations

MAX_TEXT_LENGTH = 500
_BRACKETS = {"[": "(", "]": ")"}  # rich reads text in square brackets as markup


def escape_text(text: object, max_length: int = MAX_TEXT_LENGTH) -> str:
    """Return text as one printable line: control codes become escapes such as \\x1b, square brackets become round."""
    raw = text if isinstance(text, str) else str(text)
    escaped = "".join(map(_escape_character, raw[: max_length + 1]))
    return escaped if len(escaped) <= max_length else escaped[: max_length - 1] + "…"


def is_plain_text(text: str, max_length: int) -> bool:
    """Return whether a name can be shown as it is."""
    return text == escape_text(text, max_length)


def _escape_character(character: str) -> str:
    if character.isprintable():
        return _BRACKETS.get(character, character)
    return character.encode("unicode_escape").decode("ascii")
