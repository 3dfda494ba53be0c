"""What is printed of runs: tables from their summaries."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from uefl.errors import InputError
from uefl.records import Record, read

LEVEL = "mean of last 5"
COLUMNS = (("accuracy", "acc."), ("entropy", "entropy"), ("perplexity", "perpl."), ("words", "words"))


def summary(folder: Path) -> dict[str, Any]:
    """A finished run's summary."""
    path = folder / "summary.json"
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except ValueError as e:
        raise InputError(f"{path} is damaged ({e}); delete it and run again") from None
    return found


def beside(runs: Mapping[str, Path], level: str = LEVEL) -> Table:
    """Per silo, per domain and over all: one method beside the other."""
    found = {name: summary(folder)[level] for name, folder in runs.items()}
    table = Table(title=f"Test images, {level}{' rounds' if level == LEVEL else ''}", title_justify="left")
    table.add_column("")
    for name, run in found.items():
        for metric, label in COLUMNS:
            if metric in ("accuracy", "entropy") or _speaks(run):
                table.add_column(f"{name}\n{label}", justify="right")
    first = next(iter(found.values()))
    for domain in first["domains"]:
        members = [n for n, mine in first["silos"].items() if mine["domain"] == domain]
        for silo in members if members != [domain] else []:  # a silo that is its own domain has one row
            table.add_row(silo, *_cells([run["silos"].get(silo, {}) for run in found.values()], found))
        rows = [run["domains"].get(domain, {}) for run in found.values()]
        table.add_row(f"[bold]{domain}[/bold]", *_cells(rows, found, bold=True), end_section=True)
    overall = [
        {"accuracy": r["mA"], "entropy": r["mE"], "perplexity": r["mP"], "words": _most(r)} for r in found.values()
    ]
    table.add_row("[bold]mA, mE, mP; most words[/bold]", *_cells(overall, found, bold=True))
    return table


def _speaks(run: Mapping[str, Any]) -> bool:
    """Whether a method has words at all."""
    return _most(run) > 0


def _most(run: Mapping[str, Any]) -> float:
    return float(max(mine["words"] for mine in run["silos"].values()))


def _cells(rows: Sequence[Mapping[str, float]], found: Mapping[str, Any], *, bold: bool = False) -> list[str]:
    cells = []
    for row, run in zip(rows, found.values()):
        for metric, _ in COLUMNS:
            if metric in ("accuracy", "entropy"):
                cells.append(f"{row[metric]:.3f}" if metric in row else "–")
            elif _speaks(run):
                cells.append(f"{row[metric]:.0f}" if metric in row else "–")
    return [f"[bold]{cell}[/bold]" for cell in cells] if bold else cells


def extensions(runs: Mapping[str, Path]) -> list[str]:
    """In words, who was found uncertain when, and what came of it."""
    lines = []
    for name, folder in runs.items():
        for step in summary(folder)["extensions"]:
            lines.append(f"{name}: " + decided(step["round"], step["uncertain"], step["new_words"]))
    return lines


def unheard(runs: Mapping[str, Path]) -> list[str]:
    """In words, the runs in which rounds went by without a single usable reply."""
    lines = []
    for name, folder in runs.items():
        rounds = read(folder / "records.jsonl")
        lost = [r["round"] for r in rounds if r["silos"] and all("refused" in mine for mine in trained(r))]
        if lost:
            lines.append(
                f"{name}: in {len(lost)} of {len(rounds)} rounds, the first of them {lost[0]}, no reply could be used "
                "and the model stayed as it was; a smaller local.rate may help"
            )
    return lines


def trained(record: Record) -> list[Record]:
    """The silos that sent something in a round."""
    return [mine for mine in record["silos"].values() if "up" in mine] or [{}]


def decided(round_: int, uncertain: Sequence[str], new_words: Mapping[str, int]) -> str:
    """One decision at the end of an iteration, in words."""
    if not uncertain:
        return f"after round {round_} no silo stands out: the vocabulary is settled"
    many = "silo stands out by its" if len(uncertain) == 1 else "silos stand out by their"
    who = f"{len(uncertain)} {many} uncertainty ({', '.join(uncertain)})"
    each = " or ".join(map(str, sorted(set(new_words.values())))) or "no"
    return f"after round {round_}, {who}: {each} words of {'its' if len(uncertain) == 1 else 'their'} own"
