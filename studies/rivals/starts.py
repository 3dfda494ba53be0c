"""IFCA's row of docs/rivals.md: per seed the best of its starts by validation, never by test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from studies.methods.runner import RunRecord
from studies.rivals.runner import NUM_STARTS, START, Choice, list_ifca_rows, list_start_runs
from studies.rivals.tables import Part, find_part
from studies.rivals.trials import IFCA

Rows = dict[str, dict[Part, RunRecord]]


def choose_starts(name: str, choice: Choice, rows: Rows, results: Sequence[RunRecord]) -> Rows:
    """Return rows with the start of IFCA that validation chooses per seed, or as they are until all starts have run."""
    runs = list_start_runs(name, choice)
    for row in list_ifca_rows(name, choice):
        starts = {part: [record] for part, record in rows.get(row, {}).items()}
        for run in runs:
            if run.method.startswith(f"{row}{START}"):
                starts.setdefault(find_part(run), []).extend(run.find_records(results)[-1:])
        if starts and all(len(records) == NUM_STARTS for records in starts.values()):
            best = {part: min(records, key=lambda r: float(r["validation_nll"])) for part, records in starts.items()}
            rows = {**rows, row: {part: {**record, "num_starts": NUM_STARTS} for part, record in best.items()}}
    return rows


def count_starts(records: Mapping[Part, RunRecord]) -> int:
    """Return the number of runs of which each record of a row is the best."""
    return max(int(record.get("num_starts", 1)) for record in records.values())


def describe_starts(rows: Mapping[str, Mapping[Part, RunRecord]]) -> str:
    """Describe from how many starts each row of IFCA was chosen; nothing without such a row."""
    lines = []
    for name in (name for name in rows if name.startswith(IFCA)):  # or "IFCA, 3 models"
        count = count_starts(rows[name])
        if count == 1:
            lines.append(f"{name}: one start of its initial models.")
        else:
            lines.append(
                f"{name}: the best of {count} starts by validation NLL, per seed; its costs are those of {count} runs."
            )
    return "\n\n".join(lines)
