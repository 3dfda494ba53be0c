"""A silo joins a finished run: it gets codewords, trains what is its own, and leaves everything else as it is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from uefl.algorithms.centroids import Centroids, has_valid_centroids
from uefl.algorithms.fedavg import BATCH_NORM_STATISTICS
from uefl.algorithms.own_parts import (
    list_own_names,
    make_own_training,
    require_joinable,
    start_personal_tensors,
    train_codewords_by_task,
)
from uefl.algorithms.round_record import describe_evaluation
from uefl.core.aggregate import find_non_finite
from uefl.core.errors import InputError
from uefl.core.example_checks import check_silos
from uefl.core.federation import (
    Broadcast,
    Evaluations,
    Silo,
    Split,
    Tensors,
    gather_accessible_rows,
    is_codeword_tensor,
    iterate_batch_slices,
)
from uefl.core.field_rules import check_ranges, setting
from uefl.engines.choosing import check_device
from uefl.engines.serial import SerialEngine, copy_into_network, move_examples
from uefl.experiment.calibration import CalibrationSettings, calibrate_models
from uefl.experiment.experiment import DTYPES
from uefl.experiment.held_out import collect_held_out
from uefl.experiment.settings import from_dict
from uefl.experiment.silo_models import REFERENCE_METRICS, SiloFacts, SiloModels, count_labels
from uefl.experiment.trained_model import TrainedModel, save_models
from uefl.models.frozen_batch_norm import freeze_batch_norm_statistics

if TYPE_CHECKING:
    from uefl.experiment.train import MakeClients, TrainingResult

LR_FACTORS = (0.1, 1.0, 10.0)  # of the run's learning rate
MIN_CHOICE_EXAMPLES = 10  # validation examples; fewer choose a learning rate by chance
SPLITS: tuple[Split, ...] = ("validation", "test")
Evaluation = Mapping[str, Any]  # metrics of the test split, and below `validation` those of that split, as in records
OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class JoinSettings:
    """What a silo that joins a finished run trains, and how."""

    name: str = setting("", "Name of the silo that joins; by default that of its folder or file.")
    others: Literal["fixed", "train"] = setting(
        "fixed",
        "The other silos: fixed (nothing of theirs and nothing shared changes), or train (further rounds with all).",
    )
    epochs: int = setting(30, "Passes over the silo's training examples with others=fixed.", at_least=0)
    rounds: int = setting(5, "Further rounds of all silos with others=train.", at_least=1)
    codewords: Literal["own", "shared"] = setting(
        "own", "Codewords of the silo's own from K-means on its features, beside the shared ones; or the shared alone."
    )
    head: Literal["shared", "own"] = setting("shared", "Classifier: the shared one, or one of its own that starts so.")
    batch_norm: Literal["run", "own"] = setting(
        "run", "Batch norm: as in the run, or with statistics of the silo's own training examples."
    )
    lr: tuple[float, ...] = setting(
        (), "Learning rates to choose from by validation NLL; empty: 0.1, 1 and 10 times that of the run.", above=0
    )

    def __post_init__(self) -> None:
        check_ranges(self)


class OwnParts(NamedTuple):
    """What belongs to the silo that joined."""

    codewords: Tensors  # by name of the codebook: [v, D], the silo's own rows
    tensors: Tensors  # other tensors of its network


@dataclass(frozen=True)
class JoinResult:
    """The models of all silos with the one that joined, and how it was evaluated before and after."""

    models: SiloModels
    silo_name: str
    shared: Evaluation  # with what all silos share
    before: Evaluation  # with its own parts, before their training
    after: Evaluation
    own_names: tuple[str, ...]
    num_codewords: int  # of its own
    lr: float  # chosen; 0: training did not help
    validation_nll: dict[float, float]  # by learning rate; empty: there was no choice
    own: OwnParts

    def model(self) -> TrainedModel:
        """Return the model of the silo that joined."""
        return self.models.build(self.silo_name)

    def calibrate(self, *, coverage: float = 0.9, risk: float = 0.05, pooling: int = 0) -> JoinResult:
        """Return this result with models that also give prediction sets and abstain, silo by silo.

        Silos with a calibration part are calibrated: `Silo.from_tensors(…, calibration_fraction=0.2)`.
        """
        settings = CalibrationSettings(coverage=coverage, risk=risk, pooling=pooling)
        return replace(self, models=calibrate_models(self.models, settings))

    def save(self, folder: str | Path) -> Path:
        """Write the models of all silos to a folder; an existing file is never overwritten."""
        return save_models(self.models, Path(folder))


def join(
    run: str | Path | TrainingResult | SiloModels,
    silo: Silo,
    *,
    epochs: int = 30,
    codewords: Literal["own", "shared"] = "own",
    head: Literal["shared", "own"] = "shared",
    batch_norm: Literal["run", "own"] = "run",
    lr: tuple[float, ...] = (),
    device: str = "cpu",
    on_progress: OnProgress = lambda _activity, _done, _total: None,
) -> JoinResult:
    """Let a silo join a finished run, a model file or a result of `train`; nothing that others use changes.

    `uefl join` on the command line also runs further rounds with all silos.
    """
    from uefl.experiment.loading import open_models

    values = {"epochs": epochs, "codewords": codewords, "head": head, "batch_norm": batch_norm, "lr": list(lr)}
    settings = from_dict(JoinSettings, values)
    models = run if isinstance(run, SiloModels) else getattr(run, "models", None)
    return join_silo(models or open_models(run), silo, settings, device=device, on_progress=on_progress)  # type: ignore[arg-type]


def join_silo(
    models: SiloModels,
    silo: Silo,
    settings: JoinSettings,
    *,
    device: str = "cpu",
    on_progress: OnProgress = lambda _activity, _done, _total: None,
    make_clients: MakeClients | None = None,
    other_sizes: Sequence[int] | None = None,
) -> JoinResult:
    """Let a silo join with `others=fixed`; `make_clients` makes its client, such as one of a stack of many joins.

    `other_sizes` are the training examples of the other silos, where the models do not know them.
    """
    check_device(device)
    silo = check_newcomer(models, silo)
    newcomer = Newcomer(models, silo, settings, device, make_clients, other_sizes)
    on_progress("K-means", 0, 0)
    start = newcomer.start_own_parts()
    shared = newcomer.evaluate(newcomer.make_broadcast(newcomer.select_shared(start)))
    own = newcomer.add_codewords(start)
    before = newcomer.evaluate(newcomer.make_broadcast(own))
    trained, lr, validation_nll = newcomer.choose_rate(own, before, on_progress)
    after = newcomer.evaluate(newcomer.make_broadcast(trained)) if lr else before
    facts = SiloFacts(
        len(silo.train.y),
        {n: after["validation"][n] for n in REFERENCE_METRICS if n in after.get("validation", {})},
        tuple(count_labels(silo.train.y, len(models.description.class_names))),
    )
    joined = add_silo_model(models, silo, facts, trained)
    held_out = {**models.held_out, **collect_held_out(joined, [silo], device)}
    return JoinResult(
        models=replace(joined, held_out=held_out),
        silo_name=silo.name,
        shared=shared,
        before=before,
        after=after,
        own_names=newcomer.own_names,
        num_codewords=next((len(rows) for rows in trained.codewords.values()), 0),
        lr=lr,
        validation_nll=validation_nll,
        own=trained,
    )


def check_newcomer(models: SiloModels, silo: Silo) -> Silo:
    """Return the silo with converted examples, or raise an `InputError` if it cannot join."""
    description = models.description
    require_joinable(models.method, description.method_name)
    if description.owner:
        raise InputError(f"this file is the copy of silo {description.owner}; a silo joins the run of all silos")
    (silo,) = check_silos([silo], len(description.class_names))
    if silo.name in description.silo_names:
        raise InputError(f"silo {silo.name} is in this run already; choose another name")
    if (shape := tuple(silo.test.x.shape[1:])) != description.input_format.shape:
        raise InputError(
            f"silo {silo.name}: examples have shape {list(shape)}, but the run takes "
            f"{list(description.input_format.shape)}"
        )
    return silo


class Newcomer:
    """A silo beside a finished run, in an engine that holds this silo alone."""

    def __init__(
        self,
        models: SiloModels,
        silo: Silo,
        settings: JoinSettings,
        device: str,
        make_clients: MakeClients | None = None,
        other_sizes: Sequence[int] | None = None,
    ) -> None:
        self.models, self.silo, self.settings = models, silo, settings
        description, self.method = models.description, models.method
        has_codebook = self.method.codebook is not None
        net = copy.deepcopy(models.template)
        self.own_names = tuple(
            list_own_names(
                self.method,
                net,
                codewords=has_codebook and settings.codewords == "own",
                own_head=settings.head == "own",
                own_statistics=settings.batch_norm == "own",
            )
        )
        if not self.own_names and not self.method.uses_label_prior:
            raise InputError(
                f"{description.method_name or 'this method'} has no part of a silo's own, so the shared model already "
                "serves every silo; set head=own to train a classifier, or batch_norm=own for statistics of its own"
            )
        if not any(name.endswith(BATCH_NORM_STATISTICS) for name in self.own_names):
            freeze_batch_norm_statistics(net)
        train_codewords_by_task(net)
        known_sizes = [facts.num_examples for facts in description.silos.values()]
        self.other_sizes = known_sizes if other_sizes is None else list(other_sizes)
        self.shared_row = models.access.all(0)
        self.shared_state = gather_accessible_rows(models.model_state, self.shared_row)
        self.dtype = DTYPES[description.precision]
        make_serial = partial(SerialEngine, seed=description.seed, device=device, dtype=self.dtype)
        self.engine = (make_clients or make_serial)([silo], net)
        self.training = make_own_training(self.method, self.own_names, int(self.shared_row.sum()))

    # --- what the silo starts with --------------------------------------------------------------------------------

    def start_own_parts(self) -> OwnParts:
        """Return the silo's own tensors before training: shared values, the mean of other silos, or initial ones."""
        names = [n for n in self.own_names if not is_codeword_tensor(n)]
        start = start_personal_tensors(names, self.models.personal_tensors)
        initial = self.engine.initial_tensors
        tensors = {n: self.shared_state.get(n, start.get(n, initial[n])).to(initial[n], copy=True) for n in names}
        if any(n.endswith(BATCH_NORM_STATISTICS) for n in tensors):
            tensors |= self._estimate_statistics(tensors)
        return OwnParts({}, tensors)

    def select_shared(self, start: OwnParts) -> OwnParts:
        """Return own parts with the shared values, where there are any: the model that all silos share."""
        return OwnParts({}, {n: self.shared_state.get(n, t) for n, t in start.tensors.items()})

    def _estimate_statistics(self, tensors: Tensors) -> Tensors:
        """Return batch-norm statistics of the silo's own training examples, as a mean over batches."""
        net = copy.deepcopy(self.engine.net)
        x = move_examples(self.silo.train, self.engine.device, self.dtype).x
        copy_into_network(net, {**self.shared_state, **tensors})
        net.eval()
        for layer in (m for m in net.modules() if isinstance(m, _BatchNorm)):
            layer.reset_running_stats()
            layer.momentum = None  # an average of all batches in place of a moving one
            layer.train()
        with torch.no_grad():
            for batch in iterate_batch_slices(len(x), self.method.local.eval_batch_size):
                net(x[batch])
        state = net.state_dict()
        return {n: state[n].clone() for n in tensors if n.endswith(BATCH_NORM_STATISTICS)}

    def add_codewords(self, own: OwnParts) -> OwnParts:
        """Return the own parts with codewords by K-means on the silo's features; too few examples give none."""
        codebook = self.method.codebook
        names = [n for n in self.own_names if is_codeword_tensor(n)]
        if codebook is None or not names:
            return own
        v = codebook.choose_size(self.engine.net, [*self.other_sizes, len(self.silo.train.y)]).num_codewords
        broadcast = self.make_broadcast(own)._replace(extras={"num_codewords": torch.tensor(v)})
        (reply,) = self._query("compute_centroids", broadcast, ("train",))
        answer, like = reply.answers.get("train", {}), torch.stack([self.shared_state[n][:0] for n in names])
        if not has_valid_centroids(answer, like, v):
            return own
        centroids = Centroids(**answer).centroids
        return own._replace(codewords={n: centroids[m].to(self.shared_state[n]) for m, n in enumerate(names)})

    # --- training -------------------------------------------------------------------------------------------------

    def choose_rate(
        self, start: OwnParts, before: Evaluation, on_progress: OnProgress
    ) -> tuple[OwnParts, float, dict[float, float]]:
        """Train at each learning rate; return the parts with the lowest validation NLL, untrained ones included."""
        settings, rates = self.settings, self.settings.lr
        if not (start.tensors or start.codewords) or not settings.epochs or not len(self.silo.train.y):
            return start, 0.0, {}
        can_choose = len(self.silo.validation.y) >= MIN_CHOICE_EXAMPLES
        factors = LR_FACTORS if can_choose else (1.0,)
        rates = rates or tuple(factor * self.method.local.lr for factor in factors)
        rates = rates if can_choose else rates[:1]
        results = {rate: self.train(start, rate, i, len(rates), on_progress) for i, rate in enumerate(rates)}
        if not can_choose:
            if find_non_finite({**results[rates[0]].codewords, **results[rates[0]].tensors}):
                raise InputError(f"lr={rates[0]:g}: the training diverges; set a smaller lr")
            return results[rates[0]], rates[0], {}
        nll = {0.0: before["validation"]["nll"]}
        for rate, parts in results.items():
            nll[rate] = self.evaluate(self.make_broadcast(parts), ("validation",))["validation"]["nll"]
        best = min(nll, key=lambda rate: nll[rate])
        return results.get(best, start), best, nll

    def train(self, start: OwnParts, lr: float, index: int, num_rates: int, on_progress: OnProgress) -> OwnParts:
        epochs, name = self.settings.epochs, self.silo.name
        broadcast = self.make_broadcast(start)._replace(lr=lr)
        for epoch in range(epochs):
            on_progress(f"learning rate {lr:g}", index * epochs + epoch, num_rates * epochs)
            round_number = self.models.description.round + 1 + epoch
            list(self.engine.fit(self.training, broadcast._replace(round=round_number), evaluate=False))
        state, num_shared = self.engine.client_states[name], self.training.num_shared_codewords
        return OwnParts(
            {n: state[n][num_shared:].clone() for n in start.codewords},
            {n: state[n].clone() for n in start.tensors},
        )

    # --- messages to the silo's engine ----------------------------------------------------------------------------

    def make_broadcast(self, own: OwnParts) -> Broadcast:
        """Return the shared model as a message to this silo, and store its own parts as its client state."""
        codewords = {
            n: torch.cat([self.shared_state[n], own.codewords[n].to(self.shared_state[n])]) if n in own.codewords else t
            for n, t in self.shared_state.items()
            if is_codeword_tensor(n)
        }
        self.engine.client_states[self.silo.name] = {
            n: t.to(self.engine.device) for n, t in {**own.tensors, **codewords}.items() if n in self.own_names
        }
        num_codewords = next((len(rows) for rows in codewords.values()), 0)
        return Broadcast(
            self.models.description.round,
            {**self.shared_state, **codewords},
            (self.silo.name,),
            torch.ones(1, num_codewords, dtype=torch.bool),
            participants=(self.silo.name,),
        )

    def evaluate(self, broadcast: Broadcast, splits: tuple[Split, ...] = SPLITS) -> Evaluation:
        """Return the silo's metrics as records have them; a split without examples is left out."""
        (reply,) = self._query("evaluate", broadcast, splits)
        weight = self.method.codebook_hooks.code_loss_weight
        return describe_evaluation(Evaluations(reply.answers), weight, self.method.specificity)

    def _query(self, task: str, broadcast: Broadcast, splits: tuple[Split, ...]) -> Any:
        return list(self.engine.query(self.training, task, broadcast, splits))


