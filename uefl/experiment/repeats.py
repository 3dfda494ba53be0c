"""Compare methods over seeds or folds: run them, pair their results, print one table and a verdict, draw the silos."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console

from uefl.core.metrics import QUALITY_METRICS, RISK_COVERAGES, TABLE_METRICS, mean_metric
from uefl.experiment.comparison import create_comparison_folder
from uefl.experiment.experiment import Experiment
from uefl.experiment.files import write_text
from uefl.experiment.parallel_runs import choose_workers, run_in_parallel
from uefl.experiment.parsing import parse_experiments
from uefl.experiment.records import Record
from uefl.experiment.repeats_progress import RepeatsProgress
from uefl.experiment.repeats_table import describe_metrics, format_repeats_table, make_repeats_table
from uefl.experiment.run_folder import RunFolder
from uefl.experiment.verdict import describe_uncertain_silos, describe_verdict

METHOD = "uefl"  # the row that is compared with the others
REPEATS_FILE, VERDICT_FILE = "repeats.jsonl", "verdict.md"


class Comparison(NamedTuple):
    """Methods with their settings as `uefl run` accepts them, and the seeds or folds that all of them run."""

    title: str
    arguments: Mapping[str, str]  # by name of the row
    repeats: Sequence[str]  # settings of each repeat: "seed=0", or "fold=1/5"
    unit: str  # what the repeats are: seeds or folds
    test_to_train: float = 0.0  # of folds: test examples per training example

    def make_experiments(self) -> dict[tuple[str, str], Experiment]:
        """Return the experiments by row and repeat; long runs come first, so that no core waits at the end."""
        return {
            (name, repeat): next(iter(parse_experiments([*text.split(), *repeat.split()], [], "default").values()))
            for name, text in reversed(list(self.arguments.items()))
            for repeat in self.repeats
        }


def compare_repeats(comparison: Comparison, out: Path, workers: int, console: Console) -> None:
    """Run every method with every repeat; print the table and the verdict, and save them with the figure."""
    console.print(f"\n{comparison.title}", style="bold", soft_wrap=True)
    folders = run_repeats(comparison, out, workers, console)
    records = [
        summarize_repeat(*key, folders[key]) for name in comparison.arguments for key in folders if key[0] == name
    ]
    sentences = [
        describe_verdict(records, METHOD, comparison.unit, comparison.test_to_train),
        describe_uncertain_silos(records, METHOD, comparison.unit),
    ]
    console.print(make_repeats_table(records, METHOD, comparison.test_to_train))
    console.print(describe_metrics(), soft_wrap=True)
    for sentence, style in zip(sentences, ("bold", "")):
        console.print(sentence, style=style, soft_wrap=True, markup=False)
    folder = create_comparison_folder({str(key): path for key, path in folders.items()}, out)
    figure, records_path = folder / RunFolder.SILOS_FIGURE_FILE, folder / REPEATS_FILE
    _draw_silos(comparison, folders, figure)
    write_text(records_path, "".join(json.dumps(record) + "\n" for record in records))
    write_text(folder / VERDICT_FILE, _format_verdict(comparison, records, sentences))
    console.print(f"picture: {figure}\nrecords: {records_path}", soft_wrap=True, markup=False)


def _format_verdict(comparison: Comparison, records: Sequence[Record], sentences: Sequence[str]) -> str:
    """Format table and sentences in Markdown, with the commands of the first runs."""
    commands = "\n".join(f"uefl run {text} {comparison.repeats[0]}" for text in comparison.arguments.values())
    table = format_repeats_table(records, METHOD, comparison.test_to_train)
    return "\n\n".join([f"# {comparison.title}", table, *sentences, f"First runs:\n\n```\n{commands}\n```\n"])


def run_repeats(comparison: Comparison, out: Path, workers: int, console: Console) -> dict[tuple[str, str], Path]:
    """Run all experiments, one process per core; return their folders by row and repeat."""
    experiments = comparison.make_experiments()
    labels = {f"{name}, {repeat}": (name, repeat) for name, repeat in experiments}
    torch.set_num_threads(1)
    with RepeatsProgress(console, experiments) as progress:
        paths = run_in_parallel(
            {label: experiments[key] for label, key in labels.items()},
            out,
            workers=choose_workers(workers, len(experiments), "cpu"),
            on_event=lambda label, event: progress.on_event(labels[label], event),
        )
    return {key: paths[label] for label, key in labels.items()}


def summarize_repeat(name: str, repeat: str, folder: Path) -> Record:
    """Return what tables and sentences need of a finished run: means over silos in its last round."""
    run = RunFolder(folder)
    header, summary = run.read_header(), run.read_summary()
    last, extensions = summary["last"], summary["extensions"]
    last_round = run.read_records()[-1]
    validation = [silo["validation"] for silo in last_round["silos"].values() if "validation" in silo]
    return {
        "name": name,
        "repeat": repeat,
        **{metric.name: last[metric.label] for metric in (*TABLE_METRICS, *QUALITY_METRICS) if metric.label in last},
        "nll_scaled": mean_metric(last["silos"].values(), "nll_scaled"),
        "all_silos": last["all_silos"],
        "reliability": last_round["reliability"],
        "validation_nll": mean_metric(validation, "nll"),
        "silos": {n: {"nll": silo["nll"], "accuracy": silo["accuracy"]} for n, silo in last["silos"].items()},
        "decision": _summarize_decision(extensions[-1]) if extensions else {},
        "run": folder.name,
        **{k: header[k] for k in ("engine", "torch", "processor", "uefl", "results_version") if k in header},
    }


def _summarize_decision(extension: Record) -> Record:
    decision = extension["decision"]
    silos = {name: {"entropy": silo["entropy"]} for name, silo in decision.get("silos", {}).items()}
    fields = {key: decision.get(key) for key in ("test", "threshold")}
    return {**fields, "silos": silos, "uncertain_silos": extension["uncertain_silos"]}


def _draw_silos(comparison: Comparison, folders: Mapping[tuple[str, str], Path], figure: Path) -> None:
    from uefl.experiment.figures import plot_silos  # matplotlib is slow to import, and only needed here

    runs = {
        name: merge_repeats([RunFolder(folders[name, repeat]).read_records() for repeat in comparison.repeats])
        for name in comparison.arguments
    }
    parts = (
        f"accuracy, reliability and risk of {len(comparison.repeats)} {comparison.unit}, decision of "
        f"{comparison.repeats[0]}"
    )
    plot_silos(runs, figure, title=f"{comparison.title} ({parts})")


def merge_repeats(repeats: Sequence[Sequence[Record]]) -> list[Record]:
    """Return the records of the first repeat; the last one has means, and the reliability, of all repeats."""
    last = [records[-1] for records in repeats]
    silos = {
        name: {**silo, "accuracy": mean_metric([record["silos"][name] for record in last], "accuracy")}
        for name, silo in last[0]["silos"].items()
    }
    risks = {
        name: mean_metric([record["all_silos"] for record in last], name)
        for name in (f"risk_at_{p}" for p in RISK_COVERAGES)
    }
    sums = [[sum(bins) for bins in zip(*rows)] for rows in zip(*(record["reliability"] for record in last))]
    return [*repeats[0][:-1], {**last[0], "silos": silos, "all_silos": risks, "reliability": sums}]
