"""Train what belongs to one silo alone, under a model that is finished: nothing that other silos use changes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor, nn

from uefl.algorithms.fedavg import BATCH_NORM_STATISTICS, FedAvg
from uefl.algorithms.fedbn import FedBN
from uefl.algorithms.fedper import FedPer
from uefl.algorithms.fedprox import FedProx
from uefl.algorithms.fine_tuning import FineTuning
from uefl.algorithms.requirements import list_classifiers
from uefl.algorithms.scaffold import Scaffold
from uefl.algorithms.uefl import UEFL, VQFedAvg
from uefl.core.codebook import Codebook
from uefl.core.errors import InputError
from uefl.core.federation import Broadcast, ClientModel, Phase, Tensors, Update, is_codeword_tensor
from uefl.core.field_rules import setting

GATE_SUFFIX = "codebook.gate_logits"
OPEN_GATE = 0.02  # share of the codeword in a gate of a silo's own: features pass almost as they are
# Methods whose loss at a silo is that of FedAvg once the shared weights are fixed, and whose parts are tensors.
JOINABLE_METHODS: dict[type[FedAvg], str] = {
    UEFL: "uefl",
    VQFedAvg: "vq-fedavg",
    FedAvg: "fedavg",
    FedProx: "fedprox",
    Scaffold: "scaffold",
    FedBN: "fedbn",
    FedPer: "fedper",
    FineTuning: "fine-tuning",
}


@dataclass(frozen=True, kw_only=True)
class OwnPartsTraining(FedAvg):
    """Local training of one silo's own tensors; of the codewords, of those rows that are its own."""

    own_names: tuple[str, ...] = setting((), "Names of the tensors that are the silo's own.")
    num_shared_codewords: int = setting(0, "Codewords before the silo's own ones, which never change.", at_least=0)

    def client_state_names(self, net: nn.Module) -> Collection[str]:
        return [n for n in net.state_dict() if n in self.own_names]

    def make_phases(self, broadcast: Broadcast) -> Sequence[Phase]:
        del broadcast
        return [Phase([Update(self.loss, lambda n: n in self.own_names)], self.local.epochs)]

    def adjust_gradients(self, model: ClientModel, gradients: Tensors) -> Tensors:
        """Return gradients that are 0 for shared codewords; without weight decay, these then keep their bits."""
        del model
        return {n: self._mask_shared_rows(g) if is_codeword_tensor(n) else g for n, g in gradients.items()}

    def _mask_shared_rows(self, gradient: Tensor) -> Tensor:
        is_own = torch.arange(len(gradient), device=gradient.device) >= self.num_shared_codewords
        return torch.where(is_own[:, None], gradient, 0)


def make_own_training(method: FedAvg, own_names: Collection[str], num_shared_codewords: int) -> OwnPartsTraining:
    """Return the training of one silo's own parts with the settings of a method; one phase is one epoch.

    Weight decay would shrink shared codewords, so there is none. The optimizer's state lasts over the epochs.
    """
    settings = {f.name: getattr(method, f.name) for f in fields(FedAvg)}
    settings["local"] = replace(method.local, weight_decay=0.0, reset_optimizer=False, epochs=1)
    return OwnPartsTraining(**settings, own_names=tuple(own_names), num_shared_codewords=num_shared_codewords)


def require_joinable(method: FedAvg, method_name: str) -> None:
    """Raise an `InputError` for a method that has no rule for a silo that joins a finished run."""
    if type(method) not in JOINABLE_METHODS:
        known = ", ".join(JOINABLE_METHODS.values())
        raise InputError(
            f"{method_name or type(method).__name__} has no rule for a silo that joins a finished run; "
            f"methods with one: {known}"
        )


def list_own_names(
    method: FedAvg, net: nn.Module, *, codewords: bool, own_head: bool, own_statistics: bool
) -> list[str]:
    """Return the network's tensors that a new silo has for itself, in the network's order.

    These are the tensors that every silo of the run has for itself, a learned gate, its codewords, and what is asked
    for beyond that: the classifier, or the statistics of batch norm.
    """
    personal, heads = set(method.personal_tensor_names(net)), tuple(f"{name}." for name in list_classifiers(net))

    def is_own(name: str) -> bool:
        if is_codeword_tensor(name):
            return codewords
        return (
            name in personal
            or name.endswith(GATE_SUFFIX)
            or (own_head and name.startswith(heads))
            or (own_statistics and name.endswith(BATCH_NORM_STATISTICS))
        )

    return [name for name in net.state_dict() if is_own(name)]


def start_personal_tensors(names: Collection[str], others: Mapping[str, Tensors]) -> Tensors:
    """Return what a new silo starts with where every silo has tensors of its own: the mean over the other silos.

    Tensors that are known of no other silo, since they stayed there, are not returned.
    """
    start: Tensors = {}
    for name in names:
        tensors = [state[name] for state in others.values() if name in state]
        if tensors:
            mean = torch.stack([t.double() for t in tensors]).mean(0)
            start[name] = mean.to(tensors[0].dtype)
    return start


def open_gates(net: nn.Module) -> None:
    """Give every codebook a learned gate that lets features pass almost as they are."""
    for module in net.modules():
        if isinstance(module, Codebook):
            module.add_gate(OPEN_GATE)


def add_missing_gates(net: nn.Module, names: Collection[str]) -> None:
    """Give a gate to codebooks without one for which some names of tensors include one: a silo's own."""
    for name, module in net.named_modules():
        if isinstance(module, Codebook) and module.gate != "learned" and f"{name}.gate_logits" in names:
            module.add_gate(OPEN_GATE)


def train_codewords_by_task(net: nn.Module) -> None:
    """Let the gradient of the task reach the codewords, whichever losses trained them in the run."""
    for module in net.modules():
        if isinstance(module, Codebook):
            module.codeword_gradient = "task"
