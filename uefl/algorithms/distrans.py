"""DisTrans: every silo shifts its images by an offset of its own, and the model sees them from both sides.

Yuan et al., Addressing heterogeneity in federated learning via distributional transformation (ECCV 2022).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from uefl.algorithms.checks import not_negative, one_network
from uefl.algorithms.fedavg import FedAvg
from uefl.codebook import tokens
from uefl.federation import Broadcast, State, Update
from uefl.noise import uniform

OFFSET = "encoder.offset"


class TwoViews(nn.Module):
    """An encoder that looks at an image twice: blended with the offset, and away from it.

    The offset has the shape of the silo's images, so grey and colour images need nothing else.
    """

    def __init__(self, encoder: nn.Module, shape: Sequence[int], blend: float) -> None:
        super().__init__()
        self.encoder, self.blend = encoder, blend
        self.offset = nn.Parameter(beginning(torch.rand(tuple(shape))))

    def views(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(1 − a) x + a δ and (1 + a) x − a δ: their mean is x, so nothing is lost."""
        return (1 - self.blend) * x + self.blend * self.offset, (1 + self.blend) * x - self.blend * self.offset

    def forward(self, x: Tensor) -> Tensor:
        both = tokens(self.encoder(torch.cat(self.views(x))))  # one pass: [2B, l, d]
        return torch.cat(both.chunk(2), -1)  # [B, l, 2d]


@dataclass(frozen=True, kw_only=True)
class DisTrans(FedAvg):
    """FedAvg on two views of every image, made with an offset that a silo learns and keeps.

    A silo that never trained has the offset it would begin with; with `offsets=mean` it has everybody's.
    """

    blend: float = 0.2  # a
    offsets: Literal["own", "mean"] = "own"  # each silo's stays with it, or one is averaged like any weight
    offset_rate: float = 0.2  # of the offset, times the model's learning rate (the release: 0.001 and 0.005)

    no_codebook: ClassVar[str] = "its offsets already give every silo features of its own, words would do so twice"

    def __post_init__(self) -> None:
        super().__post_init__()
        not_negative(self, "blend", "offset_rate")

    def build(self, net: nn.Module) -> nn.Module:
        one = one_network(net, "DisTrans")
        return super().build(one.but(encoder=TwoViews(one.encoder, one.shape, self.blend)))

    def keeps(self, net: nn.Module) -> Collection[str]:
        return [*super().keeps(net), *([OFFSET] if self.offsets == "own" else [])]

    def first(self, net: nn.Module, address: int) -> State:
        if self.offsets == "mean":
            return {}
        return {OFFSET: beginning(uniform(address, net.get_parameter(OFFSET).shape))}

    def updates(self, say: Broadcast) -> Sequence[Update]:
        del say
        return [Update(self.loss, rate=lambda n: self.offset_rate if n == OFFSET else 1.0)]


def beginning(u: Tensor) -> Tensor:
    """From uniform pixels in [0, 1] to standardised ones, as images are: mean 0, deviation 1."""
    return (u - 0.5) * 12**0.5
