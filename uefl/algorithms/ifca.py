"""IFCA: several models at the server; every silo trains the one with the lowest loss on its training data.

Ghosh et al., An efficient framework for clustered federated learning (NeurIPS 2020).
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from uefl.algorithms.fedavg import FedAvg, compute_task_loss
from uefl.algorithms.requirements import list_classifiers, require_training_data
from uefl.algorithms.round_record import record_query_cost, start_entry
from uefl.core import noise_addresses as addresses
from uefl.core.federation import (
    Batch,
    Broadcast,
    ClientModel,
    Clients,
    ClientTask,
    Evaluations,
    Reply,
    ServerState,
    Silo,
    Tensors,
)
from uefl.core.field_rules import setting
from uefl.core.noise import derive_key, permutation

ASSIGNMENT = "assignment"  # [K] in the method state: the model of each silo
MODEL_PREFIX = "model."  # `model.<index>.<name>` in the method state; model 0 is the model state
LOSS_TASK = "sum_training_losses"


@dataclass(frozen=True, kw_only=True)
class IFCA(FedAvg):
    """FedAvg on k models: a silo receives all of them, trains the one with the lowest training loss and returns it.

    Silos choose anew whenever models have changed, before training and before the final evaluation, and predict with
    their choice. A model that no silo chose stays as it is. The server learns the losses of each silo.
    """

    num_models: int = setting(2, "Number k of models.", at_least=1)
    initial_models: Literal["network", "classifier"] = setting(
        "network", "Weights that differ between initial models; `classifier` keeps the weights of a trained encoder."
    )
    start: int = setting(0, "Number of the random start; another one draws other initial models.", at_least=0)

    codebook_unsupported_reason: ClassVar[str] = "every model would need a codebook of its own"
    eval_clients_unsupported_reason: ClassVar[str] = "with IFCA, every silo chooses its model when it measures"

    # --- the server ---------------------------------------------------------------------------------------------

    def prepare_silos(self, silos: Sequence[Silo]) -> Sequence[Silo]:
        return require_training_data(super().prepare_silos(silos), "IFCA", "choice by training loss")

    def initialize_server(self, clients: Clients) -> ServerState:
        server = super().initialize_server(clients)
        draws = range(self.start * self.num_models, (self.start + 1) * self.num_models)
        first, *others = (self.draw_model(clients, server.model_state, draw) for draw in draws)
        models = {f"{MODEL_PREFIX}{i}.{n}": t for i, model in enumerate(others, 1) for n, t in model.items()}
        assignment = torch.zeros(len(server.silo_names), dtype=torch.int64)
        method_state = {**server.method_state, **models, ASSIGNMENT: assignment}
        return server.replace(model_state=first, method_state=method_state)

    def draw_model(self, clients: Clients, network: Tensors, draw: int) -> Tensors:
        """Return the network's initial weights as draw 0, and with their values in another order as any other draw."""
        names = self.list_shuffled_names(clients.net) if draw else ()
        keys = {n: derive_key(clients.seed, draw, n, addresses.INITIAL_MODELS) for n in names}
        return {n: shuffle_values(t, keys[n]) if n in keys else t.clone() for n, t in network.items()}

    def list_shuffled_names(self, net: nn.Module) -> set[str]:
        """Return names of the weights that differ between initial models."""
        names = {n for n, p in net.named_parameters() if p.requires_grad}
        heads = tuple(f"{classifier}." for classifier in list_classifiers(net))
        return names if self.initial_models == "network" else {n for n in names if n.startswith(heads)}

    def make_broadcasts(self, clients: Clients, server: ServerState) -> Sequence[Broadcast]:
        """Return one broadcast per model, to the silos that chose it."""
        broadcast, assignment = self.make_broadcast(clients, server), self.get_assignment(server)
        return [
            broadcast._replace(
                model_state=get_model(server, i), participants=tuple(n for n in server.silo_names if assignment[n] == i)
            )
            for i in range(self.num_models)
        ]

    def get_assignment(self, server: ServerState) -> dict[str, int]:
        """Return the index of the model of each silo."""
        return dict(zip(server.silo_names, server.method_state[ASSIGNMENT].tolist(), strict=True))

    def choose_models(
        self, clients: Clients, server: ServerState, silo_names: Sequence[str]
    ) -> tuple[ServerState, list[Reply]]:
        """Let silos compute their training loss under every model, and assign the best; ties go to the lower index."""
        if self.num_models == 1:
            return server, []
        broadcast = self.make_broadcast(clients, server)
        losses: dict[str, list[float]] = {}
        replies: list[Reply] = []
        for i in range(self.num_models):
            model = broadcast._replace(model_state=get_model(server, i), participants=tuple(silo_names))
            for reply in clients.query(self, LOSS_TASK, model, ("train",)):
                loss = float("inf") if reply.rejected else compute_mean_loss(reply.answers["train"])
                losses.setdefault(reply.silo_name, []).append(loss)
                replies.append(reply)
        choices = {name: values.index(min(values)) for name, values in losses.items() if min(values) < float("inf")}
        assignment = torch.tensor([choices.get(n, i) for n, i in self.get_assignment(server).items()])
        return server.replace(method_state={**server.method_state, ASSIGNMENT: assignment}), replies

    def run_round(self, clients: Clients, server: ServerState) -> ServerState:
        started = time.perf_counter()
        server, queries = self.choose_models(clients, server, self.select_participants(clients, server))
        seconds = time.perf_counter() - started
        after = record_query_cost(super().run_round(clients, server), queries, seconds)
        models = {n: t for n, t in after.model_state.items() if n.startswith(MODEL_PREFIX)}
        after = after.replace(
            model_state={n: t for n, t in after.model_state.items() if n not in models},
            method_state={**after.method_state, **models},
        )
        trained = {n: i for n, i in self.get_assignment(server).items() if n in after.open_record["participants"]}
        return record_models(after, "trained_model", trained)

    def average_replies(
        self, clients: Clients, server: ServerState, broadcast: Broadcast, *, evaluate: bool
    ) -> tuple[Tensors, list[Reply]]:
        averaged: Tensors = {}
        replies: list[Reply] = []
        for i, own in enumerate(self.make_broadcasts(clients, server)):
            participants = tuple(n for n in broadcast.participants if n in own.participants)
            model_state = own.model_state
            if participants:
                own = broadcast._replace(model_state=model_state, participants=participants)
                model_state, own_replies = super().average_replies(clients, server, own, evaluate=evaluate)
                replies += own_replies
            averaged |= {f"{MODEL_PREFIX}{i}.{n}" if i else n: t for n, t in model_state.items()}
        return averaged, replies

    def evaluate_clients(self, clients: Clients, server: ServerState) -> tuple[ServerState, dict[str, Evaluations]]:
        started = time.perf_counter()
        server, queries = self.choose_models(clients, server, server.silo_names)
        server = record_query_cost(server, queries, time.perf_counter() - started)
        return super().evaluate_clients(clients, server)

    def complete_open_record(self, server: ServerState, evaluations: Mapping[str, Evaluations]) -> ServerState:
        if server.open_record:
            recorded = {*server.open_record["silos"], *evaluations}
            models = {n: i for n, i in self.get_assignment(server).items() if n in recorded}
            server = record_models(server, "evaluated_model", models)
        return super().complete_open_record(server, evaluations)

    # --- the client ---------------------------------------------------------------------------------------------

    def personal_tensor_names(self, net: nn.Module) -> Collection[str]:
        return super().personal_tensor_names(net) if self.num_models == 1 else list(net.state_dict())

    @property
    def client_tasks(self) -> Mapping[str, ClientTask]:
        return {**super().client_tasks, LOSS_TASK: ClientTask(self.sum_training_losses)}

    def sum_training_losses(self, model: ClientModel, batch: Batch) -> Tensors:
        """Return the sum of the cross-entropy over examples, and their number."""
        loss = compute_task_loss(model, model(batch.x).logits, batch.y).double() * len(batch.y)
        return {"num_examples": torch.full_like(loss, len(batch.y)), "loss": loss}


def get_model(server: ServerState, index: int) -> Tensors:
    """Return the tensors of one model, by the network's names."""
    if not index:
        return server.model_state
    return {n: server.method_state[f"{MODEL_PREFIX}{index}.{n}"] for n in server.model_state}


def compute_mean_loss(sums: Tensors) -> float:
    """Return the mean loss; a loss that is not finite is never the lowest."""
    loss = float(sums["loss"] / sums["num_examples"])
    return float("inf") if math.isnan(loss) else loss


def shuffle_values(tensor: torch.Tensor, noise_key: int) -> torch.Tensor:
    """Return a tensor with its values in a random order: another draw from the distribution of initial weights."""
    order = permutation(noise_key, tensor.numel()).to(tensor.device)
    return tensor.flatten()[order].reshape(tensor.shape)


def record_models(server: ServerState, entry: str, assignment: Mapping[str, int]) -> ServerState:
    """Add the index of a model to the entries of silos in the open record."""
    silos: dict[str, dict[str, Any]] = server.open_record["silos"]
    changed = {n: {**silos.get(n, start_entry()), entry: i} for n, i in assignment.items()}
    return server.replace(open_record={**server.open_record, "silos": {**silos, **changed}})
