"""Read and change settings, which are frozen dataclasses, by `field=value` with type and range checks."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, fields, is_dataclass, replace
from functools import reduce
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from uefl.core.errors import InputError, suggest_name, unknown_value_error
from uefl.core.field_rules import abbreviate_bounds

T = TypeVar("T")
FieldPath = tuple[str, ...]  # names from the outermost dataclass to a field, as in ("method", "local", "lr")


def override_settings(settings: T, assignments: Sequence[str]) -> T:
    """Change nested fields, as in `gamma=0.2`, or `local.lr=0.1` where the last name alone is ambiguous.

    A field per column takes the column as a further name, as in `missing.chol=0`.
    """
    changed: T = _apply_changes(settings, find_assigned_paths(settings, assignments))
    return changed


def find_assigned_paths(settings: Any, assignments: Sequence[str]) -> dict[FieldPath, str]:
    """Return the text that `field=value` assigns to each field; a field is set once."""
    changes: dict[FieldPath, str] = {}
    for assignment in assignments:
        name, sign, text = assignment.partition("=")
        if not sign or not name:
            raise InputError(f"'{assignment}' is not of the form field=value")
        path = _find_path(settings, name)
        if path in changes:
            raise InputError(f"field '{path[-1]}' is set twice, to {changes[path]} and to {text}")
        changes[path] = text
    return changes


def has_setting(settings: Any, name: str) -> bool:
    """Return whether a nested field has this name."""
    return any(_matches_path(path, name) for path, _ in iterate_settings(settings)) or bool(
        _find_column_path(settings, name)
    )


def iterate_settings(settings: Any, prefix: FieldPath = ()) -> Iterator[tuple[FieldPath, Any]]:
    """Yield the path and value of every nested field."""
    for f in fields(settings):
        value = getattr(settings, f.name)
        if is_dataclass(value):
            yield from iterate_settings(value, (*prefix, f.name))
        else:
            yield (*prefix, f.name), value


def to_dict(value: Any, *, for_run_id: bool = False) -> Any:
    """Return settings as nested dictionaries; `for_run_id` omits fields that cannot change a result."""
    if is_dataclass(value):
        included = [f for f in fields(value) if not for_run_id or _is_in_run_id(f, getattr(value, f.name))]
        return {f.name: to_dict(getattr(value, f.name), for_run_id=for_run_id) for f in included}
    if isinstance(value, tuple):
        return [to_dict(v, for_run_id=for_run_id) for v in value]
    return value


def _is_in_run_id(declared: Field[Any], value: Any) -> bool:
    rule = declared.metadata.get("in_run_id", True)
    return value != declared.default if rule == "when changed" else bool(rule)


def get_help_text(type_: type, name: str) -> str:
    """Return the help text of a field, inherited where a subclass changes only the default."""
    declared = (base.__dict__.get("__dataclass_fields__", {}).get(name) for base in type_.__mro__)
    return next((text for f in declared if f and (text := f.metadata.get("help", ""))), "")


def describe_type(type_: type, name: str) -> str:
    """Return the values that a field accepts, as in `adam | sgd` or `whole number ≥ 1`."""
    bounds = next(f for f in fields(type_) if f.name == name).metadata.get("bounds", {})
    return f"{_describe_hint(get_type_hints(type_)[name])} {abbreviate_bounds(bounds)}".rstrip()


def _describe_hint(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " | ".join(map(str, args))
    if origin in (Union, types.UnionType):
        return " | ".join(dict.fromkeys("none" if a is type(None) else _describe_hint(a) for a in args))
    if origin is tuple:
        return f"list of {_describe_hint(args[0])}s".replace("texts", "text")
    type_names = {bool: "true | false", int: "whole number", float: "number", str: "text"}
    return type_names.get(hint, "on")  # a nested dataclass


def format_value(value: Any) -> str:
    """Return a value as it can be typed: `true`, `none`, `1,2`."""
    if isinstance(value, tuple):
        return ",".join(map(format_value, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _matches_path(path: FieldPath, name: str) -> bool:
    suffix = tuple(name.split("."))
    return path[-len(suffix) :] == suffix


def _find_path(settings: Any, name: str) -> FieldPath:
    paths = [path for path, _ in iterate_settings(settings)]
    matches = [path for path in paths if _matches_path(path, name)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise InputError(f"field '{name}' is ambiguous; use one of: {', '.join('.'.join(p) for p in matches)}")
    if column_path := _find_column_path(settings, name):
        return column_path
    group = tuple(name.split(".")[:-1])
    # Of a nested field, name those in its group, if there is such a group; else all.
    names = sorted({path[-1] for path in paths if group and path[-len(group) - 1 : -1] == group})
    names = names or sorted({path[-1] for path in paths})
    endings = {".".join(path[-len(group) - 1 :]) for path in paths}
    raise InputError(f"unknown field '{name}'{suggest_name(name, endings)}; known: {', '.join(names)}")


def _find_column_path(settings: Any, name: str) -> FieldPath:
    """Return the path of `missing.chol`: that of the field `missing`, which has entries per column, and the column."""
    field_name, _, column = name.partition(".")
    for path, _ in iterate_settings(settings):
        owner = reduce(getattr, path[:-1], settings)
        declared = next(f for f in fields(owner) if f.name == path[-1])
        if column and path[-1] == field_name and declared.metadata.get("per_column"):
            return (*path, column)
    return ()


def _replace_column_entries(entries: tuple[str, ...], changes: Mapping[FieldPath, str]) -> tuple[str, ...]:
    """Return the entries `column=value` of a field with some columns changed; an empty value removes a column."""
    values = dict(entry.split("=", 1) for entry in entries)
    values |= {column: text for (column,), text in changes.items()}
    return tuple(f"{column}={text}" for column, text in values.items() if text)


def _apply_changes(settings: Any, changes: Mapping[FieldPath, str]) -> Any:
    """Apply all changes at once, so that fields are checked against each other only with their new values."""
    if isinstance(settings, tuple):
        return _replace_column_entries(settings, changes)
    nested: dict[str, dict[FieldPath, str]] = {}
    values: dict[str, Any] = {}
    for (name, *rest), text in changes.items():
        if rest:
            nested.setdefault(name, {})[tuple(rest)] = text
        else:
            values[name] = parse_value(text, get_type_hints(type(settings))[name], name)
    values |= {name: _apply_changes(getattr(settings, name), inner) for name, inner in nested.items()}
    return replace(settings, **values)


def parse_value(text: str, type_: Any, name: str) -> Any:
    """Convert a text to the type of a field, or raise an `InputError` that names the allowed values."""
    origin, args = get_origin(type_), get_args(type_)
    if origin is Literal:
        if text not in args:
            raise InputError(f"{name}={text}; allowed: {', '.join(map(str, args))}")
        return text
    if origin in (Union, types.UnionType):
        return None if text.lower() == "none" else parse_value(text, next(a for a in args if a is not type(None)), name)
    if is_dataclass(type_):  # `on` gives the defaults; its fields have names of their own
        if text != "on":
            raise InputError(f"{name}={text}; allowed: on, none")
        return type_()  # type: ignore[operator]
    if origin is tuple:
        return tuple(parse_value(part.strip(), args[0], name) for part in text.strip("()[]").split(",") if part.strip())
    if type_ is bool:
        if text.lower() not in ("true", "false", "yes", "no", "1", "0"):
            raise InputError(f"{name}={text}; allowed: true, false")
        return text.lower() in ("true", "yes", "1")
    if type_ in (int, float):
        try:
            number = type_(text)
            if number != number:  # nan; math.isnan would overflow for a large int
                raise ValueError
            return number
        except ValueError:
            kind = "a whole number" if type_ is int else "a number"
            raise InputError(f"{name}={text} is not {kind}") from None
    return text


def from_dict(type_: type[T], values: Any) -> T:
    """Return the settings that `to_dict` wrote, here or on another machine; every name and type is checked."""
    if not isinstance(values, dict):
        raise InputError(f"{type_.__name__} must be a table of fields, not {values!r}")
    hints = get_type_hints(type_)
    names = [f.name for f in fields(type_) if f.init]  # type: ignore[arg-type]
    for name in values:
        if name not in names:
            raise unknown_value_error(f"field of {type_.__name__}", name, names)
    return type_(**{name: _check_type(value, hints[name], name) for name, value in values.items()})


def _check_type(value: Any, type_: Any, name: str) -> Any:
    origin, args = get_origin(type_), get_args(type_)
    if origin in (Union, types.UnionType):
        return None if value is None else _check_type(value, next(a for a in args if a is not type(None)), name)
    if is_dataclass(type_):
        return from_dict(type_, value)  # type: ignore[arg-type]
    if origin is tuple and isinstance(value, list):
        return tuple(_check_type(v, args[0], name) for v in value)
    if origin is Literal:
        if value not in args:
            raise InputError(f"{name}={format_value(value)}; allowed: {', '.join(map(str, args))}")
        return value
    if type_ is float and type(value) in (int, float):
        return float(value)
    if type_ in (bool, int, str) and type(value) is type_:
        return value
    raise InputError(f"{name}={value!r} is not of type {getattr(type_, '__name__', type_)}")
