"""What a silo that joins trains, chosen by its own validation examples or by cross-validation of its own examples."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from uefl.algorithms.fedavg import FedAvg
from uefl.algorithms.own_parts import list_own_names
from uefl.algorithms.requirements import list_classifiers
from uefl.core import noise_addresses as addresses
from uefl.core.aggregate import find_non_finite
from uefl.core.errors import InputError
from uefl.core.federation import Examples, Silo, gather_accessible_rows, iterate_batch_slices
from uefl.core.noise import NoiseLayer, derive_key, permutation
from uefl.engines.serial import copy_into_network, move_examples
from uefl.experiment.experiment import DTYPES
from uefl.experiment.silo_models import SiloModels
from uefl.models.frozen_batch_norm import freeze_batch_norm_statistics
from uefl.models.network import Net

if TYPE_CHECKING:
    from uefl.experiment.joining import JoinSettings, Newcomer, OwnParts

Head = Literal["auto", "shared", "own", "new"]
OwnHead = Literal["shared", "own", "new"]
GateChoice = Literal["auto", "run", "own"]
OnProgress = Callable[[str, int, int], None]
ENCODER_PREFIX = "encoder."
LR_FACTORS = (0.1, 1.0, 10.0)  # of the run's learning rate
AUTO_LR_FACTORS = (1.0,)  # where the parts are chosen too: few examples cannot choose among many trials
MIN_CHOICE_EXAMPLES = 10  # fewer examples choose by chance
FEW_VALIDATION_EXAMPLES, NUM_FOLDS = 50, 5  # fewer validation examples: training examples are cross-validated


class PartsPlan(NamedTuple):
    """A choice of own parts beyond codewords, label prior and what every silo of the run has for itself."""

    head: OwnHead
    gate: Literal["run", "own"]

    @property
    def keeps_shared_values(self) -> bool:
        """Whether its model before training is the shared one."""
        return self.head != "new" and self.gate == "run"

    def describe(self) -> str:
        """Name the plan in words."""
        head = {"shared": "shared classifier", "own": "own classifier", "new": "new classifier"}[self.head]
        return head if self.gate == "run" else f"{head} and own gate"


class Trial(NamedTuple):
    """Own parts that train with a learning rate; 0 means no training."""

    plan: PartsPlan
    lr: float


class Choice(NamedTuple):
    """The best trial with its trained parts, and the mean NLL of every trial."""

    trial: Trial
    own: OwnParts
    nll: dict[Trial, float]  # empty: there was no choice
    num_folds: int


SHARED_PARTS = PartsPlan("shared", "run")


# --- plans ------------------------------------------------------------------------------------------------------------


def list_plans(method: FedAvg, net: nn.Module, settings: JoinSettings) -> list[PartsPlan]:
    """Return the plans that settings allow; a head that every silo of the run has for itself is always its own."""
    has_codebook = method.codebook is not None
    if settings.gate == "own" and not has_codebook:
        raise InputError("gate=own needs a run with a codebook; this run has none")
    has_personal_head = bool(list_head_names(net) & set(method.personal_tensor_names(net)))
    automatic: tuple[OwnHead, ...] = ("shared", "new") if has_personal_head else ("shared", "own", "new")
    heads = automatic if settings.head == "auto" else (settings.head,)
    return [PartsPlan(head, _choose_gate(settings.gate, head, has_codebook=has_codebook)) for head in heads]


def _choose_gate(gate: GateChoice, head: str, *, has_codebook: bool) -> Literal["run", "own"]:
    if gate == "auto":
        return "own" if head == "new" and has_codebook else "run"
    return gate


def list_head_names(net: nn.Module) -> set[str]:
    """Return the names of the classifier's tensors."""
    prefixes = tuple(f"{name}." for name in list_classifiers(net))
    return {name for name in net.state_dict() if name.startswith(prefixes)}


def list_planned_names(method: FedAvg, net: nn.Module, settings: JoinSettings, plan: PartsPlan) -> list[str]:
    """Return the tensors of a network that are the silo's own under a plan."""
    return list_own_names(
        method,
        net,
        codewords=method.codebook is not None and settings.codewords == "own",
        own_head=plan.head != "shared",
        own_statistics=settings.batch_norm == "own",
    )


