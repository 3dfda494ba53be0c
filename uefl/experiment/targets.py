"""Leave every domain or site out in turn: one run per target, and one table of all."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from uefl.core.metrics import TABLE_METRICS, Metric, describe_means
from uefl.data.config import ALL_TARGETS
from uefl.experiment.comparison import RunResources, create_comparison_folder, run_experiments
from uefl.experiment.experiment import Experiment
from uefl.experiment.files import write_text
from uefl.experiment.records import DEFAULT_AGGREGATION, describe_rounds
from uefl.experiment.run_folder import RunFolder

TARGETS_TABLE_FILE = "targets.md"  # the table, in the folder of the comparison
Key = tuple[str, str]  # name of the experiment, target


def leaves_all_out(experiments: Mapping[str, Experiment]) -> bool:
    """Return whether every target is to be left out in turn."""
    return any(experiment.data.target == ALL_TARGETS for experiment in experiments.values())


def compare_targets(
    experiments: Mapping[str, Experiment], out: Path, resources: RunResources, console: Console
) -> None:
    """Run every experiment with every target; print and save the table."""
    data = next(iter(experiments.values())).data  # the same for all methods
    keys = {(name, target): f"{name}, without {target}" for target in data.list_targets() for name in experiments}
    runs = {
        label: replace(experiments[name], data=replace(data, target=target)) for (name, target), label in keys.items()
    }
    folders = run_experiments(runs, out, resources, console)
    table = format_target_table({key: RunFolder(folders[label]) for key, label in keys.items()})
    folder = create_comparison_folder(folders, out)
    write_text(folder / TARGETS_TABLE_FILE, f"`{shlex.join(['uefl', *sys.argv[1:]])}`\n\n{table}")
    console.print(table, markup=False, soft_wrap=True)
    console.print(f"Results are saved in {folder}.", soft_wrap=True)


def format_target_table(runs: Mapping[Key, RunFolder]) -> str:
    """Format one row per target with the metrics of each method on its test images, then the means over targets."""
    names, targets = (list(dict.fromkeys(part)) for part in zip(*runs))
    summaries = {key: run.read_summary()[DEFAULT_AGGREGATION] for key, run in runs.items()}
    columns = [(name, metric) for name in names for metric in _list_metrics(summaries[name, targets[0]])]
    values = {t: [float(summaries[name, t][metric.label]) for name, metric in columns] for t in targets}
    values["mean"] = [sum(column) / len(column) for column in zip(*values.values())]
    headings = [f"{name} {metric.label}" for name, metric in columns]
    rounds = describe_rounds(len(summary["round"]) for summary in summaries.values())
    rows = [f"| held out; {rounds} | {' | '.join(headings)} |", "|---" * (1 + len(columns)) + "|"]
    for target, row in values.items():
        cells = [f"{value:.{metric.digits}f}" for value, (_, metric) in zip(row, columns)]
        rows.append(f"| {target} | {' | '.join(cells)} |")
    has_codebook = any(metric.requires_codebook for _, metric in columns)
    return "\n".join([*rows, "", describe_means(with_codebook=has_codebook)]) + "\n"


def _list_metrics(summary: Mapping[str, object]) -> list[Metric]:
    """Return the metrics to show for a run: those of codebooks only if it has codewords."""
    silos: Mapping[str, Mapping[str, float]] = summary["silos"]  # type: ignore[assignment]
    has_codebook = any(silo["num_codewords"] for silo in silos.values())
    return [metric for metric in TABLE_METRICS if has_codebook or not metric.requires_codebook]
