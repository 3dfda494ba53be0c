"""Measure what a silo gains by joining a finished run, by the number of its labeled examples.

`python -m studies.joining run hospitals` lets each of the four hospitals of the embedded table join a run of the other
three; `run rotations` lets a fourth rotation of the embedded digits join three (`--dataset mnist` uses MNIST). Beside
joining stand: the shared model as it is, training alone, a linear probe on the features of a FedAvg model,
fine-tuning that model, and UEFL with the silo from the start. All see the same labeled examples, of which a fifth
validates. Records go to results/joining.jsonl, one per silo, seed, number of examples and way; what is there already is
not computed again. `python -m studies.joining page` writes docs/joining-study.md from them.
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated, Any, Literal

import numpy as np
import torch
import typer
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from uefl import __version__
from uefl.algorithms.fedavg import FedAvg
from uefl.algorithms.fine_tuning import FineTuning
from uefl.algorithms.uefl import UEFL
from uefl.core.errors import InputError, unknown_value_error
from uefl.core.federation import Examples, Silo, concatenate_examples
from uefl.core.noise import derive_key, permutation
from uefl.data.config import DataConfig, encode_silo
from uefl.data.table_format import compute_sums, scale_by_sums
from uefl.experiment.experiment import Experiment
from uefl.experiment.files import write_text
from uefl.experiment.joining import JoinResult, join
from uefl.experiment.parsing import parse_seeds
from uefl.experiment.recipes import make_experiment
from uefl.experiment.records import append_records, read_records
from uefl.experiment.silo_models import SiloModels
from uefl.experiment.train import train
from uefl.models.build import build_encoder

RECORDS, PAGE = Path("results/joining.jsonl"), Path("docs/joining-study.md")
COUNTS = (25, 50, 100, 500, 2000)  # labeled examples; as many as there are
VALIDATION_FRACTION = 0.2  # of the labeled examples
ROTATIONS = ("rotate:0", "rotate:-50", "rotate:120", "rotate:60")  # the last one joins
NUM_OTHER, NUM_NEW, NUM_TEST = 600, 2000, 200
PROBE_STRENGTHS = (0.01, 0.1, 1.0, 10.0)  # C of a logistic regression
MIN_CHOICE_EXAMPLES = 10  # validation examples; fewer choose nothing
Setup = Literal["hospitals", "rotations"]
WAYS = {
    "shared model": "UEFL of the other silos, nothing trained",
    "join": "`uefl join`: its own codewords",
    "join, own head": "`uefl join head=own`",
    "join, own batch norm": "`uefl join batch_norm=own`; only where the encoder has batch norm",
    "local-only": "trained alone from the start, as many epochs as a silo of the run",
    "linear probe": "logistic regression on the features of the FedAvg model of the other silos",
    "fine-tuning": "all weights of that FedAvg model, learning rate by validation",
    "from the start": "UEFL with this silo among the others for all rounds",
}

app = typer.Typer(add_completion=False, help=__doc__)


@dataclass(frozen=True)
class Federation:
    """The silos of a finished run, and one that comes later."""

    experiment: Experiment
    others: list[Silo]
    newcomer: Silo  # with all its labeled examples
    num_classes: int

    def train(self, method: FedAvg, silos: list[Silo], device: str) -> SiloModels:
        """Train a method on some silos with the network of the experiment."""
        model, shape = self.experiment.model, tuple(self.newcomer.test.x.shape[1:])
        sizes = {name: getattr(model, name) for name in ("width", "depth") if getattr(model, name)}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.experiment.seed)
            size = shape[-1] if len(shape) > 1 else 1
            encoder = build_encoder(model.encoder, shape[0], image_size=size, **sizes)
        result = train(
            replace(method, evaluate_every=method.total_rounds, evaluate_local=False),
            silos,
            encoder,
            num_classes=self.num_classes,
            hidden_size=model.hidden_size,
            dropout=model.dropout,
            seed=self.experiment.seed,
            device=device,
        )
        models = result.models
        return replace(models, model_state={name: tensor.cpu() for name, tensor in models.model_state.items()})


def load_federations(setup: Setup, seed: int, dataset: str, settings: list[str]) -> Iterator[Federation]:
    """Yield a federation for every silo that may come later."""
    from uefl.experiment.settings import override_settings

    name = "heart" if setup == "hospitals" else dataset
    experiment = override_settings(replace(make_experiment("uefl", name), seed=seed), settings)
    if setup == "rotations":
        config = DataConfig(
            name=name,
            shifts=ROTATIONS,
            num_silos=(1,) * len(ROTATIONS),
            train_sizes=(NUM_OTHER,) * (len(ROTATIONS) - 1) + (NUM_NEW,),
            test_per_silo=NUM_TEST,
        )
        silos, images = config.load(seed)
        yield Federation(experiment, silos[:-1], silos[-1], len(images.classes))
        return
    images = experiment.data.read_images(show_progress=False)
    cells = experiment.data.make_silos(images, seed)
    assert images.table is not None
    for newcomer in cells:
        others = [silo for silo in cells if silo.name != newcomer.name]
        table = scale_by_sums(images.table, [compute_sums(images.table, silo.train.x) for silo in others])
        encoded = [encode_silo(silo, table) for silo in others]
        yield Federation(experiment, encoded, encode_silo(newcomer, table), len(images.classes))


def select_labeled(silo: Silo, count: int, seed: int) -> Silo:
    """Return the silo with this many labeled examples, of which a fifth validates; smaller sets are within larger."""
    labeled = concatenate_examples([silo.train, silo.validation])
    order = permutation(derive_key(seed, silo.name, "labeled examples"), len(labeled.y))[:count]
    num_validation = round(count * VALIDATION_FRACTION)
    validation, chosen = order[:num_validation], order[num_validation:]

    def select(indices: Tensor) -> Examples:
        return Examples(labeled.x[indices], labeled.y[indices])

    return replace(silo, train=select(chosen), validation=select(validation), train_groups=None)


def list_counts(silo: Silo) -> list[int]:
    """Return the numbers of labeled examples; the last is all that the silo has, if it has fewer than the largest."""
    available = len(silo.train.y) + len(silo.validation.y)
    return sorted({min(count, available) for count in COUNTS})


# --- ways to serve the new silo ---------------------------------------------------------------------------------------


class Ways:
    """The models of the other silos, trained once, and every way to serve the new silo with them."""

    def __init__(self, federation: Federation, device: str) -> None:
        self.federation, self.device = federation, device
        method = federation.experiment.method
        assert isinstance(method, UEFL)
        self.uefl_method = method
        self.fedavg_method = FedAvg(
            **{
                name: getattr(method, name)
                for name in ("rounds", "extra_rounds", "iterations", "mc_samples", "local", "batch_norm")
            }
        )
        self.uefl = federation.train(method, federation.others, device)
        self.fedavg = federation.train(self.fedavg_method, federation.others, device)
        self.has_batch_norm = any("running_mean" in name for name in self.uefl.model_state)

    def evaluate(self, way: str, silo: Silo) -> dict[str, float] | None:
        """Return the metrics of the silo's test examples; None if the way does not exist here."""
        functions: dict[str, Callable[[Silo], dict[str, float] | None]] = {
            "shared model": lambda s: measure(join(self.uefl, s, epochs=0, codewords="own"), "shared"),
            "join": lambda s: measure(join(self.uefl, s, device=self.device), "after"),
            "join, own head": lambda s: measure(join(self.uefl, s, head="own", device=self.device), "after"),
            "join, own batch norm": self._join_with_batch_norm,
            "local-only": lambda s: self._train_with(self.fedavg_method, [s], s),
            "linear probe": self._probe,
            "fine-tuning": self._fine_tune,
            "from the start": lambda s: self._train_with(self.uefl_method, [*self.federation.others, s], s),
        }
        return functions[way](silo)

    def _join_with_batch_norm(self, silo: Silo) -> dict[str, float] | None:
        if not self.has_batch_norm:
            return None
        return measure(join(self.uefl, silo, batch_norm="own", device=self.device), "after")

    def _train_with(self, method: FedAvg, silos: list[Silo], silo: Silo) -> dict[str, float]:
        models = self.federation.train(method, silos, self.device)
        return measure_predictions(models, silo.name, silo.test)

    def _fine_tune(self, silo: Silo) -> dict[str, float]:
        fields = {f: getattr(self.fedavg_method, f) for f in ("rounds", "extra_rounds", "iterations", "mc_samples")}
        method = FineTuning(**fields, local=self.fedavg_method.local, batch_norm=self.fedavg_method.batch_norm)
        return measure(join(replace(self.fedavg, own_method=method), silo, device=self.device), "after")

    def _probe(self, silo: Silo) -> dict[str, float]:
        """Fit a logistic regression on frozen features; its strength is the best by validation NLL."""
        net = self.fedavg.build().net
        with torch.no_grad():
            train_x, validation_x, test_x = (
                net.extract_features(e.x).cpu().numpy() for e in (silo.train, silo.validation, silo.test)
            )
        if len(set(silo.train.y.tolist())) < 2:
            p = np.eye(self.federation.num_classes)[np.full(len(silo.test.y), int(silo.train.y[0]))]
            return compute_scores(p, silo.test.y.numpy())
        strengths = PROBE_STRENGTHS if len(silo.validation.y) >= MIN_CHOICE_EXAMPLES else (1.0,)

        def predict(strength: float, x: Any) -> Any:
            fitted = LogisticRegression(C=strength, max_iter=1000).fit(train_x, silo.train.y.numpy())
            p = np.zeros((len(x), self.federation.num_classes))
            p[:, fitted.classes_] = fitted.predict_proba(x)
            return p

        def validate(strength: float) -> float:
            return compute_scores(predict(strength, validation_x), silo.validation.y.numpy())["nll"]

        best = min(strengths, key=validate) if len(strengths) > 1 else strengths[0]
        return compute_scores(predict(best, test_x), silo.test.y.numpy())


