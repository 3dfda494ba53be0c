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
TRIAL_SEEDS = (30, 31)
SEEDS = (80, 81, 82)  # fresh: no setting was chosen with them
FOLDS = [f"fold={i}/{NUM_FOLDS}" for i in range(1, NUM_FOLDS + 1)]

_FASTER = "evaluate_every=1000 evaluate_local=false"
_HEART = f"heart validation_fraction=0.2 {_FASTER}"
_EARLIER = "codeword_gradient=code gate=none gate_value=0.75"  # the codebook before these trials
_RIDGE = "encoder=identity hidden_size=0 dropout=0 feature_norm=none local.lr=0.03 logit_adjustment=local"
_LINEAR = "encoder=identity hidden_size=0 feature_norm=none optimizer=adam local.lr=0.03 logit_adjustment=local"
_FIXED_GATE = "num_codewords=16 segments=1 gate=fixed gate_value=0.1 fine_tuning_epochs=5"
_DROPOUT = "dropout=0.5 weight_decay=0.1 logit_adjustment=local"
_DIGITS = f"mnist5k num_silos=3,1,1 test_per_silo=400 validation_fraction=0.25 iterations=2 {_FASTER}"
_IMAGES_600, _SHORT = "train_per_silo=600", "image_size=14 rounds=10 extra_rounds=8 epochs=1"
_CHOSEN_DIGITS = f"{_DIGITS} {_IMAGES_600} image_size=14 rounds=7 extra_rounds=5 epochs=1 schedule=cosine"
_BY_RULE = "num_codewords=0 segments=0"
_TASK = f"{_BY_RULE} codeword_gradient=task commitment_weight=0.05"
_GATE = f"{_TASK} gate=learned gate_value=0.5"
_LOW_GATE = f"{_TASK} gate=learned gate_value=0.25"
_CODEBOOKS = {
    "four segments, no gate": f"num_codewords=256 segments=4 commitment_weight=0.01 {_EARLIER}",
    "size by rule, no gate": f"{_BY_RULE} commitment_weight=0.01 {_EARLIER}",
    "size by rule, no gate, task gradient": f"{_TASK} gate=none gate_value=0.75",
    "gate from .5": _GATE,
    "gate from .9": f"{_TASK} gate=learned gate_value=0.9",
    "gate from .5, no layer norm": f"{_GATE} feature_norm=none",
    "gate from .5, own batch norm": f"{_GATE} batch_norm=personal",
    "gate from .5, 5 epochs": f"{_GATE} fine_tuning_epochs=5",
    "gate from .5, own batch norm, 5 epochs": f"{_GATE} batch_norm=personal fine_tuning_epochs=5",
    "gate from .25, 5 epochs": f"{_LOW_GATE} fine_tuning_epochs=5",
    "gate from .25, own batch norm, 5 epochs": f"{_LOW_GATE} batch_norm=personal fine_tuning_epochs=5",
    "gate from .25": _LOW_GATE,
    "gate from .1": f"{_TASK} gate=learned gate_value=0.1",
    "gate from .1, 5 epochs": f"{_TASK} gate=learned gate_value=0.1 fine_tuning_epochs=5",
    "fixed gate .1, 5 epochs": f"{_TASK} gate=fixed gate_value=0.1 fine_tuning_epochs=5",
    "fixed gate .25, 5 epochs": f"{_TASK} gate=fixed gate_value=0.25 fine_tuning_epochs=5",
    "gate from .25, own batch norm, 10 epochs": f"{_LOW_GATE} batch_norm=personal fine_tuning_epochs=10",
    "gate from .5, codewords for all": f"{_GATE} extend=all",
    "gate from .5, no own codewords": f"{_GATE} extend=none",
}


_GROUP_RULES = {"in groups by halves": "halves", "in groups": "spacing"}


def replace_rounds(arguments: str, alike_rule: str) -> str:
    """Return arguments with rounds in groups of alike silos in place of the last third of the rounds."""
    if "heart" in arguments:
        return f"{arguments} group_rounds=5 alike_rule={alike_rule}"
    groups = f"rounds=5 extra_rounds=7 group_rounds=4 alike_rule={alike_rule}"
    return arguments.replace("rounds=7 extra_rounds=5", groups)