# --- features ---------------------------------------------------------------------------------------------------------


def encode_features(
    models: SiloModels, silo: Silo, settings: JoinSettings, device: str, plan: PartsPlan = SHARED_PARTS
) -> tuple[Silo, bool]:
    """Return the silo with the encoder's outputs in place of its examples, and whether that is possible.

    An encoder that nothing of the silo changes, and that draws nothing, has the same outputs in every epoch.
    """
    net, dtype = copy.deepcopy(models.template), DTYPES[models.description.precision]
    own_names = list_planned_names(models.method, net, settings, plan)
    freeze_batch_norm_statistics(net)
    if not isinstance(net, Net) or net.augment or any(n.startswith(ENCODER_PREFIX) for n in own_names):
        return silo, False
    if any(_changes_in_training(module) for module in net.encoder.modules()):
        return silo, False
    net = net.to(device, dtype)
    copy_into_network(net, gather_accessible_rows(models.model_state, models.access.all(0)))
    encoder, batch_size = net.encoder.eval(), models.method.local.eval_batch_size

    def encode(examples: Examples) -> Examples:
        x = move_examples(examples, torch.device(device), dtype).x
        with torch.no_grad():
            outputs = [encoder(x[batch]) for batch in iterate_batch_slices(len(x), batch_size)]
        return examples._replace(x=torch.cat(outputs).cpu() if outputs else examples.x)

    train, validation, test = (encode(examples) for examples in (silo.train, silo.validation, silo.test))
    return replace(silo, train=train, validation=validation, test=test), True


def _changes_in_training(module: nn.Module) -> bool:
    is_frozen = isinstance(module, _BatchNorm) and not module.train().training
    return isinstance(module, NoiseLayer | _DropoutNd) or (isinstance(module, _BatchNorm) and not is_frozen)


# --- the choice -------------------------------------------------------------------------------------------------------


def choose_trial(
    newcomers: Mapping[PartsPlan, Newcomer],
    silo: Silo,
    make: Callable[[Silo, PartsPlan], Newcomer],
    on_progress: OnProgress,
) -> Choice:
    """Train every plan with every learning rate, and return the trial with the lowest NLL on examples left out."""
    starts = {plan: newcomer.start_trials() for plan, newcomer in newcomers.items()}
    trials = [Trial(plan, lr) for plan, newcomer in newcomers.items() for lr in newcomer.list_rates(starts[plan])]
    if not trials:
        plan = next(iter(newcomers))
        return Choice(Trial(plan, 0.0), starts[plan], {}, 1)
    untrained = [Trial(plan, 0.0) for plan in newcomers if plan.keeps_shared_values]  # others would answer at random
    one = next(iter(newcomers.values()))
    epochs, folds = one.settings.epochs, list(iterate_folds(silo, one.models.description.seed))
    can_choose = bool(folds) or len(silo.validation.y) >= MIN_CHOICE_EXAMPLES
    if not can_choose:
        trial = _choose_unseen(trials, newcomers)
        progress = Progress(on_progress, epochs)
        own = newcomers[trial.plan].train(starts[trial.plan], trial.lr, progress.name(trial))
        _require_finite(own, trial.lr)
        return Choice(trial, own, {}, 1)
    progress = Progress(on_progress, epochs * (len(trials) * max(len(folds), 1) + bool(folds)))
    if not folds:
        trained = {t: newcomers[t.plan].train(starts[t.plan], t.lr, progress.name(t)) for t in trials}
        trained |= {t: starts[t.plan] for t in untrained}
        nll = {t: newcomers[t.plan].validate(trained[t]) for t in (*untrained, *trials)}
        best = _find_best(nll)
        _require_finite(trained[best], best.lr)
        return Choice(best, trained[best], nll, 1)
    nll = cross_validate([*untrained, *trials], folds, make, progress)
    best = _find_best(nll)
    newcomer, start = newcomers[best.plan], starts[best.plan]
    own = newcomer.train(start, best.lr, progress.name(best)) if best.lr else start
    _require_finite(own, best.lr)
    return Choice(best, own, nll, len(folds))


