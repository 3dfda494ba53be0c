"""A silo joins a finished run: it gets codewords, trains what is its own, and leaves everything else as it is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from uefl.algorithms.centroids import Centroids, has_valid_centroids
from uefl.algorithms.fedavg import BATCH_NORM_STATISTICS
from uefl.algorithms.own_parts import (
    GATE_SUFFIX,
    make_own_training,
    open_gates,
    require_joinable,
    start_personal_tensors,
    train_codewords_by_task,
)
from uefl.algorithms.round_record import describe_evaluation
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
from uefl.experiment.join_choice import (
    AUTO_LR_FACTORS,
    ENCODER_PREFIX,
    LR_FACTORS,
    SHARED_PARTS,
    GateChoice,
    Head,
    OnProgress,
    PartsPlan,
    Trial,
    choose_trial,
    encode_features,
    list_head_names,
    list_planned_names,
    list_plans,
)
from uefl.experiment.settings import from_dict
from uefl.experiment.silo_models import SiloFacts, SiloModels, count_labels, select_reference
from uefl.experiment.trained_model import TrainedModel, save_models
from uefl.models.frozen_batch_norm import freeze_batch_norm_statistics

if TYPE_CHECKING:
    from uefl.experiment.train import MakeClients, TrainingResult

SPLITS: tuple[Split, ...] = ("validation", "test")
Evaluation = Mapping[str, Any]  # metrics of the test split, and below `validation` those of that split, as in records


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
    head: Head = setting(
        "auto",
        "Classifier: shared; own, which starts with the shared values; new, which starts afresh; auto: by validation.",
    )
    gate: GateChoice = setting(
        "auto",
        "Gate of the codebook: run (as in the run), own (features pass beside codewords), auto: own for a new head.",
    )
    batch_norm: Literal["run", "own"] = setting(
        "run", "Batch norm: as in the run, or with statistics of the silo's own training examples."
    )
    lr: tuple[float, ...] = setting(
        (),
        "Learning rates to choose from; empty: that of the run with head=auto, otherwise 0.1, 1 and 10 times that.",
        above=0,
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
    trial: Trial  # what was chosen
    nll: dict[Trial, float]  # by what it was chosen; empty: there was no choice
    num_folds: int  # of the cross-validation; 1: the validation examples decided
    own: OwnParts

    @property
    def lr(self) -> float:
        """The chosen learning rate; 0: training did not help."""
        return self.trial.lr

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
    head: Head = "auto",
    gate: GateChoice = "auto",
    batch_norm: Literal["run", "own"] = "run",
    lr: tuple[float, ...] = (),
    device: str = "cpu",
    on_progress: OnProgress = lambda _activity, _done, _total: None,
) -> JoinResult:
    """Let a silo join a finished run, a model file or a result of `train`; nothing that others use changes.

    `uefl join` on the command line also runs further rounds with all silos.
    """
    from uefl.experiment.loading import open_models

    parts = {"codewords": codewords, "head": head, "gate": gate, "batch_norm": batch_norm}
    settings = from_dict(JoinSettings, {"epochs": epochs, "lr": list(lr), **parts})
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
    base = models.without_own_models()
    plans = list_plans(base.method, base.template, settings)
    on_progress("features", 0, 0)
    examples, is_encoded = encode_features(base, silo, settings, device)
    make = partial(Newcomer, base, settings=settings, device=device, is_encoded=is_encoded, other_sizes=other_sizes)
    newcomers = {plan: make(examples, plan, make_clients=make_clients) for plan in plans}
    first = next((n for p, n in newcomers.items() if p.keeps_shared_values), None) or make(examples, SHARED_PARTS)
    if len(plans) == 1:
        newcomers[plans[0]].require_own_parts()
    start = first.start_own_parts()
    shared = first.evaluate(first.make_broadcast(first.select_shared(start)))
    before = first.evaluate(first.make_broadcast(first.add_codewords(start)))
    choice = choose_trial(newcomers, examples, make, on_progress)
    newcomer = newcomers[choice.trial.plan]
    after = newcomer.evaluate(newcomer.make_broadcast(choice.own))
    facts = SiloFacts(
        len(silo.train.y),
        select_reference(after),
        tuple(count_labels(silo.train.y, len(models.description.class_names))),
        has_joined=True,
    )
    joined = add_silo_model(models, silo, facts, choice.own)
    held_out = {**models.held_out, **collect_held_out(joined, [silo], device)}
    return JoinResult(
        models=replace(joined, held_out=held_out),
        silo_name=silo.name,
        shared=shared,
        before=before,
        after=after,
        own_names=newcomer.own_names,
        num_codewords=next((len(rows) for rows in choice.own.codewords.values()), 0),
        trial=choice.trial,
        nll=choice.nll,
        num_folds=choice.num_folds,
        own=choice.own,
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
    """A silo beside a finished run, with some own parts, in an engine that holds this silo alone."""

    def __init__(
        self,
        models: SiloModels,
        silo: Silo,
        plan: PartsPlan,
        *,
        settings: JoinSettings,
        device: str,
        is_encoded: bool = False,
        make_clients: MakeClients | None = None,
        other_sizes: Sequence[int] | None = None,
    ) -> None:
        self.models, self.silo, self.plan, self.settings = models, silo, plan, settings
        description, self.method = models.description, models.method
        net = copy.deepcopy(models.template)
        if plan.gate == "own":
            open_gates(net)
        self.own_names = tuple(list_planned_names(self.method, net, settings, plan))
        if not any(name.endswith(BATCH_NORM_STATISTICS) for name in self.own_names):
            freeze_batch_norm_statistics(net)
        train_codewords_by_task(net)
        known_sizes = [facts.num_examples for facts in description.silos.values()]
        self.other_sizes = known_sizes if other_sizes is None else list(other_sizes)
        self.shared_row = models.access.all(0)
        self.shared_state = gather_accessible_rows(models.model_state, self.shared_row)
        if is_encoded:  # the examples are the encoder's outputs
            net.encoder = nn.Identity()
            self.shared_state = {n: t for n, t in self.shared_state.items() if not n.startswith(ENCODER_PREFIX)}
        self.dtype = DTYPES[description.precision]
        make_serial = partial(SerialEngine, seed=description.seed, device=device, dtype=self.dtype)
        self.engine = (make_clients or make_serial)([silo], net)
        self.training = make_own_training(self.method, self.own_names, int(self.shared_row.sum()))

    def require_own_parts(self) -> None:
        """Raise an `InputError` if nothing of the model is the silo's own."""
        if not self.own_names and not self.method.uses_label_prior:
            raise InputError(
                f"{self.models.description.method_name or 'this method'} has no part of a silo's own, so the shared "
                "model already serves every silo; set head=own to train a classifier, or batch_norm=own for "
                "statistics of its own"
            )

    # --- what the silo starts with --------------------------------------------------------------------------------

    def start_own_parts(self) -> OwnParts:
        """Return the silo's own tensors before training: shared values, the mean of other silos, or initial ones."""
        names = [n for n in self.own_names if not is_codeword_tensor(n)]
        start, initial = start_personal_tensors(names, self.models.personal_tensors), self.engine.initial_tensors
        start = {**start, **{n: t for n, t in self.shared_state.items() if n in names}}
        if self.plan.head == "new":
            heads = list_head_names(self.engine.net)
            start = {n: t for n, t in start.items() if n not in heads}
        if self.plan.gate == "own":
            start = {n: t for n, t in start.items() if not n.endswith(GATE_SUFFIX)}
        tensors = {n: start.get(n, initial[n]).to(initial[n], copy=True) for n in names}
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

    def start_trials(self) -> OwnParts:
        """Return all own parts before training."""
        return self.add_codewords(self.start_own_parts())

    def list_rates(self, start: OwnParts) -> tuple[float, ...]:
        """Return the learning rates to try; none if nothing can be trained."""
        if not (start.tensors or start.codewords) or not self.settings.epochs or not len(self.silo.train.y):
            return ()
        factors = AUTO_LR_FACTORS if self.settings.head == "auto" else LR_FACTORS
        return self.settings.lr or tuple(factor * self.method.local.lr for factor in factors)

    def validate(self, own: OwnParts) -> float:
        """Return the mean NLL of the validation examples."""
        nll: float = self.evaluate(self.make_broadcast(own), ("validation",))["validation"]["nll"]
        return nll

    def train(self, start: OwnParts, lr: float, on_epoch: Callable[[], None] = lambda: None) -> OwnParts:
        """Return the own parts after training with a learning rate."""
        name, broadcast = self.silo.name, self.make_broadcast(start)._replace(lr=lr)
        for epoch in range(self.settings.epochs):
            round_number = self.models.description.round + 1 + epoch
            list(self.engine.fit(self.training, broadcast._replace(round=round_number), evaluate=False))
            on_epoch()
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
