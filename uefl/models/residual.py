"""The paper's encoder for grey images: residual blocks of two convolutions, each followed by a 2×2 max-pool."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn
from torch.nn.functional import relu

from uefl.models.encoder import Encoder


class ResidualBlock(nn.Module):
    """conv-norm-relu-conv-norm beside a 1×1 convolution, added; the last ReLU is left to who comes next."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = relu(self.norm1(self.conv1(x)))
        out: Tensor = self.norm2(self.conv2(y)) + self.shortcut(x)
        return out


class ResidualEncoder(Encoder):
    """`depth` blocks; the channels double from block to block. The release has width 128 and depth 3: 128/256/512."""

    def __init__(self, *, channels: int = 1, size: int = 28, width: int = 64, depth: int = 3) -> None:
        super().__init__(channels=channels, size=size, least=2**depth)
        sizes = [channels] + [width * 2**i for i in range(depth)]
        self.blocks = nn.Sequential(
            *(nn.Sequential(ResidualBlock(a, b), nn.ReLU(), nn.MaxPool2d(2)) for a, b in pairwise(sizes))
        )
        self.width = sizes[-1]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks(x)
        return out