def iterate_folds(silo: Silo, seed: int) -> Iterator[Silo]:
    """Yield the silo with each fifth of its training examples as validation examples; none if it has enough of these.

    Examples of one group are in one fold.
    """
    num_train = len(silo.train.y)
    if len(silo.validation.y) >= FEW_VALIDATION_EXAMPLES or num_train < MIN_CHOICE_EXAMPLES:
        return
    ids = torch.arange(num_train) if silo.train_groups is None else silo.train_groups
    groups = torch.unique(ids, return_inverse=True)[1]
    num_groups = int(groups.max()) + 1
    if num_groups < NUM_FOLDS:
        return
    order = permutation(derive_key(seed, silo.name, addresses.JOIN_FOLDS), num_groups)
    fold_of_group = torch.empty(num_groups, dtype=torch.int64)
    fold_of_group[order] = torch.arange(num_groups) % NUM_FOLDS
    folds = fold_of_group[groups]
    for fold in range(NUM_FOLDS):
        is_left_out = folds == fold
        yield replace(
            silo,
            train=_select(silo.train, ~is_left_out),
            validation=_select(silo.train, is_left_out),
            train_groups=None if silo.train_groups is None else silo.train_groups[~is_left_out],
        )


def _select(examples: Examples, chosen: Tensor) -> Examples:
    return Examples(examples.x[chosen], examples.y[chosen])


def cross_validate(
    trials: list[Trial], folds: list[Silo], make: Callable[[Silo, PartsPlan], Newcomer], progress: Progress
) -> dict[Trial, float]:
    """Return the mean NLL of every trial over examples that its training did not see."""
    sums = dict.fromkeys(trials, 0.0)
    for i, fold in enumerate(folds, 1):
        activity = f"cross-validation, fold {i} of {len(folds)}"
        newcomers = {plan: make(fold, plan) for plan in dict.fromkeys(trial.plan for trial in trials)}
        starts = {plan: newcomer.start_trials() for plan, newcomer in newcomers.items()}
        for trial in trials:
            newcomer, start = newcomers[trial.plan], starts[trial.plan]
            own = newcomer.train(start, trial.lr, progress.name(trial, activity)) if trial.lr else start
            sums[trial] += newcomer.validate(own) * len(fold.validation.y)
    total = sum(len(fold.validation.y) for fold in folds)
    return {trial: value / total for trial, value in sums.items()}


class Progress:
    """Counts epochs of all trials."""

    def __init__(self, on_progress: OnProgress, total: int) -> None:
        self.on_progress, self.total, self.done = on_progress, total, 0

    def name(self, trial: Trial, activity: str = "") -> Callable[[], None]:
        """Return what an epoch of a trial calls; without a name of the activity, it is the trial's."""
        activity = activity or f"{trial.plan.describe()}, learning rate {trial.lr:g}"

        def count() -> None:
            self.done += 1
            self.on_progress(activity, self.done, self.total)

        return count


def _choose_unseen(trials: list[Trial], newcomers: Mapping[PartsPlan, Newcomer]) -> Trial:
    """Return the trial of a silo with too few examples to choose: a classifier of its own, at the rate of the run."""
    plan = next((plan for plan in newcomers if plan.head == "own"), trials[0].plan)
    of_plan = [trial for trial in trials if trial.plan == plan] or trials
    newcomer = newcomers[of_plan[0].plan]
    rate = newcomer.settings.lr[0] if newcomer.settings.lr else newcomer.method.local.lr
    return Trial(of_plan[0].plan, rate)


def _find_best(nll: Mapping[Trial, float]) -> Trial:
    return min(nll, key=lambda trial: nll[trial])


def _require_finite(own: OwnParts, lr: float) -> None:
    if find_non_finite({**own.codewords, **own.tensors}):
        raise InputError(f"lr={lr:g}: the training diverges; set a smaller lr")
