"""The column of a table that names the silo of a row: whose rows does a file have?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from uefl.data.readers.csv_rows import NUM_LISTED


@dataclass(frozen=True)
class SiloColumn:
    """The column that names silos, and which of its values mean one silo and which mean others."""

    column: str  # empty: the rows do not name their silo
    silo_name: str
    own_values: frozenset[str] = frozenset()  # of this silo
    other_values: frozenset[str] = frozenset()  # of the other silos of the run
    is_named_by_column: bool = False  # whether the silo has its name from the column, so that further values are others

    def is_other(self, value: str) -> bool:
        """Return whether a value means another silo; an empty one, or one that may be another spelling, does not."""
        if not value or value in self.own_values:
            return False
        return self.is_named_by_column or value in self.other_values

    def describe_others(self, values: Iterable[str]) -> str:
        """Return a sentence with the other silos that rows name and the number of rows of each, or an empty text."""
        values = list(values)
        counts = Counter(value for value in values if self.is_other(value))
        if not counts:
            return ""
        listed = ", ".join(f"{name} ({count})" for name, count in counts.most_common(NUM_LISTED))
        more = ", …" if len(counts) > NUM_LISTED else ""
        return (
            f"{counts.total()} of {len(values)} rows are of another silo than {self.silo_name} by column "
            f"'{self.column}': {listed}{more}"
        )
