"""DisTrans: every silo learns an offset for its images, and the model receives two views of each image.

Yuan et al., Addressing heterogeneity in federated learning via distributional transformation (ECCV 2022).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from uefl.algorithms.fedavg import FedAvg
from uefl.algorithms.requirements import require_single_network
from uefl.core.codebook import to_tokens
from uefl.core.federation import Broadcast, Tensors, Update
from uefl.core.field_rules import setting
from uefl.core.noise import uniform

OFFSET_NAME = "encoder.offset"


class TwoViews(nn.Module):
    """An encoder with two views of an image: blended with the offset, and away from it.

    The offset has the shape of the silo's images, gray or color.
    """

    def __init__(self, encoder: nn.Module, input_shape: Sequence[int], blend: float) -> None:
        super().__init__()
        self.encoder, self.blend = encoder, blend
        self.offset = nn.Parameter(standardize_uniform(torch.rand(tuple(input_shape))))

    def make_views(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return (1 − a) x + a δ and (1 + a) x − a δ, whose mean is x."""
        return (1 - self.blend) * x + self.blend * self.offset, (1 + self.blend) * x - self.blend * self.offset

    def forward(self, x: Tensor) -> Tensor:
        tokens = to_tokens(self.encoder(torch.cat(self.make_views(x))))  # one pass: [2B, l, d]
        return torch.cat(tokens.chunk(2), -1)  # [B, l, 2d]


@dataclass(frozen=True, kw_only=True)
class DisTrans(FedAvg):
    """FedAvg on two views of every image, made with an offset that each silo learns.

    A silo that has not trained uses its initial offset; with `offsets=average` all silos use the average offset.
    """

    blend: float = setting(0.2, "Blend a of the offset in an image.", at_least=0)
    offsets: Literal["local", "average"] = setting(
        "local", "Offsets: stored at each silo, or averaged like any other weight."
    )
    offset_lr_multiplier: float = setting(
        0.2, "Learning rate of the offset as a multiple of the model's (authors' code: 0.001 and 0.005).", at_least=0
    )

    codebook_unsupported_reason: ClassVar[str] = (
        "its offsets already give every silo its own features, codewords would do so twice"
    )

    def adapt_network(self, net: nn.Module) -> nn.Module:
        single = require_single_network(net, "DisTrans")
        encoder = TwoViews(single.encoder, single.input_shape, self.blend)
        return super().adapt_network(single.rebuild(encoder=encoder))

    def client_state_names(self, net: nn.Module) -> Collection[str]:
        return [*super().client_state_names(net), *([OFFSET_NAME] if self.offsets == "local" else [])]

    def initial_client_state(self, net: nn.Module, noise_key: int) -> Tensors:
        if self.offsets == "average":
            return {}
        return {OFFSET_NAME: standardize_uniform(uniform(noise_key, net.get_parameter(OFFSET_NAME).shape))}

    def make_updates(self, broadcast: Broadcast) -> Sequence[Update]:
        del broadcast
        return [Update(self.loss, lr_multiplier=lambda n: self.offset_lr_multiplier if n == OFFSET_NAME else 1.0)]


def standardize_uniform(u: Tensor) -> Tensor:
    """Standardize uniform pixels in [0, 1] to mean 0 and deviation 1, as images are."""
    return (u - 0.5) * 12**0.5
