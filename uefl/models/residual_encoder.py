"""The paper's encoder for grayscale images: residual blocks of two convolutions, each followed by a 2x2 max-pool."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn
from torch.nn.functional import relu

from uefl.core.errors import InputError
from uefl.models.base import Encoder


class ResidualBlock(nn.Module):
    """conv-norm-relu-conv-norm plus a 1x1 convolution of the input; the encoder applies max-pool and the last ReLU."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.shortcut = nn.Conv2d(in_channels, out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = relu(self.norm1(self.conv1(x)))
        out: Tensor = self.norm2(self.conv2(y)) + self.shortcut(x)
        return out


class ResidualEncoder(Encoder):
    """Stack `depth` blocks whose channels double; the authors' code has width 128 and depth 3: 128, 256, 512."""

    def __init__(self, *, in_channels: int = 1, image_size: int = 28, width: int = 64, depth: int = 3) -> None:
        super().__init__(in_channels=in_channels, image_size=image_size)
        for name, value in (("width", width), ("depth", depth)):
            if value < 1:
                raise InputError(f"{name}={value} of encoder residual must be at least 1")
        if image_size < 2**depth:  # each block halves the image
            raise InputError(f"depth={depth} needs images of at least {2**depth} pixels, but these have {image_size}")
        sizes = [in_channels] + [width * 2**i for i in range(depth)]
        self.blocks = nn.Sequential(
            *(nn.Sequential(ResidualBlock(a, b), nn.MaxPool2d(2), nn.ReLU()) for a, b in pairwise(sizes))
        )
        self.num_features = sizes[-1]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks(x)
        return out
