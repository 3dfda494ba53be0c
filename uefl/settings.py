"""Change fields of a frozen dataclass by `field=value`, typed by the dataclass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from uefl.errors import InputError, unknown

T = TypeVar("T")


def override(value: T, assignments: Sequence[str]) -> T:
    """A copy with these fields changed."""
    found: dict[str, Any] = {f.name: getattr(value, f.name) for f in fields(value)}  # type: ignore[arg-type]
    changes: dict[str, Any] = {}
    for text in assignments:
        name, equals, new = text.partition("=")
        if not equals or name not in found:
            raise unknown("field", text, found)
        changes[name] = _typed(text, new, found[name])
    return replace(value, **changes)  # type: ignore[type-var]


def _typed(text: str, new: str, old: Any) -> Any:
    try:
        if isinstance(old, bool):
            return {"true": True, "false": False}[new.lower()]
        if isinstance(old, tuple):
            return tuple(_number(v) for v in new.split(",") if v)
        return type(old)(new)
    except (ValueError, KeyError) as error:
        raise InputError(f"{text}: not a {type(old).__name__}") from error


def _number(text: str) -> int | str:
    return int(text) if text.isdigit() else text
