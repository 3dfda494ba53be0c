"""One reading of a source: how it is to be read, and what was noticed on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import track

from uefl.errors import InputError

Item = TypeVar("Item")


def printable(line: str) -> str:
    """One line for a terminal, whatever file names an archive brought along."""
    return "".join(c if c.isprintable() else "?" for c in line)


@dataclass
class Reading:
    """How to read, and what is noticed on the way."""

    size: int | None = None  # images are stretched to size × size; None: they must all be of one size
    skip_bad: bool = False
    progress: bool = False
    skipped: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def bad(self, line: str) -> None:
        """Refuse the source for this item, or leave the item out and count it."""
        if not self.skip_bad:
            raise InputError(line)
        self.skipped.append(line)

    def notes(self) -> tuple[str, ...]:
        """What was counted, and the first of what was skipped: a reader wants an example, not ten thousand lines."""
        lines = [f"{count} {what}" for what, count in sorted(self.counts.items())]
        if self.skipped:
            lines.append(f"{len(self.skipped)} skipped, the first: {self.skipped[0]}")
        return tuple(map(printable, lines))

    def watched(self, items: Iterable[Item], what: str, total: int) -> Iterator[Item]:
        """The items, with a bar on a terminal's stderr while they last."""
        console = Console(stderr=True)
        if not (self.progress and console.is_terminal):
            yield from items
            return
        yield from track(items, escape(printable(what)), total=total, console=console, transient=True)
