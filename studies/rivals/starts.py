"""IFCA's row of docs/rivals.md: per seed the best of its starts by validation, never by test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from studies.methods.runner import RunRecord
from studies.rivals.runner import NUM_STARTS, Choice, list_start_runs
from studies.rivals.tables import Part, find_part
from studies.rivals.trials import IFCA

Rows = dict[str, dict[Part, RunRecord]]


def choose_starts(name: str, choice: Choice, rows: Rows, results: Sequence[RunRecord]) -> Rows:
    """Return rows with the start of IFCA that validation chooses per seed, or as they are until all starts have run."""
    starts = {part: [record] for part, record in rows.get(IFCA, {}).items()}
    for run in list_start_runs(name, choice):
        starts.setdefault(find_part(run), []).extend(run.find_records(results)[-1:])
    if not starts or any(len(records) < NUM_STARTS for records in starts.values()):
        return rows
    best = {part: min(records, key=lambda r: float(r["validation_nll"])) for part, records in starts.items()}
    return {**rows, IFCA: {part: {**record, "num_starts": NUM_STARTS} for part, record in best.items()}}


def count_starts(records: Mapping[Part, RunRecord]) -> int:
    """Return the number of runs of which each record of a row is the best."""
    return max(int(record.get("num_starts", 1)) for record in records.values())


def describe_starts(rows: Mapping[str, Mapping[Part, RunRecord]]) -> str:
    """Describe from how many starts IFCA's row was chosen; nothing without such a row."""
    name = next((name for name in rows if name.startswith(IFCA)), "")  # or "IFCA, 3 models"
    if not name:
        return ""
    count = count_starts(rows[name])
    if count == 1:
        return f"{name}: one start of its initial models."
    return f"{name}: the best of {count} starts by validation NLL, per seed; its costs are those of {count} runs."
