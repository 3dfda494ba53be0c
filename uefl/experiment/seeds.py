"""Compare methods over several seeds: means with standard errors."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from uefl.core.metrics import (
    QUALITY_METRICS,
    TABLE_METRICS,
    TWO_CLASS_METRICS,
    Metric,
    describe_labels,
    mean_metric,
    select_table_metrics,
)
from uefl.core.paired_difference import compare_pairs
from uefl.experiment.comparison import FEDAVG_NO_LAYER_NORM, RunResources, create_comparison_folder, run_experiments
from uefl.experiment.experiment import Experiment
from uefl.experiment.files import write_text
from uefl.experiment.records import AGGREGATIONS, DEFAULT_AGGREGATION, choose_aggregation, describe_rounds
from uefl.experiment.report import (
    describe_chance_level,
    describe_local_differences,
    describe_own_nll,
    describe_positive_classes,
)
from uefl.experiment.run_folder import RESULTS_VERSION_KEY, RunFolder
from uefl.experiment.verdict import format_difference

SEEDS_TABLE_FILE = "seeds.md"  # the table, in the folder of the comparison
SEEDS_RECORDS_FILE = "seeds.jsonl"  # one line per run


def compare_seeds(
    experiments: Mapping[str, Experiment], seeds: Sequence[int], out: Path, resources: RunResources, console: Console
) -> None:
    """Run every experiment with every seed; print and save the table, and one line per run for further analysis."""
    labels = {(name, seed): f"{name}, seed {seed}" for seed in seeds for name in experiments}
    runs = {label: replace(experiments[name], seed=seed) for (name, seed), label in labels.items()}
    folders = run_experiments(runs, out, resources, console)
    records = [summarize_run(name, folders[label]) for (name, _), label in labels.items()]
    local = {record["name"]: record["experiment"]["method"]["local"] for record in records}
    seed_means = summarize_seeds(records)
    lines = [*describe_differences(seed_means), *describe_own_means(records), *describe_positive_classes(folders)]
    lines += [*describe_chance_level(folders), *describe_local_differences(local)]
    table = format_seed_table(records) + "".join(f"\n{line}\n" for line in lines)
    folder = create_comparison_folder(folders, out)
    write_text(folder / SEEDS_RECORDS_FILE, "".join(json.dumps(record) + "\n" for record in records))
    write_text(folder / SEEDS_TABLE_FILE, f"`{shlex.join(['uefl', *sys.argv[1:]])}`\n\n{table}")
    title = f"Test examples, {seed_means.rounds}; mean ± standard error over seeds {seed_means.seeds}"
    console.print(title, style="italic", soft_wrap=True)
    console.print(make_seed_table(seed_means))
    for line in (describe_labels(seed_means.metrics), *lines):
        console.print(line, markup=False, soft_wrap=True)
    console.print(f"Results are saved in {folder}; {SEEDS_TABLE_FILE} has every seed's values.", soft_wrap=True)


def summarize_run(name: str, folder: Path) -> dict[str, Any]:
    """Summarize a finished run in one record."""
    header, summary = RunFolder(folder).read_header(), RunFolder(folder).read_summary()
    header_fields = ("engine", "device", "threads", "torch", "uefl", RESULTS_VERSION_KEY, "fingerprint", "experiment")
    summary_fields = ("rounds", "total_codewords", "validation_accuracy", "extensions", "seconds")
    domains = summary[DEFAULT_AGGREGATION]["domains"]
    return {
        "name": name,
        "run": folder.name,
        **{field: header[field] for field in header_fields},
        **{a: _select_means(summary[a]) for a in AGGREGATIONS},
        **{field: summary[field] for field in summary_fields},
        "own_models": summary.get("own_models", {}),
        "group_rounds": sum("groups" in record for record in RunFolder(folder).read_records()),
        "averaged rounds": len(summary[DEFAULT_AGGREGATION]["round"]),
        "domain accuracy": {domain: metrics["accuracy"] for domain, metrics in domains.items()},
    }


def _select_means(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the means over silos by label; a calibration error is left out where silos have too few examples."""
    metrics = (*TABLE_METRICS, *TWO_CLASS_METRICS, *QUALITY_METRICS)
    return {m.label: summary[m.label] for m in metrics if m.label in summary}


def _list_seed_metrics(records: Sequence[Mapping[str, Any]], aggregation: str) -> list[Metric]:
    """Return the metrics of the table of seeds: those of all tables, and those of two classes and quality, if known."""
    optional = (*TWO_CLASS_METRICS, *QUALITY_METRICS)
    common = [m for m in optional if all(m.label in record[aggregation] for record in records)]
    return [*TABLE_METRICS, *common]


class _Unit(NamedTuple):
    """How the difference of a metric is shown."""

    scale: float
    digits: int
    suffix: str


_COMPARED = {"mA": _Unit(100, 1, " points"), "mNLL": _Unit(1, 3, " (lower is better)")}


