"""Say in one line what is wrong with an option, a command or an argument that was typed."""

from __future__ import annotations

from typing import Any

import typer

from uefl.core.errors import suggest_name

UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # that of the click which this typer uses
_WORDS = {"a valid integer": "a whole number", "a valid float": "a number"}  # as settings are refused


def prints_help(error: Exception) -> bool:
    """Return whether this is no mistake: a group of commands without a command has already printed its help."""
    return type(error).__name__ == "NoArgsIsHelpError"


def describe_usage_error(error: Any) -> str:
    """Return one line that names what was typed wrongly, and the allowed or the nearest value."""
    kind, context, param = type(error).__name__, error.ctx, getattr(error, "param", None)
    if kind == "NoSuchOption" and context is not None:
        known = [name for option in context.command.get_params(context) for name in _list_option_names(option)]
        return _describe_unknown("option", error.option_name, known, context)
    if kind == "NoSuchCommand" and context is not None:
        return _describe_unknown("command", error.command_name, context.command.list_commands(context), context)
    if kind == "MissingParameter" and param is not None:
        missing = f"{param.param_type_name} {_name_parameter(param)} of {_name_command(context)}"
        return f"missing {missing}: {_make_clause(param.help)}"
    if param is not None:
        return f"{_name_parameter(param)}: {_make_clause(error.message)}"
    return _make_clause(error.message) + (f"; see {_name_command(context, '--help')}" if context is not None else "")


def _describe_unknown(kind: str, name: str, known: list[str], context: Any) -> str:
    owner = f" of {_name_command(context)}" if context.parent is not None else ""
    return _join_lines(f"unknown {kind} '{name}'{owner}{suggest_name(name, known)}; known: {', '.join(known)}")


def _list_option_names(param: Any) -> list[str]:
    return [*param.opts, *param.secondary_opts] if param.param_type_name == "option" and not param.hidden else []


def _name_parameter(param: Any) -> str:
    return str(max(param.opts, key=len) if param.param_type_name == "option" else param.human_readable_name)


def _name_command(context: Any, *options: str) -> str:
    """Return the command as a user types it, also where another program has started it."""
    names: list[str] = list(options)
    while context.parent is not None:
        names.insert(0, context.info_name)
        context = context.parent
    return f"`{' '.join(['uefl', *names])}`"


def _make_clause(sentence: str) -> str:
    """Return a sentence as a part of a line, in the words of this package."""
    text = _join_lines(sentence).rstrip(".")
    for old, new in _WORDS.items():
        text = text.replace(old, new)
    return text[:1].lower() + text[1:] if text[1:2].islower() else text


def _join_lines(text: str) -> str:
    return " ".join(text.split())
