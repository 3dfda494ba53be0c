"""Print the comparison of two source trees in benchmarks/README.md: `python -m benchmarks.trees_table`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from benchmarks.compare_trees import NEW, OLD
from benchmarks.harness import RECORDS

COLUMNS = (
    *("benchmark, date", "device, engine", "torch, recorded in"),
    *("0.1, median", "0.2, median", "ratio", "ratio by turn, median (range)"),
)
HEADER = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"


def render_table() -> str:
    """Return one row per run of `compare_trees`, in the order of the records."""
    records = [json.loads(line) for line in (RECORDS / "trees.jsonl").read_text().splitlines()]
    runs = zip([r for r in records if r["contender"] == OLD], [r for r in records if r["contender"] == NEW])
    return "\n".join([HEADER, *(_render_row(old, new) for old, new in runs)])


def _render_row(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    by_turn = new["note"].partition("by turn: ")[2]
    cells = [f"`{new['benchmark']}`, {new['date'][:16]}", f"{new['device']}, {new['engine']}"]
    cells += [f"{new['torch']}, {new['recorded_in']}"]
    cells += [f"{r['value']:.4g} {r['unit']}" for r in (old, new)]
    return "| " + " | ".join([*cells, f"{new['value'] / old['value']:.3f}", by_turn]) + " |"


if __name__ == "__main__":
    print(render_table())
