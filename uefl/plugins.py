"""Methods, encoders and readers that other installed packages bring, found by name through entry points.

A package says in its pyproject.toml, for instance, `[project.entry-points."uefl.methods"] mine = "my.module:Mine"`.
Only what is installed on a machine can run there: a name is looked up, never imported from what a message says.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Literal, TypeVar

T = TypeVar("T")
Group = Literal["uefl.methods", "uefl.encoders", "uefl.readers"]


def has(registry: dict[str, T], group: Group, name: str) -> bool:
    """Whether a name is known, built in or brought by an installed package; built-in names cannot be taken over."""
    if name not in registry:
        for found in entry_points(group=group, name=name):
            registry[name] = found.load()
    return name in registry


def brought(registry: dict[str, T], group: Group) -> dict[str, T]:
    """All there is, with what installed packages bring."""
    for found in entry_points(group=group):
        has(registry, group, found.name)
    return registry
