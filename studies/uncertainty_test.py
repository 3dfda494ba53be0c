"""Measure the test of uncertain silos: how often it reports a silo by chance, and how often it finds a minority.

`python -m studies.uncertainty_test chance` trains one network with dropout on the embedded digits and divides held-out
digits at random into nine silos, 400 times: no silo is more uncertain, so every report is false. At level 0.05 at most
29 of 400 federations may have one (20 expected, two standard errors).
`python -m studies.uncertainty_test federations` trains 400 federations whose data have one distribution, each with the
preset `default` up to its last decision, and counts those with a report: patients of four hospitals, or with `--data
digits` digits of nine silos, are divided at random among silos of the same sizes.
`python -m studies.uncertainty_test minority` trains UEFL up to its first decision on five silos, three of them upright
and two rotated by other angles each, once per seed: a run counts if a silo of a minority is reported. The
aim is at least 80 % of runs. All append a record with the command to results/uncertainty-test.jsonl.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track
from scipy.stats import beta
from torch import Tensor

from uefl import __version__
from uefl.algorithms.extensible_codebook import ExtensibleCodebook
from uefl.algorithms.fedavg import FedAvg
from uefl.algorithms.uncertainty_report import report_by_permutation
from uefl.core.federation import SPLITS, Batch, ClientModel, Examples, Silo, Tensors
from uefl.core.local import LocalTraining
from uefl.core.metrics import CODEWORD_COUNTS, compute_metric_sums
from uefl.core.noise import derive_key, permutation, salt_noise_layers, set_noise_key, uniform
from uefl.data.config import DataConfig
from uefl.engines.serial import SerialEngine
from uefl.experiment.experiment import Experiment
from uefl.experiment.parsing import parse_experiments, parse_seeds
from uefl.experiment.records import append_records, list_uncertain_silos
from uefl.experiment.rounds import iterate_rounds
from uefl.models.model_config import ModelConfig

RECORDS = Path("results/uncertainty-test.jsonl")
NUM_FEDERATIONS, NUM_SILOS, SMALLEST, LARGEST, MAX_REPORTS = 400, 9, 100, 400, 29
NUM_HELD_OUT, NUM_TRAIN, MC_SAMPLES = 3600, 1000, 20
MINORITY_SETTINGS = [
    "num_silos=3,1,1",
    "shifts=none,rotate:-50,rotate:120",
    "train_per_silo=800",
    "test_per_silo=100",
    "validation_fraction=0.25",
    "rounds=5",
    "epochs=2",
]
FEDERATION_SETTINGS = {
    "hospitals": ["heart"],
    "digits": [
        "num_silos=9",
        "shifts=none",
        "train_per_silo=400",
        "test_per_silo=100",
        "validation_fraction=0.25",
        "image_size=14",
        "rounds=6",
        "epochs=2",
    ],
}
MAJORITY = "D1"  # the name of the first domain begins the names of its silos

app = typer.Typer(add_completion=False, help=__doc__)


def train_once(seed: int = 0, num_train: int = NUM_TRAIN, rounds: int = 8) -> tuple[ClientModel, Tensor, Tensor]:
    """Train one network with dropout on some digits; return it with held-out digits and their labels."""
    data = DataConfig(num_silos=(1,), shifts=("none",), train_per_silo=num_train, test_per_silo=NUM_HELD_OUT)
    silos, images = data.load(seed)
    method = FedAvg(rounds=rounds, iterations=1, local=LocalTraining(lr=2e-3, batch_size=64, epochs=2), mc_samples=1)
    model = ModelConfig(width=16, hidden_size=128)
    experiment = Experiment(method=method, data=data, model=model, seed=seed)
    net = experiment.build_network(tuple(silos[0].test.x.shape[1:]), len(images.classes))
    x, y = silos[0].test
    short = [replace(silos[0], test=Examples(x[:50], y[:50]))]  # metrics of the rounds are not used
    *_, server = iterate_rounds(method, SerialEngine(short, net, seed=seed))
    net.load_state_dict(server.model_state)
    return ClientModel(net.eval(), dict(net.named_parameters())), x, y


def compute_example_sums(model: ClientModel, x: Tensor, y: Tensor) -> list[Tensors]:
    """Return the metric sums of every example by itself, so that those of any silo are their sum."""
    sums, noise_layers = [], salt_noise_layers(model.net)
    with torch.no_grad():
        for i in range(len(y)):
            set_noise_key(noise_layers, derive_key("dropout of example", i))
            sums.append(compute_metric_sums(model, Batch(x[i : i + 1], y[i : i + 1]), MC_SAMPLES))
    return sums


def draw_silos(seed: int, num_examples: int) -> list[Tensor]:
    """Draw nine silos of different sizes from the examples, without replacement."""
    order = permutation(derive_key(seed, "order of examples"), num_examples)
    sizes = SMALLEST + (uniform(derive_key(seed, "sizes of silos"), (NUM_SILOS,)) * (LARGEST - SMALLEST)).long()
    return list(torch.split(order[: int(sizes.sum())], sizes.tolist()))


def list_false_reports(sums: list[Tensors], num_federations: int) -> list[dict[str, Any]]:
    """Return the federations in which a silo is reported, with the silos and their p-values."""
    stacked = {name: torch.stack([s[name] for s in sums]) for name in sums[0] if name != CODEWORD_COUNTS}
    stacked[CODEWORD_COUNTS] = torch.zeros(len(sums), 1, 0)
    codebook, reports = ExtensibleCodebook(), []
    for seed in range(num_federations):
        silos = {
            f"silo {k}": {name: values[indices].sum(0) for name, values in stacked.items()}
            for k, indices in enumerate(draw_silos(seed, len(sums)))
        }
        report = report_by_permutation(codebook, silos, derive_key(seed, "permutations"), num_decisions=1)
        if report.uncertain_silos:
            p_values = {name: report.entries["silos"][name]["p_value"] for name in report.uncertain_silos}
            reports.append({"federation": seed, "p_values": p_values})
    return reports


def compute_interval(count: int, total: int) -> tuple[float, float]:
    """Return the interval of Clopper and Pearson (95 %) of a share."""
    low = float(beta.ppf(0.025, count, total - count + 1)) if count else 0.0
    return low, float(beta.ppf(0.975, count + 1, total - count)) if count < total else 1.0


def find_minority(seed: int, device: str, settings: list[str]) -> dict[str, Any]:
    """Train up to the first decision; return which silos it reports and what it is based on."""
    experiment = parse_run([*settings, "group_rounds=0"], seed)
    silos, images = experiment.data.load(seed)
    (record,) = run_to_decisions(experiment, silos, len(images.classes), experiment.method.rounds, device)
    return {"seed": seed, "reported": list_uncertain_silos(record), "decision": record["decision"]}


def parse_run(settings: Sequence[str], seed: int) -> Experiment:
    """Return a run of UEFL with the preset `default` and these settings."""
    (experiment,) = parse_experiments(["uefl", *settings, f"seed={seed}"], (), "default").values()
    return experiment


def run_to_decisions(
    experiment: Experiment, silos: Sequence[Silo], num_classes: int, num_rounds: int, device: str = "cpu"
) -> list[dict[str, Any]]:
    """Train for some rounds and return the records that have a decision."""
    method, records = experiment.method, list[dict[str, Any]]()
    net = experiment.build_network(tuple(silos[0].test.x.shape[1:]), num_classes)
    clients = SerialEngine(method.prepare_silos(silos), net, seed=experiment.seed, device=device)
    for server in iterate_rounds(method, clients, num_rounds=num_rounds):
        records += [r for r in server.completed_records if r.get("has_decision")]
    return records


def list_federation_reports(data: str, seed: int) -> tuple[list[str], int]:
    """Train a federation of one distribution; return the silos that any decision reports, and how many decisions."""
    experiment = parse_run([*FEDERATION_SETTINGS[data], "evaluate_every=1000", "evaluate_local=false"], seed)
    silos, images = experiment.data.load(seed)
    method = experiment.method
    ends = [method.rounds + i * method.extra_rounds for i in range(method.iterations)]
    num_rounds = max(end for end in ends if end < method.shared_rounds)
    decisions = run_to_decisions(experiment, divide_at_random(silos, seed), len(images.classes), num_rounds)
    return sorted({name for record in decisions for name in list_uncertain_silos(record)}), len(decisions)


def divide_at_random(silos: Sequence[Silo], seed: int) -> list[Silo]:
    """Divide the examples of all silos at random among silos of the same sizes."""
    parts = [silo.examples(split) for silo in silos for split in SPLITS]
    x, y = torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts])
    order = permutation(derive_key(seed, "examples of silos"), len(y))
    drawn = iter([Examples(x[i], y[i]) for i in torch.split(order, [len(part.y) for part in parts])])
    changes: list[dict[str, Any]] = [{split: next(drawn) for split in SPLITS} for _ in silos]
    return [replace(silo, **own) for silo, own in zip(silos, changes)]


def write_record(out: Path, record: dict[str, Any]) -> None:
    """Append a record with the command and the versions that made it."""
    command = shlex.join(["python", "-m", "studies.uncertainty_test", *sys.argv[1:]])
    append_records(out, [{"command": command, "uefl": __version__, "torch": torch.__version__, **record}])


@app.command()
def chance(
    federations: Annotated[int, typer.Option(help="Federations of one distribution.")] = NUM_FEDERATIONS,
    out: Annotated[Path, typer.Option(help="File of records.")] = RECORDS,
) -> None:
    """Count the federations of one distribution in which some silo is reported."""
    sums = compute_example_sums(*train_once())
    accuracy = sum(float(s["correct"]) for s in sums) / len(sums)
    reports = list_false_reports(sums, federations)
    interval = compute_interval(len(reports), federations)
    record = {"part": "chance", "federations": federations, "reports": len(reports), "interval": interval}
    write_record(out, {**record, "accuracy": accuracy, "federations with a report": reports})
    typer.echo(f"{len(reports)} of {federations} federations have a report, 95 % interval {interval}")
    if federations == NUM_FEDERATIONS and len(reports) > MAX_REPORTS:
        raise typer.Exit(1)


@app.command()
def federations(
    data: Annotated[str, typer.Option(help="hospitals or digits.")] = "hospitals",
    runs: Annotated[int, typer.Option(help="Federations of one distribution.")] = NUM_FEDERATIONS,
    out: Annotated[Path, typer.Option(help="File of records.")] = RECORDS,
) -> None:
    """Train federations of one distribution and count those in which some silo is reported."""
    if data not in FEDERATION_SETTINGS:
        raise typer.BadParameter(f"{data!r} is none of {', '.join(FEDERATION_SETTINGS)}", param_hint="--data")
    reports, num_decisions = [], 0
    for seed in track(range(runs), description="federations"):
        silos, count = list_federation_reports(data, seed)
        num_decisions += count
        reports += [{"federation": seed, "silos": silos}] if silos else []
    interval = compute_interval(len(reports), runs)
    record = {"part": "federations", "data": data, "arguments": FEDERATION_SETTINGS[data], "federations": runs}
    found = {"reports": len(reports), "interval": interval, "decisions": num_decisions}
    write_record(out, {**record, **found, "federations with a report": reports})
    typer.echo(f"{len(reports)} of {runs} federations have a report, 95 % interval {interval}")
    if runs == NUM_FEDERATIONS and len(reports) > MAX_REPORTS:
        raise typer.Exit(1)


@app.command()
def minority(
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "0,1,2,3,4",
    device: Annotated[str, typer.Option(help="Device of PyTorch.")] = "cpu",
    out: Annotated[Path, typer.Option(help="File of records.")] = RECORDS,
) -> None:
    """Count the runs in which a silo of a rotated minority is reported."""
    runs = []
    for seed in parse_seeds(seeds):
        runs.append(find_minority(seed, device, MINORITY_SETTINGS))
        typer.echo(f"seed {seed}: reported {', '.join(runs[-1]['reported']) or 'none'}")
    num_found = sum(any(not name.startswith(MAJORITY) for name in run["reported"]) for run in runs)
    interval = compute_interval(num_found, len(runs))
    write_record(
        out,
        {"part": "minority", "arguments": MINORITY_SETTINGS, "found": num_found, "interval": interval, "runs": runs},
    )
    typer.echo(f"found in {num_found} of {len(runs)} runs, 95 % interval {interval}")


if __name__ == "__main__":
    app()
