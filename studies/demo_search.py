"""Print the table of docs/log.md from results/demo-search.jsonl, the search for the demo's settings.

`python -m studies.demo_search`
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).parents[1] / "results" / "demo-search.jsonl"
METRICS = ("mA", "mE", "validation mA")


def describe_settings(record: dict[str, Any]) -> str:
    """Describe the settings of a run in one line."""
    settings, local = record["settings"], record["settings"]["local"]
    rounds, other = settings["method"], {**settings.get("codebook", {}), **settings.get("data", {})}
    parts = [
        f"rounds {rounds['rounds']}/{rounds['extra_rounds']}/{rounds['iterations']}",
        f"epochs {local['epochs']}, batch_size {local['batch_size']}",
        f"lr {local['lr']:g} {local.get('schedule', 'constant')}",
        f"width {settings['width']}",
        *(f"{name} {value}" for name, value in other.items()),
        *([f"feature_norm {settings['feature_norm']}"] if "feature_norm" in settings else []),
    ]
    return ", ".join(parts)


def render_table(records: list[dict[str, Any]]) -> str:
    """Render means over seeds, one row per method and settings."""
    groups = defaultdict(list)
    for record in records:
        groups[record["method"], describe_settings(record)].append(record)
    rows = ["| method | settings | seeds | mA | mE | validation mA |", "|---|---|---|---|---|---|"]
    for (method, settings), runs in sorted(groups.items(), key=lambda g: (g[0][1].split(", width")[0], g[0][0])):
        mean = {m: sum(r[m] for r in runs) / len(runs) for m in METRICS}
        seeds = " ".join(str(r["seed"]) for r in sorted(runs, key=lambda r: r["seed"]))
        rows.append(
            f"| {method} | {settings} | {seeds} | {mean['mA']:.4f} | {mean['mE']:.3f} | {mean['validation mA']:.4f} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    print(render_table([json.loads(line) for line in RECORDS.read_text().splitlines()]))
