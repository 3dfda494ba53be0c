"""Which silos should get new codewords? Every value of `extend` with the preset `default`, on the data of the demo.

`python -m studies.receivers run` trains UEFL with each value on three data sets and ten seeds that no other study uses,
and appends records to results/receivers.jsonl. `python -m studies.receivers table` prints the table of docs/log.md.

The rule was fixed before the first run. A value's gain is the reduction of the validation NLL against `uncertain`, the
paper's value, in percent, averaged over the data sets for each seed. The default is the value with the largest mean
gain if the 95 % interval of its gain over seeds is above 0; otherwise the paper's value stays.

Folds of the hospitals share patients, so the interval of their column has the corrected variance of Nadeau and Bengio.
The rule's own interval does not: it is that of a plain t over seeds, as it was fixed.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, get_args

import typer

from studies.demo_trials import FOLDS
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
Scores = Mapping[str, Sequence[float]]  # validation NLL of every run, seed after seed, by value of `extend`
TEST_TO_TRAIN = 1 / (len(FOLDS) - 1)  # of folds

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


def collect_scores(records: Sequence[Mapping[str, Any]], metric: str = "validation_nll") -> dict[str, Scores]:
    """Return the validation NLL by data set and value, of every seed or of every fold of every seed."""
    found = defaultdict[tuple[str, str], list[tuple[tuple[int, str], float]]](list)
    for record in records:
        key = (record["seed"], record["settings"].get("data.fold", ""))
        found[record["setup"], record["method"]].append((key, record[metric]))
    return {
        data: {value: [score for _, score in sorted(found[data, value])] for value in get_args(Extend)} for data in DATA
    }


def average_seeds(values: Sequence[float], num_runs: int) -> list[float]:
    """Return the mean of every seed, of which each has so many runs."""
    return [mean(values[i : i + num_runs]) for i in range(0, len(values), num_runs)]


def compute_gains(scores: Scores, value: str) -> list[float]:
    """Return the reduction of the NLL against the paper's value in every run, in percent of the latter's mean."""
    reference = mean(scores[PAPER])
    return [100 * (one - other) / reference for one, other in zip(scores[PAPER], scores[value])]


def average_gains(scores: Mapping[str, Scores], value: str) -> list[float]:
    """Return the gain of a value by seed, averaged over the data sets."""
    of_data = (average_seeds(compute_gains(s, value), count_folds(data)) for data, s in scores.items())
    return [mean(gains) for gains in zip(*of_data, strict=True)]


def count_folds(data: str) -> int:
    """Return how many runs a seed has on a data set."""
    return len(FOLDS) if data == "hospitals" else 1


def compare_with_zero(gains: Sequence[float], test_to_train: float = 0.0) -> Difference:
    """Return the mean gain and its interval over seeds, or over folds."""
    return compare_pairs(gains, [0.0] * len(gains), test_to_train)


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
        gains = ["" if value == PAPER else format_difference(d, 2) for d in compare_value(scores, value)]
        rows.append(f"| {' | '.join([value, *levels, *gains])} |")
    return "\n".join([*rows, "", f"By the rule, the default is `{choose_default(scores)}`."])


def compare_value(scores: Mapping[str, Scores], value: str) -> list[Difference]:
    """Return the gain of a value on each data set, and averaged over them."""
    gains = {data: compute_gains(of_data, value) for data, of_data in scores.items()}
    differences = [compare_with_zero(g, TEST_TO_TRAIN if count_folds(data) > 1 else 0.0) for data, g in gains.items()]
    return [*differences, compare_with_zero(average_gains(scores, value))]


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
