"""FedAvg: the federated round that every method shares.

McMahan et al., Communication-efficient learning of deep networks from decentralized data (AISTATS 2017).
A method is its difference from this file. A codebook is a part that any of them may carry (`codebook_hooks.py`).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from uefl.algorithms.codebook_hooks import NO_CODEBOOK, CodebookHooks
from uefl.algorithms.extensible_codebook import ExtensibleCodebook
from uefl.algorithms.requirements import require_training_data
from uefl.algorithms.round_record import complete_record, record_query_cost, record_sample, start_record
from uefl.core import noise_addresses as addresses
from uefl.core.aggregate import WeightedMean, find_non_finite, find_reply_error
from uefl.core.errors import InputError
from uefl.core.federation import (
    Batch,
    Broadcast,
    ClientModel,
    Clients,
    ClientTask,
    Evaluations,
    Examples,
    Phase,
    Reply,
    ServerState,
    Silo,
    Split,
    Tensors,
    Update,
    find_row,
)
from uefl.core.field_rules import check_ranges, setting
from uefl.core.label_prior import LOG_PRIOR, adjust_logits, compute_log_prior
from uefl.core.local import LocalTraining
from uefl.core.metrics import DEFAULT_SPECIFICITY, compute_metric_sums, find_histogram_error
from uefl.core.noise import derive_key, permutation

if TYPE_CHECKING:
    from uefl.core.codebook import QuantizedFeatures
    from uefl.models.network import Prediction

BatchNorm = Literal["average", "local", "not_averaged", "personal"]
BATCH_NORM_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True, kw_only=True)
class FedAvg:
    """Train at every silo, then average: θ ← Σ n_k/n θ_k (Eq. 3)."""

    rounds: int = setting(14, "Communication rounds of the first iteration.", at_least=1)
    extra_rounds: int = setting(8, "Communication rounds of every further iteration.", at_least=0)
    iterations: int = setting(
        3, "Iterations; every method trains rounds + (iterations − 1) · extra_rounds rounds.", at_least=1
    )
    clients_per_round: int = setting(0, "Silos per round, drawn anew each round; 0 takes all.", at_least=0)
    aggregation_weights: Literal["num_examples", "uniform"] = setting(
        "num_examples", "Weight of a silo in the average: n_k/n or 1/K (D11)."
    )
    batch_norm: BatchNorm = setting(
        "average",
        "Batch norm: averaged; statistics stored at the silo (local) or left at their initial values (not_averaged); "
        "or scale, shift and statistics stored at the silo (personal, as FedBN).",
    )
    mc_samples: int = setting(20, "Monte Carlo dropout samples T per prediction.", at_least=1)
    specificity: float = setting(
        DEFAULT_SPECIFICITY, "Specificity at which records give the sensitivity, for two classes.", above=0, below=1
    )
    logit_adjustment: Literal["none", "local"] = setting(
        "none",
        "Add the log of a silo's own class frequencies to its logits, in the cross-entropy of its own labels and in "
        "its predictions; they never leave the silo, and a silo without training examples adds nothing.",
    )
    evaluate_every: int = setting(
        1, "Rounds between evaluations; decisions and the last round are always evaluated.", at_least=1
    )
    evaluate_last: int = setting(
        1,
        "Rounds at the end that are evaluated in any case; 5: those of the summary's mean.",
        at_least=1,
        in_run_id="when changed",
    )
    eval_clients: int = setting(
        0,
        "Silos that measure the model of an evaluated round, the last one included, drawn anew each time; silos "
        "without training data always measure; 0 takes all.",
        at_least=0,
        zero="all",
        in_run_id="when changed",
    )
    evaluate_train: bool = setting(False, "Evaluate on training examples too, as neural collapse needs; costs time.")
    evaluate_local: bool = setting(True, "Evaluate each silo's model before averaging too; costs time (Fig. 1).")
    local: LocalTraining = setting(default_factory=LocalTraining, help_text="Local training of a client.")
    codebook: ExtensibleCodebook | None = setting(
        None, "Codebook between encoder and classifier; `on` adds one with UEFL's settings."
    )

    codebook_unsupported_reason: ClassVar[str] = ""  # why a method cannot have a codebook
    eval_clients_unsupported_reason: ClassVar[str] = ""  # why every silo has to measure
    needs_public_images: ClassVar[bool] = False  # a recipe then has public images
    network_unsupported_reason: ClassVar[str] = ""  # why a method cannot run where data stay at their silos
    # Whether silos without training data count in decisions by validation; not if their domain is to be unseen.
    validates_untrained_silos: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.codebook and self.codebook_unsupported_reason:
            raise InputError(f"{type(self).__name__} takes no codebook: {self.codebook_unsupported_reason}")
        reason = self.eval_clients_unsupported_reason
        if self.codebook:
            reason = "the decisions on a codebook need the measurements of all silos"
        if self.eval_clients and reason:
            raise InputError(f"eval_clients={self.eval_clients} must be 0 here: {reason}")
        self.codebook_hooks.check_rounds(self)

    @property
    def codebook_hooks(self) -> CodebookHooks:
        """What the round asks of a codebook; without one, every hook does nothing."""
        return self.codebook or NO_CODEBOOK

    # --- before the first round ---------------------------------------------------------------------------------

    @property
    def total_rounds(self) -> int:
        """All rounds of a run, equal for all methods in a comparison."""
        return self.rounds + (self.iterations - 1) * self.extra_rounds

    @property
    def shared_rounds(self) -> int:
        """The first so many rounds, which train the model and the codewords that all silos share."""
        return self.total_rounds

    def lr_at(self, round_number: int) -> float:
        """Return the learning rate of a round, counted from 1."""
        return self.local.lr_at(round_number, self.total_rounds)

    def add_rounds(self, num_rounds: int) -> FedAvg:
        """Return this method with further rounds for a finished run, all in one iteration."""
        return replace(self, rounds=self.total_rounds + num_rounds, iterations=1, extra_rounds=0)

    def adapt_local_training(self, local: LocalTraining) -> LocalTraining:
        """Return a recipe's local training in the form that this method needs."""
        return local

    def prepare_silos(self, silos: Sequence[Silo]) -> Sequence[Silo]:
        """Return the silos that take part."""
        self.codebook_hooks.check_silos(silos)
        if self.batch_norm in ("local", "personal"):
            return require_training_data(silos, f"batch_norm={self.batch_norm}", "batch norm")
        return silos

    def adapt_network(self, net: nn.Module) -> nn.Module:
        """Add to the network what this method needs."""
        return self.codebook_hooks.adapt_network(net)

    def initialize_server(self, clients: Clients) -> ServerState:
        """Return the server's state before the first round."""
        silo_names, local_names = tuple(clients.num_examples), set(self.client_state_names(clients.net))
        model_state = {n: t for n, t in clients.initial_model_state().items() if n not in local_names}
        server = ServerState(silo_names, model_state, torch.ones(len(silo_names), 0, dtype=torch.bool))
        return self.codebook_hooks.initialize_codebook(self, clients, server)

    # --- the server ---------------------------------------------------------------------------------------------

    def step(self, clients: Clients, server: ServerState) -> ServerState:
        """Run one round and what follows it."""
        server = self.run_round(clients, server.replace(completed_records=()))
        server = self.codebook_hooks.after_round(self, clients, server)
        if server.round == self.total_rounds:
            server = self.finish_rounds(clients, server)
        if server.open_record and server.round == self.total_rounds:  # no later round evaluates the last model
            server = self.complete_open_record(*self.evaluate_clients(clients, server))
        return server

    def finish_rounds(self, clients: Clients, server: ServerState) -> ServerState:
        """Do what follows the last round, before its model is evaluated."""
        del clients
        return server

    def without_own_models(self) -> FedAvg:
        """Return this method without models of silos' own, where what all silos share is a model without them."""
        return self

    def make_shared_method(self) -> FedAvg:
        """Return the method whose model all silos share, for predictions without a silo; silos may join another one."""
        return self.without_own_models()

    def resume_server(self, server: ServerState) -> ServerState:
        """Return the server's state with which further rounds of a finished run start."""
        return server

    def resume_client_state(self, net: nn.Module, client_state: Tensors) -> Tensors:
        """Return the client state with which a silo starts further rounds of a finished run."""
        del net
        return client_state

    def run_round(self, clients: Clients, server: ServerState) -> ServerState:
        """Broadcast θ, train at the participants, average their replies."""
        started = time.perf_counter()
        participants = self.select_participants(clients, server)
        # All silos train and measure: the replies to the training message bring the measurements.
        measure_in_training = participants == server.silo_names == self.select_evaluated(clients, server)
        is_last = server.round > self.total_rounds - self.evaluate_last or server.round == self.shared_rounds
        is_evaluated = is_last or server.round % self.evaluate_every == 0
        if server.open_record and not is_evaluated:
            server = self.complete_open_record(server, {})
        elif server.open_record and not measure_in_training:
            server = self.complete_open_record(*self.evaluate_clients(clients, server))
        broadcast = self.make_broadcast(clients, server)._replace(round=server.round + 1, participants=participants)
        model_state, replies = self.average_replies(
            clients, server, broadcast, evaluate=is_evaluated and measure_in_training
        )
        server = self.complete_open_record(server, {r.silo_name: r.evaluations for r in replies})
        warning = find_non_finite(model_state)  # finite replies may overflow in the average
        server = server.replace(model_state=server.model_state if warning else model_state, round=broadcast.round)
        server = self.update_finite_method_state(server, [r for r in replies if not r.rejected])
        record = start_record(server, replies, time.perf_counter() - started)
        if warning:
            record["warning"] = f"the average of {warning} is not finite; the model keeps its previous values"
        return server.replace(open_record=record)

    def average_replies(
        self, clients: Clients, server: ServerState, broadcast: Broadcast, *, evaluate: bool
    ) -> tuple[Tensors, list[Reply]]:
        """Train at the participants; return the average of their valid replies, and all replies without tensors."""
        del server
        mean, replies = WeightedMean(broadcast.model_state), []
        for reply in clients.fit(self, broadcast, evaluate=evaluate):
            access_row = broadcast.access[find_row(broadcast.silo_names, reply.silo_name)]
            error = reply.rejected or find_reply_error(reply, broadcast.model_state, access_row)
            if not error:
                mean.add(self.select_averaged_tensors(reply.tensors), self.aggregation_weight(reply), access_row)
            replies.append(reply._replace(tensors={}, rejected=error))
        return mean.result(), replies

    def select_participants(self, clients: Clients, server: ServerState) -> tuple[str, ...]:
        """Return the silos of the next round: all that have training data, or as many as set, drawn by the seed."""
        trainable = [name for name, n in clients.num_examples.items() if n]
        if not 0 < self.clients_per_round < len(trainable):
            return tuple(trainable)
        noise_key = derive_key(clients.seed, server.round + 1, addresses.PARTICIPANTS)
        return tuple(sorted(draw_names(noise_key, trainable, self.clients_per_round)))

    def select_evaluated(self, clients: Clients, server: ServerState) -> tuple[str, ...]:
        """Return the silos that measure the present model: all, or as many as set, drawn by seed and round.

        Silos without training data are few and what a run is about, so they always measure.
        """
        trainable = [name for name, n in clients.num_examples.items() if n]
        if not 0 < self.eval_clients < len(trainable):
            return server.silo_names
        noise_key = derive_key(clients.seed, server.round, addresses.EVALUATED_SILOS)
        drawn = draw_names(noise_key, trainable, self.eval_clients)
        return tuple(sorted((*drawn, *(name for name, n in clients.num_examples.items() if not n))))

    def make_broadcast(self, clients: Clients, server: ServerState) -> Broadcast:
        """Return what every silo receives."""
        del clients
        return Broadcast(
            server.round,
            server.model_state,
            server.silo_names,
            server.access,
            self.make_extras(server),
            server.silo_names,
            self.lr_at(server.round + 1),
        )

    def make_broadcasts(self, clients: Clients, server: ServerState) -> Sequence[Broadcast]:
        """Return what silos receive: one broadcast to all, unless silos have different models."""
        return [self.make_broadcast(clients, server)]

    def make_extras(self, server: ServerState) -> Tensors:
        """Return the tensors to send beside the weights."""
        del server
        return {}

    def aggregation_weight(self, reply: Reply) -> float:
        """Return the weight of a reply in the average."""
        return float(reply.num_examples) if self.aggregation_weights == "num_examples" else 1.0

    def select_averaged_tensors(self, tensors: Tensors) -> Tensors:
        """Return those tensors of a reply that are averaged."""
        if self.batch_norm == "average":
            return tensors
        return {n: t for n, t in tensors.items() if not n.endswith(BATCH_NORM_STATISTICS)}

    def update_method_state(self, server: ServerState, replies: Sequence[Reply]) -> ServerState:
        """Use the extras of valid replies."""
        del replies
        return server

    def update_finite_method_state(self, server: ServerState, replies: Sequence[Reply]) -> ServerState:
        """Use the extras of valid replies, but leave out those that make the method's state infinite."""
        updated = self.update_method_state(server, replies)
        if not find_non_finite(updated.method_state):
            return updated
        alone = [(reply, self.update_method_state(server, [reply])) for reply in replies]
        finite = [reply for reply, state in alone if not find_non_finite(state.method_state)]
        updated = self.update_method_state(server, finite)
        return server if find_non_finite(updated.method_state) else updated

    def evaluate_clients(self, clients: Clients, server: ServerState) -> tuple[ServerState, dict[str, Evaluations]]:
        """Evaluate the present model at all silos, or at those that are drawn; the record counts the cost."""
        started, broadcasts = time.perf_counter(), self.make_broadcasts(clients, server)
        evaluated = self.select_evaluated(clients, server)
        if is_sample := evaluated != server.silo_names:
            broadcasts = [b._replace(participants=tuple(sorted({*evaluated} & {*b.participants}))) for b in broadcasts]
        replies = [
            r for b in broadcasts if b.participants for r in clients.query(self, "evaluate", b, self.eval_splits)
        ]
        # In a round, evaluations travel with the reply and are not counted, so they are not counted here either.
        server = record_query_cost(server, [r._replace(sent_bytes=0) for r in replies], time.perf_counter() - started)
        evaluations = {r.silo_name: Evaluations(r.answers) for r in replies if not r.rejected}
        server = record_sample(server, len(evaluations)) if is_sample else server
        evaluations = self.codebook_hooks.evaluate_targets(self, clients, server, evaluations)
        return server, {name: self.drop_target_validation(clients, name, e) for name, e in evaluations.items()}

    def drop_target_validation(self, clients: Clients, silo_name: str, evaluations: Evaluations) -> Evaluations:
        """Return the evaluations of a silo; those of a target leave out validation, which uses labels (D15)."""
        if clients.num_examples[silo_name] or self.validates_untrained_silos:
            return evaluations
        received = {split: sums for split, sums in evaluations.received.items() if split != "validation"}
        return evaluations._replace(received=received)

    def complete_open_record(self, server: ServerState, evaluations: Mapping[str, Evaluations]) -> ServerState:
        """Complete the record of the last round with the evaluations of its model."""
        return complete_record(server, evaluations, self.codebook_hooks.code_loss_weight, self.specificity)

    # --- the client ---------------------------------------------------------------------------------------------

    def initialize_client(self, initial: Tensors, received: Tensors, client_state: Tensors) -> Tensors:
        """Return the tensors that a silo starts with instead of the received ones."""
        del initial, received, client_state
        return {}

    def make_phases(self, broadcast: Broadcast) -> Sequence[Phase]:
        """Return the phases of the local training."""
        return [Phase(self.make_updates(broadcast), self.local.epochs)]

    def make_updates(self, broadcast: Broadcast) -> Sequence[Update]:
        """Return the updates of one training step."""
        del broadcast
        return [Update(self.loss)]

    def loss(self, model: ClientModel, batch: Batch) -> Tensor:
        """Return the loss of a batch."""
        prediction = model(batch.x)
        return self.task_and_code_loss(model, prediction.logits, prediction, batch)

    def task_and_code_loss(
        self, model: ClientModel, logits: Tensor, prediction: Prediction | QuantizedFeatures, batch: Batch
    ) -> Tensor:
        """Return L_task + L_code; L_code is 0 without a codebook."""
        return compute_task_loss(model, logits, batch.y) + self.codebook_hooks.loss(prediction)

    def adjust_gradients(self, model: ClientModel, gradients: Tensors) -> Tensors:
        """Change gradients before the optimizer uses them."""
        del model
        return gradients

    def finish_training(
        self, model: ClientModel, examples: Examples, *, num_steps: int, lr: float
    ) -> tuple[Tensors, Tensors]:
        """Return extras to send and client state to store."""
        del model, examples, num_steps, lr
        return {}, {}

    def pack_reply(self, tensors: Tensors, extras: Tensors) -> tuple[Tensors, Tensors]:
        """Return the tensors and extras that leave the silo."""
        return tensors, extras

    def client_state_names(self, net: nn.Module) -> Collection[str]:
        """Return names of the network's tensors that stay at the silo."""
        if self.batch_norm == "local":
            return [n for n in net.state_dict() if n.endswith(BATCH_NORM_STATISTICS)]
        if self.batch_norm == "personal":
            # By type, since names differ between encoders, such as `downsample.1`.
            layers = [name for name, layer in net.named_modules() if isinstance(layer, _BatchNorm)]
            return [n for n in net.state_dict() if n.rpartition(".")[0] in layers]
        return ()

    def personal_tensor_names(self, net: nn.Module) -> Collection[str]:
        """Return those names among the tensors that stay at the silo that predictions use."""
        return self.client_state_names(net)

    def select_prediction_network(self, net: nn.Module) -> nn.Module:
        """Return the part of a silo's network that predicts."""
        return net

    def initial_client_state(self, net: nn.Module, noise_key: int) -> Tensors:
        """Return client state before the first training."""
        del net, noise_key
        return {}

    @property
    def uses_label_prior(self) -> bool:
        """Whether a silo adds its own log π_k to its logits."""
        return self.logit_adjustment == "local"

    def compute_label_state(self, net: nn.Module, y: Tensor) -> Tensors:
        """Return client state that depends on the silo's training labels alone: log π_k, if it is used."""
        if not self.uses_label_prior:
            return {}
        return {LOG_PRIOR: compute_log_prior(torch.bincount(y.cpu(), minlength=cast(int, net.num_classes)))}

    @property
    def eval_splits(self) -> Sequence[Split]:
        """Splits on which a silo evaluates the model it received."""
        return ("train", "validation", "test") if self.evaluate_train else ("validation", "test")

    @property
    def local_eval_splits(self) -> Sequence[Split]:
        """Splits on which a silo evaluates its own model before averaging."""
        return ("test",) if self.evaluate_local else ()

    @property
    def client_tasks(self) -> Mapping[str, ClientTask]:
        """The tasks that a server may query, by name."""
        evaluate = ClientTask(self.evaluate, find_error=lambda answer, _blank, _n: find_histogram_error(answer))
        return {"evaluate": evaluate, **self.codebook_hooks.client_tasks(self)}

    def evaluate(self, model: ClientModel, batch: Batch) -> Tensors:
        """Return sums from which all metrics follow."""
        return compute_metric_sums(model, batch, self.mc_samples)


def draw_names(noise_key: int, names: Sequence[str], count: int) -> list[str]:
    """Draw some of the names without replacement."""
    return [names[i] for i in permutation(noise_key, len(names))[:count].tolist()]


def compute_task_loss(model: ClientModel, logits: Tensor, y: Tensor) -> Tensor:
    """Return L_task of a silo's own labeled examples, with its logit adjustment, if there is one."""
    return ensemble_cross_entropy(adjust_logits(model, logits), y)


def ensemble_cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Return the cross-entropy of [M, B, C] against [B], summed over the members M: each has its own gradient."""
    return F.cross_entropy(logits.flatten(0, 1), y.expand(len(logits), -1).flatten()) * len(logits)
