"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

SkipBad = Annotated[bool, typer.Option("--skip-bad", help="leave bad images, rows and silos out, and count them")]
Strict = Annotated[bool, typer.Option("--strict", help="refuse what is only odd: copies in train and test, one class")]


def flagged(words: Sequence[str] | None, *, skip_bad: bool, strict: bool) -> list[str]:
    """What the user said, with the flags as the settings they stand for."""
    return [*(words or []), *(["skip_bad=true"] if skip_bad else []), *(["strict=true"] if strict else [])]
