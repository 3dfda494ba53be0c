"""Declare a setting where it is defined: its default, its help text and the values it accepts."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import MISSING, field, fields
from typing import Any, Literal, NamedTuple

from uefl.core.errors import InputError


class RangeRule(NamedTuple):
    """One kind of bound: its test, its phrase in an error message, its symbol in a table."""

    accepts: Callable[[Any, Any], bool]
    phrase: str
    symbol: str


RANGE_RULES = {
    "at_least": RangeRule(operator.ge, "at least", "≥"),
    "above": RangeRule(operator.gt, "greater than", ">"),
    "at_most": RangeRule(operator.le, "at most", "≤"),
    "below": RangeRule(operator.lt, "less than", "<"),
}


def setting(
    default: Any = MISSING,
    help_text: str = "",
    *,
    default_factory: Any = MISSING,
    in_run_id: bool | Literal["when changed"] = True,
    finite: bool = True,
    per_column: bool = False,
    zero: str = "",
    **bounds: float,
) -> Any:
    """Return a dataclass field with a help text and bounds: `at_least`, `above`, `at_most`, `below`.

    Bounds apply to a number, or to every entry of a tuple. Numbers with a bound must be finite, unless `finite=False`.
    `zero` is what 0 means, for error messages. A field with `in_run_id=False` does not change results and is not part
    of the run id; with "when changed", its default is not part of it, so that earlier runs keep their id. A field with
    `per_column=True` is a tuple of entries `column=value`, which are set as `field.column=value`.
    """
    if wrong := bounds.keys() - RANGE_RULES.keys():
        raise TypeError(f"unknown bounds: {', '.join(sorted(wrong))}")
    metadata = {
        "help": help_text,
        "in_run_id": in_run_id,
        "finite": finite,
        "per_column": per_column,
        "zero": zero,
        "bounds": bounds,
    }
    if default_factory is not MISSING:
        return field(default_factory=default_factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def check_ranges(settings: Any) -> None:
    """Raise an `InputError` for the first field of a dataclass whose value is outside its declared bounds."""
    for declared in fields(settings):
        bounds = declared.metadata.get("bounds", {})
        value = getattr(settings, declared.name)
        for number in value if isinstance(value, tuple) else (value,):
            if bounds and not all(RANGE_RULES[rule].accepts(number, bound) for rule, bound in bounds.items()):
                zero = f"; 0 means {text}" if (text := declared.metadata["zero"]) else ""
                raise InputError(f"{declared.name}={value} must be {describe_bounds(bounds)}{zero}")
            if bounds and declared.metadata["finite"] and isinstance(number, float) and not math.isfinite(number):
                raise InputError(f"{declared.name}={value} must be {describe_bounds(bounds)} and finite")


def describe_bounds(bounds: Mapping[str, float]) -> str:
    """Return bounds in words: `at least 0 and less than 1`."""
    return " and ".join(f"{RANGE_RULES[rule].phrase} {bound:g}" for rule, bound in bounds.items())


def abbreviate_bounds(bounds: Mapping[str, float]) -> str:
    """Return bounds in symbols: `≥ 0, < 1`."""
    return ", ".join(f"{RANGE_RULES[rule].symbol} {bound:g}" for rule, bound in bounds.items())
