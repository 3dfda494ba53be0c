"""Leave every domain or site out in turn: one run per target, and one table of all."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from uefl.core.metrics import TWO_CLASS_METRICS, Metric, describe_means, mean_metric, select_table_metrics
from uefl.data.config import ALL_TARGETS
from uefl.experiment.comparison import RunResources, create_comparison_folder, run_experiments
from uefl.experiment.experiment import Experiment
from uefl.experiment.files import write_text
from uefl.experiment.records import DEFAULT_AGGREGATION, choose_aggregation, describe_rounds
from uefl.experiment.report import (
    INTERVAL_NOTE,
    Summary,
    describe_chance_level,
    describe_positive_classes,
    format_interval,
    has_codewords,
    has_two_classes,
)
from uefl.experiment.run_folder import RunFolder

TARGETS_TABLE_FILE = "targets.md"  # the table, in the folder of the comparison
Key = tuple[str, str]  # name of the experiment, target


def leaves_all_out(experiments: Mapping[str, Experiment]) -> bool:
    """Return whether every target is to be left out in turn."""
    return any(experiment.data.target == ALL_TARGETS for experiment in experiments.values())


def compare_targets(
    experiments: Mapping[str, Experiment], out: Path, resources: RunResources, console: Console
) -> None:
    """Run every experiment with every target; print and save the table, and what it says about chance level."""
    data = next(iter(experiments.values())).data  # the same for all methods
    keys = {(name, target): f"{name}, without {target}" for target in data.list_targets() for name in experiments}
    runs = {
        label: replace(experiments[name], data=replace(data, target=target)) for (name, target), label in keys.items()
    }
    folders = run_experiments(runs, out, resources, console)
    table = format_target_tables({key: RunFolder(folders[label]) for key, label in keys.items()})
    notes = [*describe_positive_classes(folders), *describe_chance_level(folders)]
    text = table + "".join(f"\n{line}\n" for line in notes)
    folder = create_comparison_folder(folders, out)
    write_text(folder / TARGETS_TABLE_FILE, f"`{shlex.join(['uefl', *sys.argv[1:]])}`\n\n{text}")
    console.print(text, markup=False, soft_wrap=True)
    console.print(f"Results are saved in {folder}.", soft_wrap=True)


def format_target_tables(runs: Mapping[Key, RunFolder]) -> str:
    """Format the metrics of every method on the test examples of every target, then their means over targets.

    For two classes, a second table has the intervals of the metrics.
    """
    of_runs = {key: run.read_summary() for key, run in runs.items()}
    aggregation = choose_aggregation(len(summary[DEFAULT_AGGREGATION]["round"]) for summary in of_runs.values())
    summaries = {key: summary[aggregation] for key, summary in of_runs.items()}
    names, targets = (list(dict.fromkeys(part)) for part in zip(*runs))
    two_classes = any(map(has_two_classes, summaries.values()))
    has_codebook = any(map(has_codewords, summaries.values()))
    metrics = select_table_metrics(with_codebook=has_codebook, two_classes=two_classes)
    values = {t: {n: _select_values(summaries[n, t], metrics) for n in names} for t in targets}
    means = {n: {m.label: mean_metric([values[t][n] for t in targets], m.label) for m in metrics} for n in names}
    rounds = describe_rounds(len(summary["round"]) for summary in summaries.values())
    cells = {
        target: {name: [_format_value(row, metric) for metric in metrics] for name, row in rows.items()}
        for target, rows in {**values, "mean": means}.items()
    }
    explanation = describe_means(with_codebook=has_codebook, two_classes=two_classes)
    lines = [f"Test examples of the silo that is held out, {rounds}:", ""]
    lines += [*_format_rows(["held out", *(metric.label for metric in metrics)], cells), "", explanation]
    if two_classes:
        intervals = {
            t: {n: [format_interval(summaries[n, t]["all_silos"], m.name) for m in TWO_CLASS_METRICS] for n in names}
            for t in targets
        }
        headings = ["95 % intervals", *(metric.label for metric in TWO_CLASS_METRICS)]
        lines += ["", *_format_rows(headings, intervals), "", INTERVAL_NOTE]
    return "\n".join(lines) + "\n"


def _select_values(summary: Summary, metrics: Sequence[Metric]) -> dict[str, float]:
    """Return the values of a run by label; those of codewords only if it has any."""
    shown = [m for m in metrics if m.label in summary and (has_codewords(summary) or not m.requires_codebook)]
    return {metric.label: float(summary[metric.label]) for metric in shown}


def _format_value(row: Mapping[str, float], metric: Metric) -> str:
    value = row.get(metric.label, math.nan)
    return "–" if math.isnan(value) else f"{value:.{metric.digits}f}"


def _format_rows(headings: Sequence[str], rows: Mapping[str, Mapping[str, Sequence[str]]]) -> list[str]:
    """Format cells by target and method in Markdown, aligned as text too; several methods stand below a target."""
    table = [headings]
    for target, methods in rows.items():
        if len(methods) == 1:
            table += [[target, *cells] for cells in methods.values()]
        else:
            table += [[f"**{target}**"] + [""] * (len(headings) - 1), *([name, *c] for name, c in methods.items())]
    widths = [max(map(len, column)) for column in zip(*table)]
    lines = [f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths))} |" for row in table]
    return [lines[0], f"|{'|'.join('-' * (width + 2) for width in widths)}|", *lines[1:]]
