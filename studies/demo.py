"""The trials behind the settings of `uefl demo`, and the table over seeds in the README.

`python -m studies.demo trials` runs the trials and appends records to results/demo-trials.jsonl. They are compared by
validation NLL alone; `python -m studies.demo table` prints the table of docs/log.md. `python -m studies.demo run` runs
both comparisons of the demo with fresh seeds and writes results/demo.jsonl. `python -m studies.demo page` writes the
table of the README from it; no run is needed for that.
"""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import typer
from rich.console import Console

from studies.demo_trials import FOLDS, TRIAL_SEEDS, TRIALS
from studies.methods.runner import StudyResources, StudyRun, run_parallel
from uefl.experiment.demo_comparisons import COMPARISONS, NUM_FOLDS
from uefl.experiment.files import write_text
from uefl.experiment.parsing import parse_experiments
from uefl.experiment.records import read_records
from uefl.experiment.repeats import METHOD, Comparison, run_repeats, summarize_repeat
from uefl.experiment.repeats_table import format_repeats_table
from uefl.experiment.verdict import describe_uncertain_silos, describe_verdict

README, TRIALS_FILE, RECORDS_FILE = Path("README.md"), Path("results/demo-trials.jsonl"), Path("results/demo.jsonl")
BLOCK = re.compile(r"(<!-- python -m studies\.demo page -->\n).*?(\n<!-- end -->)", re.S)
SEEDS = tuple(range(280, 290))  # fresh: no setting was chosen with them

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
WorkersOption = Annotated[int, typer.Option(help="Processes.")]


# --- trials -----------------------------------------------------------------------------------------------------------


def list_trials() -> list[StudyRun]:
    """List the runs of all trials: every seed, and of the hospitals every fold."""
    return [
        StudyRun(data, label, seed, make_experiment(f"{arguments} {repeat} seed={seed}"))
        for data, trials in TRIALS.items()
        for seed in TRIAL_SEEDS
        for label, arguments in trials.items()
        for repeat in (FOLDS if data.startswith("hospitals") else [""])
    ]


def make_experiment(arguments: str) -> Any:
    """Return the experiment of some arguments of `uefl run`.

    As in the records, UEFL fine-tunes, and trains in groups, only where they name it.
    """
    for name in ("fine_tuning_epochs", "group_rounds") if arguments.startswith("uefl ") else ():
        if f"{name}=" not in arguments:
            arguments += f" {name}=0"
    (experiment,) = parse_experiments(arguments.split(), [], "default").values()
    return experiment


def render_trials(records: list[dict[str, Any]]) -> str:
    """Render the mean validation NLL of every trial, the best of a data set first."""
    scores = defaultdict[tuple[str, str], list[float]](list)
    for record in records:
        scores[record["setup"], record["method"]].append(record["validation_nll"])
    rows = ["| data | settings | validation NLL | runs |", "|---|---|---|---|"]
    for (data, label), values in sorted(scores.items(), key=lambda item: (item[0][0], mean(item[1]))):
        rows.append(f"| {data} | {label} | {mean(values):.4f} | {len(values)} |")
    return "\n".join(rows)


@app.command()
def trials(out: Path = Path("runs/demo-trials"), workers: WorkersOption = 1) -> None:
    """Run the trials that have no record yet."""
    left = run_parallel(
        list_trials(), StudyResources("cpu", "auto", out, time.time() + 1e6, workers), TRIALS_FILE, typer.echo
    )
    raise typer.Exit(1 if left else 0)


@app.command()
def table() -> None:
    """Print the table of the trials."""
    typer.echo(render_trials(read_records(TRIALS_FILE)))


# --- the README -------------------------------------------------------------------------------------------------------


def add_seeds(comparison: Comparison) -> Comparison:
    """Return a comparison of the demo with the fresh seeds; every fold runs with each of them."""
    folds = [repeat for repeat in comparison.repeats if repeat.startswith("fold=")]
    repeats = [f"seed={seed} {fold}".strip() for seed in SEEDS for fold in folds or [""]]
    return comparison._replace(repeats=repeats)


@app.command()
def run(out: Path = Path("runs/demo-seeds"), workers: WorkersOption = 1) -> None:
    """Run both comparisons with the fresh seeds; a finished run is found again."""
    lines = []
    for data, comparison in COMPARISONS.items():
        folders = run_repeats(add_seeds(comparison), out, workers, Console())
        for (name, repeat), folder in folders.items():
            record = {"data": data, "arguments": f"{comparison.arguments[name]} {repeat}"}
            lines.append(json.dumps({**record, **summarize_repeat(name, repeat, folder)}))
    write_text(RECORDS_FILE, "\n".join(lines) + "\n")


def render_block(records: list[dict[str, Any]]) -> str:
    """Render what the README says about several seeds: per data set a table and the verdict."""
    parts = []
    for data, comparison in COMPARISONS.items():
        runs = [r for name in comparison.arguments for r in records if (r["data"], r["name"]) == (data, name)]
        folds = f" × {NUM_FOLDS} folds" if comparison.test_to_train else ""
        parts += [
            f"*{comparison.title}*; means ± standard deviation over {len(SEEDS)} seeds{folds}:\n",
            format_repeats_table(runs, METHOD, comparison.test_to_train) + "\n",
            describe_verdict(runs, METHOD, comparison.unit, comparison.test_to_train),
            describe_uncertain_silos(runs, METHOD, comparison.unit) + "\n",
        ]
    return "\n".join(parts).rstrip()


@app.command()
def page() -> None:
    """Write the table over seeds into the README."""
    block = render_block(read_records(RECORDS_FILE))
    write_text(README, BLOCK.sub(lambda match: match[1] + block + match[2], README.read_text()))


if __name__ == "__main__":
    app()
