"""The ways to serve a silo that comes later, many of them at once: a stack on CUDA, otherwise one after another.

A task is one way for one silo, seed and number of labeled examples, or the training of the other silos that a way
starts from. Tasks of one job run in one stack; a task's result does not depend on the tasks beside it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

from uefl.algorithms.fedavg import FedAvg
from uefl.algorithms.fine_tuning import FineTuning
from uefl.algorithms.uefl import UEFL
from uefl.core.federation import Examples, Silo, concatenate_examples
from uefl.core.noise import derive_key, permutation
from uefl.data.config import DataConfig, encode_silo
from uefl.data.table_format import compute_sums, scale_by_sums
from uefl.engines import ENGINES
from uefl.engines.choosing import choose_engine
from uefl.engines.serial import SerialEngine
from uefl.engines.stacked.seed_stack import SeedStack
from uefl.experiment.experiment import RESULTS_VERSION, Experiment
from uefl.experiment.joining import JoinResult, JoinSettings, join_silo
from uefl.experiment.recipes import make_experiment
from uefl.experiment.settings import override_settings
from uefl.experiment.silo_models import SiloModels
from uefl.experiment.train import MakeClients, train_clients
from uefl.models.build import build_encoder

VALIDATION_FRACTION = 0.2  # of the labeled examples
ROTATIONS = ("rotate:0", "rotate:-50", "rotate:120", "rotate:60")  # the last one joins
NUM_OTHER, NUM_NEW, NUM_TEST = 600, 2000, 200
PROBE_STRENGTHS = (0.01, 0.1, 1.0, 10.0)  # C of a logistic regression
MIN_CHOICE_EXAMPLES = 10  # validation examples; fewer choose nothing
SetupName = Literal["hospitals", "rotations"]
UEFL_PARENT, FEDAVG_PARENT = "UEFL of the others", "FedAvg of the others"  # tasks whose result is a trained federation
JOINS = {  # settings of a join, and the trained federation that it starts from
    "join": (JoinSettings(), UEFL_PARENT),
    "join, own codewords": (JoinSettings(head="shared"), UEFL_PARENT),
    "join, own head": (JoinSettings(head="own"), UEFL_PARENT),
    "join, own batch norm": (JoinSettings(head="shared", batch_norm="own"), UEFL_PARENT),
    "fine-tuning": (JoinSettings(head="shared"), FEDAVG_PARENT),
}
SHARED_MODEL = "shared model"  # measured at the start of a join
PROBE = "linear probe"
UNSTACKED = ("join", PROBE)  # several networks one after another, or none
TRAININGS = {"from the start": "uefl", "local-only": "fedavg", UEFL_PARENT: "uefl", FEDAVG_PARENT: "fedavg"}
PARENTS = {**{way: parent for way, (_, parent) in JOINS.items()}, PROBE: FEDAVG_PARENT}
Metrics = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """One way for one silo, seed and number of labeled examples; the training of the other silos has the number 0."""

    setup: SetupName
    dataset: str
    settings: tuple[str, ...]
    silo: str
    seed: int
    count: int
    way: str

    def locate_models(self, folder: Path) -> Path:
        """Return the file of a trained federation."""
        text = json.dumps([*astuple(self), RESULTS_VERSION, os.environ.get("UEFL_DATA", "")])
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        return folder / f"{self.setup}-{self.silo}-{self.seed}-{digest}.safetensors"

    @property
    def parent(self) -> Task:
        """The training that this task starts from."""
        return replace(self, count=0, way=PARENTS[self.way])


class Resources(NamedTuple):
    """Where tasks run."""

    device: str
    is_stacked: bool
    models: Path  # folder of trained federations


# --- federations ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Federation:
    """The silos of a finished run, and one that comes later."""

    experiment: Experiment
    others: list[Silo]
    newcomer: Silo  # with all its labeled examples
    num_classes: int

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self.newcomer.test.x.shape[1:])

    @property
    def has_batch_norm(self) -> bool:
        return any("running_mean" in name for name in self.build_encoder().state_dict())

    def make_method(self, name: str) -> FedAvg:
        """Return UEFL, or FedAvg with the same schedule."""
        method = self.experiment.method
        assert isinstance(method, UEFL)
        fields = ("rounds", "extra_rounds", "iterations", "mc_samples", "local", "batch_norm")
        shared = {field: getattr(method, field) for field in fields}
        return {"uefl": method, "fedavg": FedAvg(**shared), "fine-tuning": FineTuning(**shared)}[name]

    def build_encoder(self) -> nn.Module:
        """Build the encoder of the experiment, with initial weights of its seed."""
        model, shape = self.experiment.model, self.input_shape
        sizes = {name: getattr(model, name) for name in ("width", "depth") if getattr(model, name)}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.experiment.seed)
            return build_encoder(model.encoder, shape[0], image_size=shape[-1] if len(shape) > 1 else 1, **sizes)

    def train(
        self,
        method_name: str,
        silos: list[Silo],
        device: str,
        make_clients: MakeClients,
        on_round: Callable[[int], None],
    ) -> SiloModels:
        """Train a method on some silos with the network of the experiment; evaluate in the last round only."""
        method, model = self.make_method(method_name), self.experiment.model
        result = train_clients(
            make_clients,
            replace(method, evaluate_every=method.total_rounds, evaluate_local=False),
            silos,
            self.build_encoder(),
            num_classes=self.num_classes,
            hidden_size=model.hidden_size,
            dropout=model.dropout,
            seed=self.experiment.seed,
            device=device,
            on_record=lambda record: on_round(record["round"]),
        )
        models = result.models
        personal = {silo: {n: t.cpu() for n, t in own.items()} for silo, own in models.personal_tensors.items()}
        state = {name: tensor.cpu() for name, tensor in models.model_state.items()}
        return replace(models, model_state=state, personal_tensors=personal)


# Settings that the records have and the library's defaults had.
FIRST_CODEBOOK = (
    *("codeword_gradient=code", "gate=none", "gate_value=0.75", "segments=4"),
    *("fine_tuning_epochs=0", "group_rounds=0"),
)
FIRST_SETTINGS: Mapping[SetupName, tuple[str, ...]] = {
    "hospitals": (*FIRST_CODEBOOK, "num_codewords=16", "dropout=0.1", "logit_adjustment=none"),
    "rotations": (*FIRST_CODEBOOK, "num_codewords=256", "commitment_weight=0.01"),
}


@cache
def load_federations(setup: SetupName, seed: int, dataset: str, settings: tuple[str, ...]) -> dict[str, Federation]:
    """Return a federation for every silo that may come later, by its name."""
    experiment = override_settings(replace(make_experiment("uefl", dataset), seed=seed), FIRST_SETTINGS[setup])
    experiment = override_settings(experiment, settings)
    if setup == "rotations":
        config = DataConfig(
            name=dataset,
            shifts=ROTATIONS,
            num_silos=(1,) * len(ROTATIONS),
            train_sizes=(NUM_OTHER,) * (len(ROTATIONS) - 1) + (NUM_NEW,),
            test_per_silo=NUM_TEST,
        )
        silos, images = config.load(seed)
        return {silos[-1].name: Federation(experiment, silos[:-1], silos[-1], len(images.classes))}
    images = experiment.data.read_images(show_progress=False)
    cells = experiment.data.make_silos(images, seed)
    assert images.table is not None
    federations = {}
    for newcomer in cells:
        others = [silo for silo in cells if silo.name != newcomer.name]
        table = scale_by_sums(images.table, [compute_sums(images.table, silo.train.x) for silo in others])
        encoded = [encode_silo(silo, table) for silo in others]
        federations[newcomer.name] = Federation(experiment, encoded, encode_silo(newcomer, table), len(images.classes))
    return federations


def find_federation(task: Task) -> Federation:
    """Return the federation of a task."""
    return load_federations(task.setup, task.seed, task.dataset, task.settings)[task.silo]


def select_labeled(silo: Silo, count: int, seed: int) -> Silo:
    """Return the silo with this many labeled examples, of which a fifth validates; smaller sets are within larger."""
    labeled = concatenate_examples([silo.train, silo.validation])
    order = permutation(derive_key(seed, silo.name, "labeled examples"), len(labeled.y))[:count]
    num_validation = round(count * VALIDATION_FRACTION)
    validation, chosen = order[:num_validation], order[num_validation:]

    def select(indices: Tensor) -> Examples:
        return Examples(labeled.x[indices], labeled.y[indices])

    return replace(silo, train=select(chosen), validation=select(validation), train_groups=None)


# --- jobs -------------------------------------------------------------------------------------------------------------


def group_tasks(tasks: Sequence[Task], resources: Resources) -> list[list[Task]]:
    """Return jobs: in stacks, all tasks of one network and method; otherwise each task alone, long ones first."""
    if not resources.is_stacked:
        order = (UEFL_PARENT, FEDAVG_PARENT, "from the start")
        cost = {way: len(order) - i for i, way in enumerate(order)}
        return [[task] for task in sorted(tasks, key=lambda t: (-cost.get(t.way, 0), -t.count))]
    groups: dict[Any, list[Task]] = {}
    for task in tasks:
        kind = TRAININGS.get(task.way, task.way)
        key = (kind, task) if task.way in UNSTACKED else (kind, find_federation(task).input_shape)
        groups.setdefault(key, []).append(task)
    return sorted(groups.values(), key=lambda group: group[0].way in UNSTACKED)


def run_job(tasks: Sequence[Task], resources: Resources) -> list[dict[str, Metrics]]:
    """Run the tasks of a job; return by task the metrics of ways. A trained federation is written to a file instead."""
    torch.set_num_threads(1)
    results: dict[int, dict[str, Metrics]] = {}

    def run_task(i: int, task: Task, make_clients: MakeClients | None) -> None:
        report = partial(_print_progress, task, len(tasks)) if i == 0 else lambda *_: None
        results[i] = _run_task(task, resources, make_clients, report)

    if not resources.is_stacked or tasks[0].way in UNSTACKED:
        for i, task in enumerate(tasks):
            run_task(i, task, None)
    else:
        stack = SeedStack(device=resources.device)
        functions = [
            partial(run_task, i, task, partial(_open_clients, stack, task.seed)) for i, task in enumerate(tasks)
        ]
        stack.run(functions)
    return [results[i] for i in range(len(tasks))]


def _open_clients(stack: SeedStack, seed: int, silos: Sequence[Silo], net: nn.Module) -> Any:
    return stack.open_clients(silos, net, seed)


def _print_progress(task: Task, num_tasks: int, text: str) -> None:
    others = f" and {num_tasks - 1} more" if num_tasks > 1 else ""
    print(f"  {task.way}, seed {task.seed}{others}: {text}", flush=True)


def _run_task(
    task: Task, resources: Resources, make_clients: MakeClients | None, report: Callable[[str], None]
) -> dict[str, Metrics]:
    federation, way = find_federation(task), task.way
    if way in TRAININGS:
        return _train(task, federation, resources, make_clients, report)
    models = read_models(task.parent, resources.models)
    silo = select_labeled(federation.newcomer, task.count, task.seed)
    if way == PROBE:
        return {way: fit_probe(models, silo, federation.num_classes)}
    if way == "fine-tuning":
        models = replace(models, own_method=federation.make_method("fine-tuning"))

    def on_progress(activity: str, done: int, total: int) -> None:
        if total and done % 10 == 0:
            report(f"{activity}, epoch {done} of {total}")

    result = join_silo(
        models, silo, JOINS[way][0], device=resources.device, on_progress=on_progress, make_clients=make_clients
    )
    shared = {SHARED_MODEL: measure_join(result, "shared")} if way == "join" else {}
    return {way: {**measure_join(result, "after"), **describe_plan(result)}, **shared}


def _train(
    task: Task,
    federation: Federation,
    resources: Resources,
    make_clients: MakeClients | None,
    report: Callable[[str], None],
) -> dict[str, Metrics]:
    is_parent = not task.count
    silo = federation.newcomer if is_parent else select_labeled(federation.newcomer, task.count, task.seed)
    silos = [silo] if task.way == "local-only" else [*federation.others, *([] if is_parent else [silo])]
    method_name = TRAININGS[task.way]
    method, device = federation.make_method(method_name), resources.device

    def make_own_clients(silos: Sequence[Silo], net: nn.Module) -> SerialEngine:
        engine = choose_engine("auto", device, net, silos, method.local, method.total_rounds)
        clients: SerialEngine = ENGINES[engine](silos, net, seed=task.seed, device=device)
        return clients

    def on_round(number: int) -> None:
        if number % 5 == 0:
            report(f"round {number} of {method.total_rounds}")

    models = federation.train(method_name, silos, device, make_clients or make_own_clients, on_round)
    if is_parent:
        write_models(models, task, resources.models)
        return {}
    return {task.way: measure_predictions(models, silo.name, silo.test)}


def write_models(models: SiloModels, task: Task, folder: Path) -> None:
    """Write a trained federation in one step."""
    path = task.locate_models(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    models.save(path)


def read_models(task: Task, folder: Path) -> SiloModels:
    """Read a trained federation."""
    federation = find_federation(task)
    method = federation.make_method(TRAININGS[task.way])
    return SiloModels.read(task.locate_models(folder), federation.build_encoder(), method)


# --- measurements -----------------------------------------------------------------------------------------------------


def fit_probe(models: SiloModels, silo: Silo, num_classes: int) -> Metrics:
    """Fit a logistic regression on frozen features; its strength is the best by validation NLL."""
    net = models.build().net
    with torch.no_grad():
        train_x, validation_x, test_x = (
            net.extract_features(e.x).cpu().numpy() for e in (silo.train, silo.validation, silo.test)
        )
    if len(set(silo.train.y.tolist())) < 2:
        p = np.eye(num_classes)[np.full(len(silo.test.y), int(silo.train.y[0]))]
        return compute_scores(p, silo.test.y.numpy())
    strengths = PROBE_STRENGTHS if len(silo.validation.y) >= MIN_CHOICE_EXAMPLES else (1.0,)

    def predict(strength: float, x: Any) -> Any:
        fitted = LogisticRegression(C=strength, max_iter=1000).fit(train_x, silo.train.y.numpy())
        p = np.zeros((len(x), num_classes))
        p[:, fitted.classes_] = fitted.predict_proba(x)
        return p

    def validate(strength: float) -> float:
        nll: float = compute_scores(predict(strength, validation_x), silo.validation.y.numpy())["nll"]
        return nll

    best = min(strengths, key=validate) if len(strengths) > 1 else strengths[0]
    return compute_scores(predict(best, test_x), silo.test.y.numpy())


def describe_plan(result: JoinResult) -> dict[str, Any]:
    """Return what the silo chose to train."""
    return {"head": result.trial.plan.head, "gate": result.trial.plan.gate, "lr": result.lr}


def measure_join(result: JoinResult, stage: str) -> Metrics:
    """Return accuracy, NLL and entropy of a join."""
    evaluation = getattr(result, stage)
    return {name: evaluation[name] for name in ("accuracy", "nll", "entropy")}


def measure_predictions(models: SiloModels, silo_name: str, test: Examples) -> Metrics:
    """Return accuracy, NLL and entropy of a silo's model."""
    predictions = models.build(silo_name).predict(test.x)
    scores = compute_scores(predictions.probabilities, test.y.numpy())
    return {**scores, "entropy": float(predictions.uncertainty.entropy.mean())}


def compute_scores(p: Any, y: Any) -> Metrics:
    """Return accuracy and NLL of probabilities [n, C]."""
    chosen = np.maximum(p[np.arange(len(y)), y], 1e-6)
    return {"accuracy": float((p.argmax(-1) == y).mean()), "nll": float(-np.log(chosen).mean())}
