"""Settings are frozen dataclasses; `field=value` changes them, typed and checked, from the command line or a script."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from uefl.errors import InputError, unknown

T = TypeVar("T")


def override(value: T, assignments: Sequence[str]) -> T:
    """Change fields, anywhere inside: `gamma=0.2`, or with the way to it where a name alone is not enough."""
    changes: dict[tuple[str, ...], str] = {}
    for assignment in assignments:
        name, sign, text = assignment.partition("=")
        if not sign or not name:
            raise InputError(f"'{assignment}' is not of the form field=value")
        changes[_find(value, name)] = text
    changed: T = _changed(value, changes)
    return changed


def has(value: Any, name: str) -> bool:
    """Whether a setting of this name is anywhere inside."""
    return any(_matches(path, name) for path, _ in leaves(value))


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every setting with the way to it."""
    for f in fields(value):
        inner = getattr(value, f.name)
        if is_dataclass(inner):
            yield from leaves(inner, (*path, f.name))
        else:
            yield (*path, f.name), inner


def plain(value: Any, *, identity: bool = False) -> Any:
    """Nested dictionaries, lists and numbers; for a run's identity, without what cannot change a result."""
    if is_dataclass(value):
        kept = [f for f in fields(value) if not identity or f.metadata.get("identity", True)]
        return {f.name: plain(getattr(value, f.name), identity=identity) for f in kept}
    if isinstance(value, tuple):
        return [plain(v, identity=identity) for v in value]
    return value


def _matches(path: tuple[str, ...], name: str) -> bool:
    wanted = tuple(name.split("."))
    return path[-len(wanted) :] == wanted


def _find(value: Any, name: str) -> tuple[str, ...]:
    paths = [path for path, _ in leaves(value)]
    found = [path for path in paths if _matches(path, name)]
    if len(found) == 1:
        return found[0]
    if found:
        raise InputError(f"field '{name}' is ambiguous; say one of: {', '.join('.'.join(p) for p in found)}")
    known = sorted({path[-1] for path in paths})
    close = difflib.get_close_matches(name, known, 1)
    hint = f" (did you mean '{close[0]}'?)" if close else ""
    raise InputError(f"unknown field '{name}'{hint}; known: {', '.join(known)}")


def _changed(value: Any, changes: Mapping[tuple[str, ...], str]) -> Any:
    """All changes at once: fields are checked against each other only when every one has its new value."""
    inner: dict[str, dict[tuple[str, ...], str]] = {}
    new: dict[str, Any] = {}
    for (name, *rest), text in changes.items():
        if rest:
            inner.setdefault(name, {})[tuple(rest)] = text
        else:
            new[name] = parsed(text, get_type_hints(type(value))[name], name)
    new |= {name: _changed(getattr(value, name), some) for name, some in inner.items()}
    return replace(value, **new)


def parsed(text: str, kind: Any, name: str) -> Any:
    """A value of the field's type, or one line that says what the field takes."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        if text not in args:
            raise InputError(f"{name}={text}; allowed: {', '.join(map(str, args))}")
        return text
    if origin in (Union, types.UnionType):
        return None if text.lower() == "none" else parsed(text, next(a for a in args if a is not type(None)), name)
    if is_dataclass(kind):  # a group of settings: as it comes; each of them has a name of its own
        if text != "on":
            raise InputError(f"{name}={text}; allowed: on, none")
        return kind()  # type: ignore[operator]
    if origin is tuple:
        return tuple(parsed(part.strip(), args[0], name) for part in text.strip("()[]").split(",") if part.strip())
    if kind is bool:
        if text.lower() not in ("true", "false", "yes", "no", "1", "0"):
            raise InputError(f"{name}={text}; allowed: true, false")
        return text.lower() in ("true", "yes", "1")
    if kind in (int, float):
        try:
            number = kind(text)
            if number != number:  # nan compares with nothing, so no later check would find it
                raise ValueError
            return number
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            raise InputError(f"{name}={text} is not {what}") from None
    return text


def from_plain(kind: type[T], values: Any) -> T:
    """The settings that `plain` wrote down, here or elsewhere: every name and every type is checked."""
    if not isinstance(values, dict):
        raise InputError(f"{kind.__name__} must be a table of fields, not {values!r}")
    hints = get_type_hints(kind)
    known = [f.name for f in fields(kind) if f.init]  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            raise unknown(f"field of {kind.__name__}", name, known)
    return kind(**{name: _typed(value, hints[name], name) for name, value in values.items()})


def _typed(value: Any, kind: Any, name: str) -> Any:
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return None if value is None else _typed(value, next(a for a in args if a is not type(None)), name)
    if is_dataclass(kind):
        return from_plain(kind, value)  # type: ignore[arg-type]
    if origin is tuple and isinstance(value, list):
        return tuple(_typed(v, args[0], name) for v in value)
    if origin is Literal and value in args:
        return value
    if kind is float and type(value) in (int, float):
        return float(value)
    if kind in (bool, int, str) and type(value) is kind:
        return value
    raise InputError(f"{name}={value!r} is not of its type, {getattr(kind, '__name__', kind)}")
