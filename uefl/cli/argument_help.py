"""Keep the help of arguments: typer 0.20, to which Flower keeps us back, loses it on click 8.5."""

from __future__ import annotations

from functools import wraps
from typing import Any

from typer.core import TyperArgument


def keep_argument_help() -> None:
    """Let every argument have the help that its command gives; later versions of typer do so by themselves."""
    initialize = TyperArgument.__init__

    @wraps(initialize)
    def initialize_with_help(self: TyperArgument, **settings: Any) -> None:
        initialize(self, **settings)
        self.help = settings.get("help")

    TyperArgument.__init__ = initialize_with_help  # type: ignore[method-assign]