TRIALS = {
    "hospitals": {
        **{
            f"logistic regression alone, ridge {r}": f"local-only {_HEART} {_RIDGE} weight_decay={r}"
            for r in (1, 3, 10)
        },
        "FedAvg, dropout .1, no logit adjustment": f"fedavg {_HEART} dropout=0.1 logit_adjustment=none",
        "FedAvg, dropout .5": f"fedavg {_HEART} {_DROPOUT}",
        "FedAvg, dropout .5, no layer norm": f"fedavg {_HEART} {_DROPOUT} feature_norm=none",
        "UEFL, dropout .5, no gate": f"uefl {_HEART} {_DROPOUT} num_codewords=16 segments=4 {_EARLIER}",
        **{
            f"UEFL, dropout .5, gate from {value:g}, fine-tuned": (
                f"uefl {_HEART} {_DROPOUT} gate_value={value} fine_tuning_epochs=5"
            )
            for value in (0.25, 0.5, 0.75)
        },
        **{
            f"UEFL, dropout .5, gate from {value:g}": f"uefl {_HEART} {_DROPOUT} gate_value={value}"
            for value in (0.1, 0.25, 0.5)
        },
        "FedAvg, dropout .5, fine-tuned": f"fine-tuning {_HEART} {_DROPOUT} fine_tuning_epochs=5",
        **{
            f"logistic regression alone, L2 {w:g}": f"local-only {_HEART} {_LINEAR} dropout=0 weight_decay={w}"
            for w in (0.01, 0.03, 0.1)
        },
        **{
            f"{label}, L2 {w:g}": f"{settings.replace(' ', f' {_HEART} {_LINEAR} ', 1)} weight_decay={w}"
            for label, settings in {
                "FedAvg of logistic regression": "fedavg dropout=0",
                "FedAvg of logistic regression, fine-tuned": "fine-tuning dropout=0 fine_tuning_epochs=5",
                "FedAvg of logistic regression, dropout .1, fine-tuned": "fine-tuning dropout=0.1 fine_tuning_epochs=5",
                "UEFL, linear, fixed gate .1, no dropout, fine-tuned": f"uefl dropout=0 {_FIXED_GATE}",
                "UEFL, linear, fixed gate .1, dropout .1, fine-tuned": f"uefl dropout=0.1 {_FIXED_GATE}",
                "UEFL, linear, fixed gate .1, dropout .1, in groups, fine-tuned": (
                    f"uefl dropout=0.1 {_FIXED_GATE} group_rounds=5 alike_rule=spacing"
                ),
            }.items()
            for w in (0.003, 0.01, 0.03)
        },
    },
    "digits": {
        f"FedAvg, {label}": f"fedavg {_DIGITS} {settings}"
        for label, settings in {
            "600 images, 6 rounds of 3 epochs": f"{_IMAGES_600} image_size=14 rounds=4 extra_rounds=2 epochs=3",
            "600 images, 9 rounds of 2 epochs": f"{_IMAGES_600} image_size=14 rounds=5 extra_rounds=4 epochs=2",
            "600 images, 18 rounds of 1 epoch": f"{_IMAGES_600} {_SHORT}",
            "600 images, 9 rounds of 2 epochs, cosine": (
                f"{_IMAGES_600} image_size=14 rounds=5 extra_rounds=4 epochs=2 schedule=cosine"
            ),
            "600 images, 18 rounds of 1 epoch, cosine": f"{_IMAGES_600} {_SHORT} schedule=cosine",
            "600 images of 28 pixels, width 8, 6 rounds of 2 epochs": (
                f"{_IMAGES_600} width=8 rounds=4 extra_rounds=2 epochs=2"
            ),
        }.items()
    },
    "digits, less time": {
        "FedAvg, 400 images, 18 rounds of 1 epoch, cosine": (
            f"fedavg {_DIGITS} train_per_silo=400 {_SHORT} schedule=cosine"
        ),
        "FedAvg, 600 images, 12 rounds of 1 epoch, cosine": (
            f"fedavg {_DIGITS} {_IMAGES_600} image_size=14 rounds=7 extra_rounds=5 epochs=1 schedule=cosine"
        ),
    },
    "digits, codebook": {
        **{f"UEFL, {label}": f"uefl {_CHOSEN_DIGITS} {settings}" for label, settings in _CODEBOOKS.items()},
        **{
            f"UEFL, gate from {gate:g}, {label}, {e} epochs": (
                f"uefl {replace_rounds(_CHOSEN_DIGITS, rule)} {_TASK} gate=learned gate_value={gate} "
                f"fine_tuning_epochs={e}"
            )
            for label, rule in _GROUP_RULES.items()
            for gate in (0.1, 0.25)
            for e in (5, 10)
        },
        "FedAvg, fine-tuned": f"fine-tuning {_CHOSEN_DIGITS} fine_tuning_epochs=5",
        "FedAvg, fine-tuned, 10 epochs": f"fine-tuning {_CHOSEN_DIGITS} fine_tuning_epochs=10",
        "FedAvg, no layer norm": f"fedavg {_CHOSEN_DIGITS} feature_norm=none",
        "FedBN": f"fedbn {_CHOSEN_DIGITS}",
        "FedBN, fine-tuned": f"fine-tuning {_CHOSEN_DIGITS} batch_norm=personal fine_tuning_epochs=5",
    },
    # The preset itself: epochs of fine-tuning, who gets codewords, own batch norm, groups.
    **{
        f"{data}, preset": {
            "FedAvg": f"fedavg {arguments}",
            **{f"FedAvg, epochs: {e}": f"fine-tuning {arguments} fine_tuning_epochs={e}" for e in (1, 2, 5)},
            **{f"UEFL, epochs: {e}": f"uefl {arguments} fine_tuning_epochs={e}" for e in (0, 1, 2, 3, 5)},
            **{
                f"UEFL, epochs: 5, extend={value}": f"uefl {arguments} fine_tuning_epochs=5 extend={value}"
                for value in ("none", "random", "all", "validated")
            },
            "UEFL, own batch norm": f"uefl {arguments} batch_norm=personal fine_tuning_epochs=0",
            "UEFL, own batch norm, epochs: 2": f"uefl {arguments} batch_norm=personal fine_tuning_epochs=2",
            **{
                f"UEFL, {label}, epochs: {e}": f"uefl {replace_rounds(arguments, rule)} fine_tuning_epochs={e}"
                for label, rule in _GROUP_RULES.items()
                for e in (0, 2, 5)
            },
        }
        for data, arguments in {
            "nine silos": _CHOSEN_DIGITS.replace("num_silos=3,1,1 test_per_silo=400", "").replace(_IMAGES_600, ""),
            "3, 1 and 1 silos": _CHOSEN_DIGITS,
            "hospitals": f"heart validation_fraction=0.2 {_FASTER}",
        }.items()
    },
}

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
