"""VHL: all silos also train on the same labeled noise images, and align their classes with its classes.

Tang et al., Virtual homogeneity learning: defending against data heterogeneity in federated learning (ICML 2022).
The virtual images are the smooth Gaussian noise of the authors' code, not images of an untrained StyleGAN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uefl.algorithms.fedavg import FedAvg, compute_task_loss
from uefl.algorithms.noise_images import make_noise_images, resize_like
from uefl.algorithms.requirements import require_single_network
from uefl.core import noise_addresses as addresses
from uefl.core.errors import InputError
from uefl.core.federation import Batch, Broadcast, ClientModel, Clients, ServerState, Tensors, Update
from uefl.core.field_rules import setting
from uefl.core.noise import RandomChoice

VIRTUAL = addresses.VIRTUAL_IMAGES  # also the name of the tensor in extras


@dataclass(frozen=True, kw_only=True)
class VHL(FedAvg):
    """FedAvg with virtual classes beside the real ones: V = C further outputs, and features aligned per class.

    The server makes the virtual images from the seed and sends them in every round at 8×8; silos enlarge them.
    """

    virtual_weight: float = setting(1.0, "Weight of the cross-entropy of virtual images.", at_least=0)
    align_weight: float = setting(1.0, "Weight of the alignment of real with virtual features.", at_least=0)
    contrast_weight: float = setting(0.1, "Weight of the contrast among virtual features.", at_least=0)
    images_per_class: int = setting(200, "Virtual images per class.", at_least=1)
    temperature: float = setting(0.07, "Temperature τ of the contrastive losses.", above=0)
    align_epochs: int = setting(5, "Local epochs with alignment, the first ones of a round.", at_least=0)

    codebook_unsupported_reason: ClassVar[str] = (
        "virtual images would occupy codewords, and alignment removes what a silo's own codewords separate"
    )

    def adapt_network(self, net: nn.Module) -> nn.Module:
        single = require_single_network(net, "VHL")
        if len(single.input_shape) != 3:
            raise InputError("VHL makes virtual images and cannot train on a table")
        built = single.rebuild(num_classes=2 * single.num_classes)
        built.choice = RandomChoice()
        return super().adapt_network(built)

    def initialize_server(self, clients: Clients) -> ServerState:
        server, net = super().initialize_server(clients), require_single_network(clients.net, "VHL")
        images = make_noise_images(
            clients.seed, VIRTUAL, net.num_classes // 2, self.images_per_class, net.input_shape[0]
        )
        return server.replace(method_state={**server.method_state, VIRTUAL: images})

    def make_extras(self, server: ServerState) -> Tensors:
        return {VIRTUAL: server.method_state[VIRTUAL]}

    def make_updates(self, broadcast: Broadcast) -> Sequence[Update]:
        del broadcast
        return [Update(self.loss, per_epoch=True)]

    def loss(self, model: ClientModel, batch: Batch) -> Tensor:
        n, images = len(batch.y), model.extras[VIRTUAL]
        index = model.call("choice", (n,), len(images))
        v = index // self.images_per_class  # the virtual class, not shifted
        x = torch.cat([batch.x, resize_like(images[index], batch.x)])  # one pass: batch norm uses both
        z = model.call("encode_and_quantize", x).z  # [2B, l, d]
        logits, features = model.call("classifier", z.flatten(1)), z.mean(1)  # [2B, C + V], [2B, d]
        # L = CE(real) + CE(virtual, shifted labels) + L_align + 0.1 L_virt
        real = compute_task_loss(model, logits[:n].unsqueeze(0), batch.y)
        total = real + self.virtual_weight * F.cross_entropy(logits[n:], v + logits.shape[-1] // 2)
        if batch.epoch >= self.align_epochs:
            return total
        real_features, virtual = F.normalize(features[:n], dim=-1), F.normalize(features[n:], dim=-1)
        # Virtual features are targets here: real class c moves to virtual class c, not the reverse.
        aligned = supervised_contrastive_loss(
            torch.cat([real_features, virtual.detach()]), torch.cat([batch.y, v]), self.temperature
        )
        return (
            total
            + self.align_weight * aligned
            + self.contrast_weight * supervised_contrastive_loss(virtual, v, self.temperature)
        )


def supervised_contrastive_loss(features: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Return the supervised contrastive loss of unit vectors [N, d] (Khosla et al., 2020); 0 without a partner."""
    others = ~torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    partners = (labels[:, None] == labels) & others
    similarity = (features @ features.t()) / temperature
    log_p = similarity - similarity.masked_fill(~others, -torch.inf).logsumexp(1, keepdim=True)
    return -((log_p * partners).sum(1) / partners.sum(1).clamp_min(1)).mean()
