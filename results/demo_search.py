"""Print the table of docs/log.md from results/demo-search.jsonl: what was tried to choose the demo's settings."""

import json
from collections import defaultdict
from pathlib import Path

RUNS = [json.loads(line) for line in (Path(__file__).parent / "demo-search.jsonl").read_text().splitlines()]


def words(run: dict) -> str:
    """Settings in a few words."""
    s, local = run["settings"], run["settings"]["local"]
    rounds, book, data = s["kw"], s.get("book", {}), s.get("data", {})
    parts = [
        f"rounds {rounds['rounds']}/{rounds['extra_rounds']}/{rounds['iterations']}",
        f"{local['epochs']} epochs of batch {local['batch']}",
        f"rate {local['rate']:g} {local.get('schedule', 'constant')}",
        f"width {s['width']}",
        *(f"{k} {v}" for k, v in {**book, **data}.items()),
        *([f"norm {s['normalise']}"] if "normalise" in s else []),
    ]
    return ", ".join(parts)


def main() -> None:
    groups = defaultdict(list)
    for run in RUNS:
        groups[run["method"], words(run)].append(run)
    print("| method | settings | seeds | mA | mE | validation mA |\n|---|---|---|---|---|---|")
    for (method, settings), runs in sorted(groups.items(), key=lambda g: (g[0][1].split(", width")[0], g[0][0])):
        mean = {m: sum(r[m] for r in runs) / len(runs) for m in ("mA", "mE", "validation mA")}
        seeds = " ".join(str(r["seed"]) for r in sorted(runs, key=lambda r: r["seed"]))
        print(
            f"| {method} | {settings} | {seeds} | {mean['mA']:.4f} | {mean['mE']:.3f} | {mean['validation mA']:.4f} |"
        )


if __name__ == "__main__":
    main()
