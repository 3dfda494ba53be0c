"""FCCL: silos share their logits on public images instead of weights, and distill their own earlier models.

Huang, Ye, Du, Learn from others and be yourself in heterogeneous federated learning (CVPR 2022). The authors' silos
have different networks; `docs/deviations.md` lists what is ours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uefl.algorithms.fedavg import FedAvg
from uefl.algorithms.requirements import require_single_network, require_training_data
from uefl.core.errors import InputError
from uefl.core.federation import (
    Batch,
    Broadcast,
    ClientModel,
    Examples,
    Phase,
    Reply,
    ServerState,
    Silo,
    Tensors,
    Update,
)
from uefl.core.field_rules import setting
from uefl.core.noise import evaluation_mode

LOGITS = "public.logits"  # [P, C] of the public images: a silo's in its reply, their mean at the server and in extras
PRETRAINED_PREFIX, PREVIOUS_PREFIX = "pretrained.", "previous."  # of the teachers in a silo's client state
NUM_ROUNDS = "num_rounds"  # rounds in which a silo has trained, in its client state
MIN_PUBLIC_IMAGES = 2  # logits are standardized over a batch


@dataclass(frozen=True, kw_only=True)
class FCCL(FedAvg):
    """Local training after a phase on public images, where each silo's logits follow the mean logits of all silos.

    Every silo has its own network. The first rounds train it alone and give the teacher of its own domain; the network
    of the last round is the second teacher. The method is personalized: there is no shared model.
    """

    public_epochs: int = setting(1, "Passes over the public images per round.", at_least=0)
    off_diagonal_weight: float = setting(
        0.0051, "Weight of the products of different classes in the cross-correlation loss.", at_least=0
    )
    intra_weight: float = setting(1.0, "Weight of the distillation of the pre-trained network.", at_least=0)
    inter_weight: float = setting(1.0, "Weight of the distillation of the last round's network.", at_least=0)
    pretrain_rounds: int = setting(1, "First rounds, in which every silo trains alone.", at_least=1)

    codebook_unsupported_reason: ClassVar[str] = "codewords are weights, and no weight leaves a silo"
    needs_public_images: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.local.batch_size < 2:
            raise InputError(
                f"FCCL correlates logits within a batch: local.batch_size={self.local.batch_size} must be at least 2"
            )

    # --- the server ---------------------------------------------------------------------------------------------

    def prepare_silos(self, silos: Sequence[Silo]) -> Sequence[Silo]:
        for silo in silos:
            if silo.public is None or len(silo.public) < MIN_PUBLIC_IMAGES:
                raise InputError(
                    f"FCCL needs at least {MIN_PUBLIC_IMAGES} public images; set public_images=<number>, "
                    "and public_data=<data set> to choose them"
                )
        return require_training_data(silos, "FCCL", "network")

    def adapt_network(self, net: nn.Module) -> nn.Module:
        return super().adapt_network(require_single_network(net, "FCCL"))

    def make_extras(self, server: ServerState) -> Tensors:
        if server.round < self.pretrain_rounds or LOGITS not in server.method_state:
            return {}
        return {LOGITS: server.method_state[LOGITS]}

    def update_method_state(self, server: ServerState, replies: Sequence[Reply]) -> ServerState:
        """Store the mean logits of the round, without those of another shape than before, or than most silos'."""
        logits = [reply.extras[LOGITS] for reply in replies if LOGITS in reply.extras]
        if not logits:
            return server
        earlier = server.method_state.get(LOGITS)
        shapes = Counter(tuple(t.shape) for t in logits)
        shape = shapes.most_common(1)[0][0] if earlier is None else tuple(earlier.shape)
        if shape not in shapes:
            return server
        mean = torch.stack([t for t in logits if tuple(t.shape) == shape]).mean(0)
        return server.replace(method_state={**server.method_state, LOGITS: mean})

    # --- the client ---------------------------------------------------------------------------------------------

    def client_state_names(self, net: nn.Module) -> Collection[str]:
        return list(net.state_dict())

    def initial_client_state(self, net: nn.Module, noise_key: int) -> Tensors:
        del noise_key
        tensors = select_floats(net.state_dict())
        prefixes = (PRETRAINED_PREFIX, PREVIOUS_PREFIX)
        zeros = {prefix + n: torch.zeros_like(t) for prefix in prefixes for n, t in tensors.items()}
        return {**zeros, NUM_ROUNDS: torch.zeros(())}

    def make_phases(self, broadcast: Broadcast) -> Sequence[Phase]:
        local = list(super().make_phases(broadcast))
        if LOGITS not in broadcast.extras or not self.public_epochs:
            return local
        return [Phase([Update(self.collaborative_loss)], self.public_epochs, is_public=True), *local]

    def collaborative_loss(self, model: ClientModel, batch: Batch) -> Tensor:
        """Return the distance of the cross-correlation of own and mean logits from 1 on and −1 off its diagonal."""
        logits = model(batch.x).logits[0]
        mean_logits = F.embedding(batch.y, model.extras[LOGITS].to(logits.dtype))  # y: positions of public images
        return cross_correlation_loss(logits, mean_logits, self.off_diagonal_weight)

    def loss(self, model: ClientModel, batch: Batch) -> Tensor:
        # L = CE + KL(pre-trained ‖ own) + KL(last round's ‖ own), with a teacher as soon as there is one
        prediction = model(batch.x)
        total = self.task_and_code_loss(model, prediction.logits, prediction, batch)
        has_teachers = (model.client_state[NUM_ROUNDS] >= self.pretrain_rounds).to(total.dtype)
        for prefix, weight in ((PRETRAINED_PREFIX, self.intra_weight), (PREVIOUS_PREFIX, self.inter_weight)):
            if weight:
                teacher = predict_as_teacher(model, prefix, batch.x)
                total = total + weight * has_teachers * kl_divergence(teacher, prediction.logits[0])
        return total

    def finish_training(
        self, model: ClientModel, examples: Examples, *, num_steps: int, lr: float
    ) -> tuple[Tensors, Tensors]:
        """Return the logits of the public images, and the teachers of the next round."""
        del examples, num_steps, lr
        public_images = model.public_images
        assert public_images is not None
        batches = torch.split(public_images, self.local.eval_batch_size)
        logits = torch.cat([model(x).logits[0] for x in batches])
        num_rounds, tensors = model.client_state[NUM_ROUNDS], select_floats(model.state_dict())
        earlier = {n: model.client_state[PRETRAINED_PREFIX + n] for n in tensors}
        is_pretraining = num_rounds < self.pretrain_rounds
        pretrained = {PRETRAINED_PREFIX + n: torch.where(is_pretraining, t, earlier[n]) for n, t in tensors.items()}
        previous = {PREVIOUS_PREFIX + n: t.clone() for n, t in tensors.items()}
        return {LOGITS: logits}, {**pretrained, **previous, NUM_ROUNDS: num_rounds + 1}