def add_silo_model(models: SiloModels, silo: Silo, facts: SiloFacts, own: OwnParts) -> SiloModels:
    """Return the models with one more silo; every tensor that was there keeps its bits."""
    description = models.description
    names = tuple(sorted((*description.silo_names, silo.name)))
    num_new = next((len(rows) for rows in own.codewords.values()), 0)
    model_state = {
        n: torch.cat([t, own.codewords[n].to(t)]) if n in own.codewords else t for n, t in models.model_state.items()
    }
    origin = dict(description.origin)
    if "domains" in origin:
        origin["domains"] = {**origin["domains"], silo.name: silo.domain or silo.name}
    return replace(
        models,
        description=replace(
            description, silo_names=names, silos={**description.silos, silo.name: facts}, origin=origin
        ),
        model_state=model_state,
        access=extend_access(models.access, description.silo_names, silo.name, num_new),
        personal_tensors={
            **models.personal_tensors,
            **({silo.name: {n: t.cpu() for n, t in own.tensors.items()}} if own.tensors else {}),
        },
    )


def extend_access(access: Tensor, silo_names: tuple[str, ...], new_name: str, num_new: int) -> Tensor:
    """Return the ledger with a row of the new silo, which may use the shared codewords and `num_new` of its own."""
    others = torch.cat([access, torch.zeros(len(access), num_new, dtype=torch.bool)], 1)
    row = torch.cat([access.all(0), torch.ones(num_new, dtype=torch.bool)])
    position = sorted((*silo_names, new_name)).index(new_name)
    return torch.cat([others[:position], row[None], others[position:]])
