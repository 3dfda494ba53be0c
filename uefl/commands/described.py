"""What a setting takes and what it means: its type, and the comment that stands beside it in the source."""

from __future__ import annotations

import ast
import inspect
import io
import textwrap
import tokenize
import types
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def takes(kind: type, name: str) -> str:
    """The values that a field allows, in words."""
    return _spoken(get_type_hints(kind)[name])


def _spoken(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " | ".join(map(str, args))
    if origin in (Union, types.UnionType):
        return " | ".join(dict.fromkeys("none" if a is type(None) else _spoken(a) for a in args))
    if origin is tuple:
        return f"{_spoken(args[0])}, …"
    words = {bool: "true | false", int: "whole number", float: "number", str: "text"}
    return words.get(hint, "on")  # a group of settings


def means(kind: type, name: str) -> str:
    """A field's comment, its own or the one it inherits."""
    return next((found[name] for one in kind.__mro__ if name in (found := _comments(one))), "")


@cache
def _comments(kind: type) -> dict[str, str]:
    """The comments at the ends of the lines where a class has its fields."""
    try:
        source = textwrap.dedent(inspect.getsource(kind))
    except (OSError, TypeError):  # built-in, or typed into a console
        return {}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    said = {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}
    (body,) = ast.parse(source).body
    fields = [node for node in getattr(body, "body", []) if isinstance(node, ast.AnnAssign)]
    named = {node.target.id: node.end_lineno for node in fields if isinstance(node.target, ast.Name)}
    return {name: said[line] for name, line in named.items() if line in said}