class SeedMeans(NamedTuple):
    """Means over seeds of every method."""

    rounds: str  # what the values are of, such as "last round"
    seeds: str
    metrics: list[Metric]
    values: dict[str, list[dict[str, float]]]  # by method: the values of each seed by label
    better_fedavg: str  # of two variants by validation
    without_codebook: set[str]  # methods

    @property
    def reference(self) -> str:
        """The method that all others are compared with: FedAvg, the better of two by validation, or the first one."""
        return self.better_fedavg or ("fedavg" if "fedavg" in self.values else next(iter(self.values)))

    def format_means(self, name: str) -> list[str]:
        """Format the mean ± standard error of every metric of a method."""
        return [
            "–"
            if metric.requires_codebook and name in self.without_codebook
            else format_mean_stderr([value[metric.label] for value in self.values[name]], metric.digits + 1)
            for metric in self.metrics
        ]

    def mark_name(self, name: str) -> str:
        """Return the name of a method, marked if it is the better of two FedAvgs."""
        return f"{name} (better by validation)" if name == self.better_fedavg else name


def summarize_seeds(records: Sequence[Mapping[str, Any]]) -> SeedMeans:
    """Collect what the tables of seeds show."""
    names = list(dict.fromkeys(record["name"] for record in records))
    runs = {name: [record for record in records if record["name"] == name] for name in names}
    aggregation = choose_aggregation(record["averaged rounds"] for record in records)
    return SeedMeans(
        rounds=describe_rounds([1] if aggregation == "last" else [record["averaged rounds"] for record in records]),
        seeds=", ".join(str(run["experiment"]["seed"]) for run in runs[names[0]]),
        metrics=_list_seed_metrics(records, aggregation),
        values={name: [run[aggregation] for run in runs[name]] for name in names},
        better_fedavg=_find_better_fedavg(runs),
        without_codebook={name for name in names if not any(run.get("total_codewords", 1) for run in runs[name])},
    )


def make_seed_table(found: SeedMeans) -> Table:
    """Make a table for the screen: a column per method, so that it fits a narrow one."""
    table = Table()
    table.add_column("", no_wrap=True)
    for name in found.values:
        table.add_column(escape(found.mark_name(name)), justify="right")
    columns = [found.format_means(name) for name in found.values]
    for metric, *cells in zip(found.metrics, *columns, strict=True):
        table.add_row(metric.label, *cells)
    return table


def format_seed_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Format means over seeds ± standard error, then the value of each seed, and mark the better of two FedAvgs."""
    found, per_seed = summarize_seeds(records), select_table_metrics(with_codebook=False)
    headings = [metric.label for metric in found.metrics]
    headings += [f"{metric.label}, seeds {found.seeds}" for metric in per_seed]
    rows = [f"| {found.rounds} | {' | '.join(headings)} |", "|---" * (1 + len(headings)) + "|"]
    for name, values in found.values.items():
        cells = found.format_means(name)
        cells += [" ".join(f"{value[m.label]:.{m.digits + 1}f}" for value in values) for m in per_seed]
        rows.append(f"| {found.mark_name(name)} | {' | '.join(cells)} |")
    return "\n".join([*rows, "", describe_labels(found.metrics)]) + "\n"


def describe_differences(found: SeedMeans) -> list[str]:
    """Describe how much every method differs from FedAvg, or from the first one without it, paired by seed.

    One seed has no interval, and a metric that is not finite has no difference.
    """
    reference = found.values[found.reference]
    if len(reference) < 2:
        return []
    lines = []
    for name, values in found.values.items():
        if name == found.reference:
            continue
        differences = [
            f"{label} {_format_paired_difference(label, values, reference)}"
            for label in _COMPARED
            if label in {metric.label for metric in found.metrics}
        ]
        lines.append(f"{name} minus {found.reference}, paired by seed, 95 % intervals: {', '.join(differences)}")
    return lines


def _format_paired_difference(
    label: str, values: Sequence[Mapping[str, float]], reference: Sequence[Mapping[str, float]]
) -> str:
    """Format the difference of a metric with its interval and unit."""
    unit = _COMPARED[label]
    ours, theirs = ([unit.scale * value[label] for value in by_seed] for by_seed in (values, reference))
    if not all(map(math.isfinite, (*ours, *theirs))):
        return "–"
    return format_difference(compare_pairs(ours, theirs), unit.digits) + unit.suffix


def describe_own_means(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Describe what training in groups and local fine-tuning changed, as means over seeds."""
    lines = []
    for name in dict.fromkeys(record["name"] for record in records):
        runs = [record for record in records if record["name"] == name]
        own = [run["own_models"] for run in runs if run.get("own_models")]
        steps = {
            "rounds in groups of alike silos": runs[0]["group_rounds"],
            "epochs of local fine-tuning": runs[0]["experiment"]["method"].get("fine_tuning_epochs", 0),
        }
        if own:
            listed = ", ".join(f"{unit}: {count}" for unit, count in steps.items() if count)
            nll, shared_nll = (mean_metric(own, key) for key in ("nll", "shared_nll"))
            lines.append(f"{name} ({listed}): after the last round, {describe_own_nll(nll, shared_nll)}")
    return lines


def _find_better_fedavg(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return the FedAvg variant with the higher validation accuracy, if both ran."""
    accuracy = {
        name: sum(run["validation_accuracy"] for run in runs[name]) / len(runs[name])
        for name in ("fedavg", FEDAVG_NO_LAYER_NORM)
        if name in runs
    }
    return max(accuracy, key=lambda name: accuracy[name]) if len(accuracy) == 2 else ""


def format_mean_stderr(values: Sequence[float], digits: int) -> str:
    """Format the mean ± standard error."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return f"{mean:.{digits}f}"
    error = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))
    return f"{mean:.{digits}f} ± {error:.{digits}f}"
