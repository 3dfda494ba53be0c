"""Which silos should get new codewords? Every value of `extend` with the preset `default`, on the data of the demo.

`python -m studies.receivers run` trains UEFL with each value on three data sets and ten seeds that no other study uses,
and appends records to results/receivers.jsonl. `python -m studies.receivers table` prints the table of docs/log.md.

The rule was fixed before the first run. A value's gain is the reduction of the validation NLL against `uncertain`, the
paper's value, in percent, averaged over the data sets for each seed. The default is the value with the largest mean
gain if the 95 % interval of its gain over seeds is above 0; otherwise the paper's value stays.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, get_args

import typer

from studies.demo import FOLDS
from studies.methods.runner import StudyResources, StudyRun, run_parallel
from uefl.algorithms.extensible_codebook import Extend
from uefl.core.paired_difference import Difference, compare_pairs
from uefl.experiment.parsing import parse_experiments
from uefl.experiment.records import read_records
from uefl.experiment.verdict import format_difference

RECORDS = Path("results/receivers.jsonl")
PAPER = "uncertain"
SEEDS = range(240, 250)
_FASTER = "evaluate_every=1000 evaluate_local=false"
_DIGITS = f"mnist5k validation_fraction=0.25 image_size=14 rounds=7 extra_rounds=5 epochs=1 schedule=cosine {_FASTER}"
DATA = {
    "nine silos": _DIGITS,
    "3, 1 and 1 silos": f"{_DIGITS} num_silos=3,1,1 train_per_silo=600 test_per_silo=400",
    "hospitals": f"heart validation_fraction=0.2 {_FASTER}",
}
Scores = Mapping[str, Sequence[float]]  # validation NLL by seed, by value of `extend`

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)


def list_runs() -> list[StudyRun]:
    """List the runs: every value on every data set with every seed, and in the hospitals every fold."""
    return [
        StudyRun(data, value, seed, make_experiment(f"{arguments} {repeat} extend={value} seed={seed}"))
        for data, arguments in DATA.items()
        for seed in SEEDS
        for value in get_args(Extend)
        for repeat in (FOLDS if data == "hospitals" else [""])
    ]


def make_experiment(arguments: str) -> Any:
    """Return the experiment of UEFL with the preset `default` and these arguments."""
    (experiment,) = parse_experiments(["uefl", *arguments.split()], [], "default").values()
    return experiment


def collect_scores(records: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Return the validation NLL by data set, value and seed; of folds, the mean."""
    found = defaultdict[tuple[str, str, int], list[float]](list)
    for record in records:
        found[record["setup"], record["method"], record["seed"]].append(record["validation_nll"])
    return {
        data: {value: [mean(found[data, value, seed]) for seed in SEEDS] for value in get_args(Extend)} for data in DATA
    }


def compute_gains(scores: Scores, value: str) -> list[float]:
    """Return the reduction of the NLL against the paper's value by seed, in percent of the latter's mean."""
    reference = mean(scores[PAPER])
    return [100 * (one - other) / reference for one, other in zip(scores[PAPER], scores[value])]


def average_gains(scores: Mapping[str, Scores], value: str) -> list[float]:
    """Return the gain of a value by seed, averaged over the data sets."""
    return [mean(gains) for gains in zip(*(compute_gains(of_data, value) for of_data in scores.values()))]


def compare_with_zero(gains: Sequence[float]) -> Difference:
    """Return the mean gain and its interval over seeds."""
    return compare_pairs(gains, [0.0] * len(gains))


def choose_default(scores: Mapping[str, Scores]) -> str:
    """Return the value that the rule makes the default."""
    others = [value for value in get_args(Extend) if value != PAPER]
    best = max(others, key=lambda value: mean(average_gains(scores, value)))
    return best if compare_with_zero(average_gains(scores, best)).low > 0 else PAPER


def render_table(scores: Mapping[str, Scores]) -> str:
    """Render the gains of all values on each data set and on average, and what the rule chooses."""
    head = ["`extend`", *(f"{data}: NLL" for data in scores), *(f"{data}: gain, %" for data in scores), "mean gain, %"]
    rows = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for value in get_args(Extend):
        levels = [f"{mean(of_data[value]):.4f}" for of_data in scores.values()]
        columns = [*(compute_gains(of_data, value) for of_data in scores.values()), average_gains(scores, value)]
        gains = ["" if value == PAPER else format_difference(compare_with_zero(c), 2) for c in columns]
        rows.append(f"| {' | '.join([value, *levels, *gains])} |")
    return "\n".join([*rows, "", f"By the rule, the default is `{choose_default(scores)}`."])


@app.command()
def run(
    out: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs/receivers"),
    workers: Annotated[int, typer.Option(help="Processes.")] = 1,
) -> None:
    """Run what has no record yet."""
    resources = StudyResources("cpu", "auto", out, time.time() + 1e6, workers)
    raise typer.Exit(1 if run_parallel(list_runs(), resources, RECORDS, typer.echo) else 0)


@app.command()
def table() -> None:
    """Print the table."""
    typer.echo(render_table(collect_scores(read_records(RECORDS))))


if __name__ == "__main__":
    app()
