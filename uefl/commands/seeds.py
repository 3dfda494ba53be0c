"""`uefl compare --seeds 0,1,2`: every method with every seed, as means with their spread."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from uefl.checkpoint import write_text
from uefl.commands.compare import PLAIN, Where, folder_of, ran
from uefl.errors import InputError
from uefl.experiment import Experiment
from uefl.report import LEVEL, summary
from uefl.run import HEADER

SEEDS = "seeds.md"  # in the folder of such a comparison: its table
METRICS = ("mA", "mE", "mP")


def parsed_seeds(text: str) -> list[int]:
    """`0,1,2` as numbers."""
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"seeds={text} is not a list of whole numbers such as 0,1,2") from None
    return list(dict.fromkeys(seeds))


def compare_seeds(
    experiments: Mapping[str, Experiment], seeds: Sequence[int], out: Path, where: Where, console: Console
) -> None:
    """Run all, print and keep one table, and one line a run for who wants to compute on."""
    named = {(name, seed): f"{name}, seed {seed}" for seed in seeds for name in experiments}
    every = {named[n, s]: replace(experiments[n], seed=s) for n, s in named}
    folders = ran(every, out, where, console)
    lines = [line(name, folders[named[name, seed]]) for name, seed in named]
    table = markdown(lines)
    together = folder_of(folders, out)
    write_text(together / "seeds.jsonl", "".join(json.dumps(one) + "\n" for one in lines))
    write_text(together / SEEDS, f"`{shlex.join(['uefl', *sys.argv[1:]])}`\n\n{table}")
    console.print(table, markup=False, soft_wrap=True)
    console.print(f"kept in {together}", soft_wrap=True)


def line(name: str, folder: Path) -> dict[str, Any]:
    """One run in one line: what it was and what came of it."""
    header, found = json.loads((folder / HEADER).read_text()), summary(folder)
    about = {key: header[key] for key in ("engine", "device", "threads", "torch", "uefl", "results", "fingerprint")}
    levels = {level: {m: found[level][m] for m in METRICS} for level in ("last", LEVEL, "best by validation")}
    domains = {d: mine["accuracy"] for d, mine in found[LEVEL]["domains"].items()}
    rest = {key: found[key] for key in ("rounds", "words_total", "validation_accuracy", "extensions", "seconds")}
    return {"name": name, "run": folder.name, **about, "experiment": header["experiment"], **levels, **rest} | {
        "domain accuracy": domains
    }


def markdown(lines: Sequence[Mapping[str, Any]]) -> str:
    """Means over seeds ± standard error, then seed by seed; of two FedAvgs the better by validation is marked."""
    methods = list(dict.fromkeys(one["name"] for one in lines))
    runs = {name: [one for one in lines if one["name"] == name] for name in methods}
    best = {n: sum(r["validation_accuracy"] for r in runs[n]) / len(runs[n]) for n in ("fedavg", PLAIN) if n in runs}
    marked = max(best, key=lambda n: best[n]) if len(best) == 2 else ""
    seeds = ", ".join(str(r["experiment"]["seed"]) for r in runs[methods[0]])
    rows = [f"| {LEVEL} rounds | mA | mE | mP | mA, seeds {seeds} | mE, seeds {seeds} |", "|---|---|---|---|---|---|"]
    for name in methods:
        cells = [spread([r[LEVEL][m] for r in runs[name]], 1 if m == "mP" else 4) for m in METRICS]
        each = [" ".join(f"{r[LEVEL][m]:.4f}" for r in runs[name]) for m in ("mA", "mE")]
        mark = " (better by validation)" if name == marked else ""
        rows.append(f"| {name}{mark} | " + " | ".join(cells + each) + " |")
    return "\n".join(rows) + "\n"


def spread(values: Sequence[float], digits: int) -> str:
    """Mean ± standard error."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return f"{mean:.{digits}f}"
    error = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))
    return f"{mean:.{digits}f} ± {error:.{digits}f}"