def select_floats(tensors: Tensors) -> Tensors:
    """Return the tensors that are not counters."""
    return {n: t for n, t in tensors.items() if t.is_floating_point()}


def predict_as_teacher(model: ClientModel, prefix: str, x: Tensor) -> Tensor:
    """Return logits of a network in the client state, in evaluation mode."""
    tensors = {n.removeprefix(prefix): t for n, t in model.client_state.items() if n.startswith(prefix)}
    with evaluation_mode(model.net), torch.no_grad():
        logits: Tensor = model.with_params(tensors)(x).logits[0]
    return logits


def kl_divergence(teacher_logits: Tensor, logits: Tensor) -> Tensor:
    """Return the mean KL(teacher ‖ own) of predictions [B, C]; torch's `kl_div` cannot be stacked."""
    log_p, log_q = teacher_logits.log_softmax(-1), logits.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean()


def cross_correlation_loss(logits: Tensor, mean_logits: Tensor, off_diagonal_weight: float) -> Tensor:
    """Return Σ_d (M_dd − 1)² + w Σ_{d≠e} (M_de + 1)² of the correlations M of two batches of logits [B, C]."""
    correlation = standardize(logits).t() @ standardize(mean_logits) / len(logits)
    diagonal = correlation.diagonal()
    off_diagonal = (correlation + 1).square().sum() - (diagonal + 1).square().sum()
    return (diagonal - 1).square().sum() + off_diagonal_weight * off_diagonal


def standardize(logits: Tensor) -> Tensor:
    """Return logits with mean 0 and deviation 1 over the batch; a constant one becomes 0."""
    return (logits - logits.mean(0)) / (logits.var(0) + 1e-8).sqrt()