def measure(result: JoinResult, stage: str) -> dict[str, float]:
    """Return accuracy, NLL and entropy of a join."""
    evaluation = getattr(result, stage)
    return {name: evaluation[name] for name in ("accuracy", "nll", "entropy")}


def measure_predictions(models: SiloModels, silo_name: str, test: Examples) -> dict[str, float]:
    """Return accuracy, NLL and entropy of a silo's model."""
    predictions = models.build(silo_name).predict(test.x)
    scores = compute_scores(predictions.probabilities, test.y.numpy())
    return {**scores, "entropy": float(predictions.uncertainty.entropy.mean())}


def compute_scores(p: Any, y: Any) -> dict[str, float]:
    """Return accuracy and NLL of probabilities [n, C]."""
    chosen = np.maximum(p[np.arange(len(y)), y], 1e-6)
    return {"accuracy": float((p.argmax(-1) == y).mean()), "nll": float(-np.log(chosen).mean())}


# --- records ----------------------------------------------------------------------------------------------------------


def make_key(record: dict[str, Any]) -> tuple[Any, ...]:
    """Return what distinguishes a record from others."""
    return tuple(record[name] for name in ("setup", "dataset", "silo", "seed", "count", "way"))


@app.command()
def run(
    setup: Annotated[str, typer.Argument(help="hospitals or rotations.")],
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "0",
    dataset: Annotated[str, typer.Option(help="Digits of rotations: mnist5k, or mnist.")] = "mnist5k",
    device: Annotated[str, typer.Option(help="Device of PyTorch.")] = "cpu",
    settings: Annotated[str, typer.Option(help="Settings of UEFL as field=value, separated by spaces.")] = "",
    out: Annotated[Path, typer.Option(help="File of records.")] = RECORDS,
) -> None:
    """Measure every way at every number of labeled examples; append a record for each."""
    if setup not in ("hospitals", "rotations"):
        raise unknown_value_error("setup", setup, ("hospitals", "rotations"))
    torch.set_num_threads(1)
    done = {make_key(record) for record in read_records(out)}
    out.parent.mkdir(parents=True, exist_ok=True)
    for seed in parse_seeds(seeds):
        for federation in load_federations(setup, seed, dataset, shlex.split(settings)):  # type: ignore[arg-type]
            newcomer = federation.newcomer
            name = "heart" if setup == "hospitals" else dataset
            base: dict[str, Any] = {"setup": setup, "dataset": name, "silo": newcomer.name, "seed": seed}
            tasks = [{**base, "count": count, "way": way} for count in list_counts(newcomer) for way in WAYS]
            tasks = [task for task in tasks if make_key(task) not in done]
            if not tasks:
                continue
            ways = Ways(federation, device)
            for task in tasks:
                silo = select_labeled(newcomer, task["count"], seed)
                metrics = ways.evaluate(task["way"], silo)
                if metrics is None:
                    continue
                command = shlex.join(["python", "-m", "studies.joining", *sys.argv[1:]])
                versions = {"uefl": __version__, "torch": torch.__version__, "command": command}
                append_records(out, [{**task, **metrics, "num_test": len(silo.test.y), **versions}])
                typer.echo(
                    f"seed {seed}, {newcomer.name}, {task['count']} labels, {task['way']}: "
                    f"accuracy {metrics['accuracy']:.3f}, NLL {metrics['nll']:.3f}"
                )


