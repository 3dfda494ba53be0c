"""The options of reading a source, and the log of what was skipped and converted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import track

from uefl.core.errors import InputError
from uefl.data.table_config import TableConfig

ItemT = TypeVar("ItemT")


def sanitize_line(line: str) -> str:
    """Replace control characters, which file names in an archive may contain, for output on a terminal."""
    return "".join(c if c.isprintable() else "?" for c in line)


@dataclass
class ReadContext:
    """Options of reading a source, and what was skipped and converted."""

    image_size: int | None = None  # resize images to a square of this size; None: all must have the same size
    skip_bad: bool = False
    show_progress: bool = False
    table: TableConfig = field(default_factory=TableConfig)  # what the columns of a table mean
    group: str = ""  # column or pattern of what must stay together, such as the rows of a patient
    is_one_silo: bool = False  # of several, each with a source of its own: other silos may have further labels
    skipped_messages: list[str] = field(default_factory=list)
    note_counts: Counter[str] = field(default_factory=Counter)
    warnings: list[str] = field(default_factory=list)  # about what was read nevertheless

    def skip_or_raise(self, line: str) -> None:
        """Raise an error for a bad item, or skip and count it with `skip_bad`."""
        if not self.skip_bad:
            raise InputError(line)
        self.skipped_messages.append(line)

    def format_notes(self) -> tuple[str, ...]:
        """Return the counts of conversions, and the number of skipped items with the first one as an example."""
        lines = [f"{count} {note}" for note, count in sorted(self.note_counts.items())]
        if self.skipped_messages:
            lines.append(f"{len(self.skipped_messages)} skipped, the first: {self.skipped_messages[0]}")
        return tuple(map(sanitize_line, lines))

    def track_progress(self, items: Iterable[ItemT], description: str, total: int) -> Iterator[ItemT]:
        """Yield the items, with a progress bar if stderr is a terminal."""
        console = Console(stderr=True)
        if not (self.show_progress and console.is_terminal):
            yield from items
            return
        yield from track(items, escape(sanitize_line(description)), total=total, console=console, transient=True)
