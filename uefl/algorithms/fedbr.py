"""FedBR: pseudo-images of no class reduce the bias of local features and classifiers.

Guo, Tang, Lin, FedBR: improving federated learning on heterogeneous data via local learning bias reduction (ICML 2023).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uefl.algorithms.fedavg import FedAvg, compute_task_loss
from uefl.algorithms.noise_images import make_noise_images, resize_like
from uefl.algorithms.requirements import require_single_network
from uefl.core import noise_addresses as addresses
from uefl.core.federation import (
    Batch,
    Broadcast,
    ClientModel,
    Clients,
    ClientTask,
    ServerState,
    Tensors,
    Update,
)
from uefl.core.field_rules import setting
from uefl.core.noise import RandomChoice, derive_key, evaluation_mode, permutation
from uefl.models.frozen_batch_norm import paused_statistics

PSEUDO = addresses.PSEUDO_IMAGES  # also the name of the tensor in extras
PROJECTION_PREFIX = "projection."


class StepOutputs(NamedTuple):
    """Outputs of one training step."""

    logits: Tensor  # [B, C] of real images
    pseudo_logits: Tensor  # [B, C]
    real_features: Tensor  # [B, d] features, the mean over tokens
    pseudo_features: Tensor  # [B, d]
    received_features: Tensor  # [B, d] of the pseudo-images, by the received model
    pseudo_targets: Tensor  # [B, C] target probabilities of the pseudo-images

    @property
    def contrasted(self) -> tuple[Tensor, Tensor, Tensor]:
        """Features of pseudo-images, the same by the received model, and features of real images."""
        return self.pseudo_features, self.received_features, self.real_features


@dataclass(frozen=True, kw_only=True)
class FedBR(FedAvg):
    """FedAvg with pseudo-images: they belong to no class, and their features stay near those of the received model.

    `mean`: means of 10 images of one silo, queried once at the start, equally many from every silo; these means leave
    the silos. `mixture`: means of 10 proxy images, mixed in every step with a local image. The proxy images are smooth
    noise, since there is no public data set here; no image leaves a silo.
    """

    pseudo_data: Literal["mean", "mixture"] = setting("mean", "Pseudo-images: the paper's RSM or its Mixture.")
    mu: float = setting(0.5, "Weight μ of the contrastive loss in the minimization step.", at_least=0)
    lam: float = setting(1.0, "Weight λ of the cross-entropy of pseudo-images.", at_least=0)
    gamma_max: float = setting(1.0, "Weight γ of the contrastive loss in the maximization step.", at_least=0)
    tau: float = setting(2.0, "Factor τ on cosine similarities in the contrastive loss.", above=0)
    images_per_mean: int = setting(10, "Images per mean.", at_least=1)

    codebook_unsupported_reason: ClassVar[str] = (
        "its pseudo-images must have the same features at every silo, which codewords of single silos prevent"
    )

    # --- the server ---------------------------------------------------------------------------------------------

    def adapt_network(self, net: nn.Module) -> nn.Module:
        built = require_single_network(net, "FedBR")
        d = built.num_features
        built.projection = nn.Sequential(
            *(nn.Linear(d, 2 * d), nn.ReLU()), *(nn.Linear(2 * d, 2 * d), nn.ReLU()), nn.Linear(2 * d, d)
        )
        built.choice = RandomChoice()
        return super().adapt_network(built)

    def initialize_server(self, clients: Clients) -> ServerState:
        server = super().initialize_server(clients)
        images = (
            self.query_image_means(clients, server) if self.pseudo_data == "mean" else self.make_proxy_means(clients)
        )
        return server.replace(method_state={**server.method_state, PSEUDO: images})

    def make_proxy_means(self, clients: Clients) -> Tensor:
        """Return means of noise images: one batch, of 8×8 pixels."""
        channels = require_single_network(clients.net, "FedBR").input_shape[0]
        proxy = make_noise_images(
            clients.seed, PSEUDO, self.local.batch_size, self.images_per_mean, channels, noise_deviation=1.0
        )
        return proxy.reshape(self.local.batch_size, self.images_per_mean, *proxy.shape[1:]).mean(1)

    def query_image_means(self, clients: Clients, server: ServerState) -> Tensor:
        """Return means of silos' images: one batch, equally many from each silo."""
        trainable = tuple(name for name, n in clients.num_examples.items() if n)
        count = torch.tensor(-(-self.local.batch_size // len(trainable)))
        broadcast = self.make_broadcast(clients, server.replace(method_state={PSEUDO: count}))
        broadcast = broadcast._replace(participants=trainable)
        replies = sorted(clients.query(self, "compute_image_means", broadcast, ("train",)), key=lambda r: r.silo_name)
        images = torch.cat([r.answers["train"]["means"] for r in replies if not r.rejected])
        order = permutation(derive_key(clients.seed, PSEUDO), len(images), images.device)
        return images[order[: self.local.batch_size]]

    def make_extras(self, server: ServerState) -> Tensors:
        return {PSEUDO: server.method_state[PSEUDO]}

    # --- the client ---------------------------------------------------------------------------------------------

    @property
    def client_tasks(self) -> Mapping[str, ClientTask]:
        task = ClientTask(self.compute_image_means, needs_full_split=True)
        return {**super().client_tasks, "compute_image_means": task}

    def compute_image_means(self, model: ClientModel, batch: Batch) -> Tensors:
        """Return means of random images, as many as the server asks for."""
        index = model.call("choice", (int(model.extras[PSEUDO]), self.images_per_mean), len(batch.y))
        return {"means": batch.x[index].mean(1)}

    def make_updates(self, broadcast: Broadcast) -> Sequence[Update]:
        del broadcast
        return [
            Update(self.maximization_loss, lambda n: n.startswith(PROJECTION_PREFIX)),
            Update(self.loss, lambda n: not n.startswith(PROJECTION_PREFIX)),
        ]

    def maximization_loss(self, model: ClientModel, batch: Batch) -> Tensor:
        """Return the loss of the maximization step, which trains the projection alone."""
        # The minimization step runs the same images again: only there do they count in the statistics of batch norm.
        with torch.no_grad(), paused_statistics(model.net):
            outputs = self.compute_outputs(model, batch)
        return -self.gamma_max * self.contrastive_loss(model, outputs)

    def loss(self, model: ClientModel, batch: Batch) -> Tensor:
        """Return the loss of the minimization step: L = CE + μ T + λ CE(pseudo-images, no class)."""
        outputs = self.compute_outputs(model, batch)
        task = compute_task_loss(model, outputs.logits.unsqueeze(0), batch.y)
        contrast = self.contrastive_loss(model, outputs)
        return task + self.mu * contrast + self.lam * F.cross_entropy(outputs.pseudo_logits, outputs.pseudo_targets)

    def contrastive_loss(self, model: ClientModel, outputs: StepOutputs) -> Tensor:
        """Return T = −log e^{τ s(e₁,e₂)} / (e^{τ s(e₁,e₂)} + e^{τ s(e₁,e₃)}), pairs by position."""
        e1, e2, e3 = (model.call("projection", f) for f in outputs.contrasted)
        near, far = F.cosine_similarity(e1, e2), F.cosine_similarity(e1, e3)
        return F.softplus(self.tau * (far - near)).mean()

    def compute_outputs(self, model: ClientModel, batch: Batch) -> StepOutputs:
        n, images = len(batch.y), model.extras[PSEUDO]
        x = images[torch.arange(n, device=images.device) % len(images)].to(batch.x.dtype)
        x = resize_like(x, batch.x) if x.shape != batch.x.shape else x
        classes = require_single_network(model.net, "FedBR").num_classes
        target = batch.x.new_full((n, classes), 1 / classes)
        if self.pseudo_data == "mixture":
            index = model.call("choice", (n,), n)
            x = (x + batch.x[index]) / 2
            target = (target + F.one_hot(batch.y[index], classes)) / 2
        z = model.call("encode_and_quantize", torch.cat([batch.x, x])).z  # [2B, l, d], one pass: batch norm uses both
        logits, features = model.call("classifier", z.flatten(1)), z.mean(1)
        # The received model is in evaluation mode: its batch-norm statistics stay, and there is no dropout.
        with evaluation_mode(model.net), torch.no_grad():
            received = model.with_params(model.received_state).call("encode_and_quantize", x).z.mean(1)
        return StepOutputs(logits[:n], logits[n:], features[:n], features[n:], received, target)