# --- the page ---------------------------------------------------------------------------------------------------------


def summarize(records: list[dict[str, Any]], metric: str) -> tuple[float, float, int]:
    """Return mean and standard error over seeds of the mean over silos, and the number of seeds."""
    seeds = sorted({record["seed"] for record in records})
    values = [mean(r[metric] for r in records if r["seed"] == seed) for seed in seeds]
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return mean(values), error, len(values)


def list_columns(records: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return records by number of labeled examples; all examples of a silo are a column of their own."""
    largest: dict[tuple[str, int], int] = {}
    for record in records:
        key = (record["silo"], record["seed"])
        largest[key] = max(largest.get(key, 0), record["count"])
    columns: dict[str, list[dict[str, Any]]] = {}
    for count in COUNTS:
        columns[str(count)] = [r for r in records if r["count"] == count]
    everything = [r for r in records if r["count"] == largest[(r["silo"], r["seed"])]]
    if everything not in columns.values():  # else every silo has as many as a column says
        columns["all"] = everything
    return {name: chosen for name, chosen in columns.items() if chosen}


def make_table(records: list[dict[str, Any]], metric: str, digits: int = 3) -> str:
    """Make a table with a row per way and a column per number of labeled examples."""
    columns = list_columns(records)
    lines = ["| | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    for way in WAYS:
        cells = []
        for chosen in columns.values():
            of_way = [r for r in chosen if r["way"] == way and metric in r]
            if not of_way:
                cells.append("–")
                continue
            value, error, _ = summarize(of_way, metric)
            cells.append(f"{value:.{digits}f}" + (f" ± {error:.{digits}f}" if math.isfinite(error) else ""))
        if set(cells) != {"–"}:
            lines.append(f"| {way} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def compare_ways(records: list[dict[str, Any]], one: str, other: str, column: str) -> str:
    """Return in words by how much one way is ahead of another, over pairs of the same silo and seed."""
    chosen = list_columns(records).get(column, [])
    accuracy = {(r["way"], r["silo"], r["seed"]): r["accuracy"] for r in chosen}
    differences: dict[int, list[float]] = {}
    for way, silo, seed in accuracy:
        if way == one and (other, silo, seed) in accuracy:
            differences.setdefault(seed, []).append(accuracy[one, silo, seed] - accuracy[other, silo, seed])
    if not differences:
        return f"{column} labels: no records"
    values = [100 * mean(of_seed) for of_seed in differences.values()]
    error = f" ± {stdev(values) / math.sqrt(len(values)):.1f}" if len(values) > 1 else " (one seed)"
    return f"{column} labels: {mean(values):+.1f}{error} points"


@app.command()
def page(
    records_path: Annotated[Path, typer.Option("--records", help="File of records.")] = RECORDS,
    out: Annotated[Path, typer.Option(help="Page to write.")] = PAGE,
) -> None:
    """Write the page of all records."""
    records = read_records(records_path)
    if not records:
        raise InputError(f"{records_path} has no records; use `python -m studies.joining run` first")
    lines = [
        "# What a silo gains by joining",
        "",
        "Generated by `python -m studies.joining page` from [the records](../results/joining.jsonl). Do not edit.",
        "[joining.md](joining.md) describes the command. Accuracy and NLL on test examples of the new silo; means over",
        "silos and seeds ± standard error over seeds. A fifth of the labeled examples validates. `all`: every labeled",
        "example of the silo; a silo with fewer examples than a column says is in `all` only.",
        "",
        *(f"- **{way}**: {meaning}" for way, meaning in WAYS.items()),
    ]
    for setup, dataset in sorted({(r["setup"], r["dataset"]) for r in records}):
        of_setup = [r for r in records if (r["setup"], r["dataset"]) == (setup, dataset)]
        seeds, silos = (sorted({r[name] for r in of_setup}) for name in ("seed", "silo"))
        newcomers = f"{len(silos)} silos in turn: {', '.join(silos)}" if len(silos) > 1 else f"silo {silos[0]}"
        columns = list(list_columns(of_setup))
        early = [name for name in columns if name in ("25", "50", "100")]
        late = "500" if "500" in columns else "all"
        lines += [
            "",
            f"## {setup.title()}, {dataset}",
            "",
            f"{len(seeds)} {'seed' if len(seeds) == 1 else 'seeds'} ({', '.join(map(str, seeds))}); {newcomers}.",
            "",
            "Accuracy by labeled examples:",
            "",
            make_table(of_setup, "accuracy"),
            "",
            "NLL by labeled examples:",
            "",
            make_table(of_setup, "nll"),
            "",
            "Targets, set before the measurement. Joining ahead of local-only with at most 100 labels: "
            + "; ".join(compare_ways(of_setup, "join", "local-only", name) for name in early)
            + ". With a head of its own: "
            + "; ".join(compare_ways(of_setup, "join, own head", "local-only", name) for name in early)
            + f". Joining within 1 point of having been there, at {late}: "
            + compare_ways(of_setup, "join", "from the start", late)
            + "; with a head of its own, "
            + compare_ways(of_setup, "join, own head", "from the start", late)
            + ".",
        ]
    write_text(out, "\n".join(lines) + "\n")
    typer.echo(f"written: {out}")


if __name__ == "__main__":
    app()
