"""Look up methods, data sets, partitioners, encoders and engines by name, and import only what is used.

An entry is a `module:attribute` string with one line of description, so listing names imports nothing. Other installed
packages add entries through entry points, for instance `[project.entry-points."uefl.methods"] name = "mine:MyMethod"`.
Names are looked up among installed packages only: no message from another machine can name a module to import.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib import import_module
from importlib.metadata import entry_points
from typing import Generic, NamedTuple, TypeVar

from uefl.core.errors import unknown_value_error

T = TypeVar("T")


class Entry(NamedTuple):
    """Where a registered object is defined, and one line about it."""

    target: str  # module:attribute
    description: str


class Registry(Mapping[str, T], Generic[T]):
    """Objects by name. `registry[name]` imports the object; iterating gives names and imports nothing."""

    def __init__(self, kind: str, entries: Mapping[str, Entry], *, group: str = "") -> None:
        self.kind = kind  # what an error message calls an entry: "method", "data set"
        self.group = group  # entry-point group of other packages; "": none
        self._built_in = dict(entries)
        self._loaded: dict[str, T] = {}

    def __getitem__(self, name: str) -> T:
        if name not in self._loaded:
            self.check_name(name)
            module, _, attribute = self._entries[name].target.partition(":")
            self._loaded[name] = getattr(import_module(module), attribute)
        return self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self._built_in or name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def check_name(self, name: str) -> None:
        """Raise an `InputError` unless an entry has this name; import nothing."""
        if name not in self:
            raise unknown_value_error(self.kind, name, self)

    def describe(self, name: str) -> str:
        """Return the line of description of an entry."""
        self.check_name(name)
        return self._entries[name].description

    def find_name(self, value: object) -> str:
        """Return the name under which an object is registered."""
        loaded = (name for name, registered in self._loaded.items() if registered is value)
        return next(loaded, "") or next(name for name in self if self[name] is value)

    @cached_property
    def _entries(self) -> dict[str, Entry]:
        """All entries, with those of other installed packages; a built-in name cannot be replaced."""
        plugins = entry_points(group=self.group) if self.group else ()
        others = {p.name: Entry(p.value, f"{p.value}, from an installed package") for p in plugins}
        return {**self._built_in, **others, **self._built_in}
