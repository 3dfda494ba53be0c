"""The small networks of the baselines, without their heads; all start as PyTorch's layers do (Kaiming-uniform)."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from uefl.models.encoder import Encoder


class GroupNormConv(Encoder):
    """FedIIR's network for Rotated MNIST: [B, c, h, w] -> [B, 128], or the map [B, 128, h/2, w/2] without `pool`.

    Guo et al., "Out-of-distribution generalization of federated learning via implicit invariant relationships",
    ICML 2023. ReLU stands before the norm, as there.
    """

    def __init__(self, *, channels: int = 1, size: int = 28, pool: bool = True) -> None:
        super().__init__(channels=channels, size=size)
        layers: list[nn.Module] = []
        for (inputs, outputs), stride in zip(pairwise((channels, 64, 128, 128, 128)), (1, 2, 1, 1), strict=True):
            layers += [nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1), nn.ReLU(), nn.GroupNorm(8, outputs)]
        self.layers = nn.Sequential(*layers)
        self.width, self.pool = 128, pool

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        return x.mean((2, 3)) if self.pool else x


class MLP(Encoder):
    """FedCR's network for EMNIST: [B, c, size, size] -> [B, 1024], the second hidden layer.

    Zhang et al., "FedCR: personalized federated learning based on across-client common representation with conditional
    mutual information regularization", ICML 2023; the LeNets are from there too.
    """

    def __init__(self, *, channels: int = 1, size: int = 28, width: int = 1024) -> None:
        super().__init__(channels=channels, size=size)
        self.layers = nn.Sequential(nn.Flatten(), *_hidden(channels * size**2, width))
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.layers(x)
        return features


class LeNet(Encoder):
    """Two 5x5 convolutions with a max-pool after each, two hidden layers: [B, c, size, size] -> [B, 1024]."""

    def __init__(self, filters: tuple[int, int], *, channels: int, size: int, width: int = 1024) -> None:
        super().__init__(channels=channels, size=size, least=_LEAST)
        first, second = filters
        self.layers = nn.Sequential(
            *(nn.Conv2d(channels, first, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(first, second, 5), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Flatten(),
            *_hidden(second * _left(size) ** 2, width),
        )
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.layers(x)
        return features


class Dirt(Encoder):
    """DIRT's network for Ghifary's Rotated MNIST: [B, c, size, size] -> a linear code [B, 64].

    Nguyen et al., "Domain invariant representation learning with domain density transformations", NeurIPS 2021.
    """

    def __init__(self, *, channels: int = 1, size: int = 28, width: int = 64) -> None:
        super().__init__(channels=channels, size=size, least=_LEAST)
        self.layers = nn.Sequential(
            *(nn.Conv2d(channels, 32, 5), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 5), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Flatten(),
            nn.Linear(64 * _left(size) ** 2, width),
        )
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.layers(x)
        return features


_LEAST = 16  # pixels a side, of which two 5x5 convolutions and two max-pools leave one


def _left(size: int) -> int:
    """Pixels a side after two 5x5 convolutions, each followed by a 2x2 max-pool."""
    return ((size - 4) // 2 - 4) // 2


def _hidden(inputs: int, width: int) -> list[nn.Module]:
    return [nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]


def lenet_fmnist(*, channels: int = 1, size: int = 28, width: int = 1024) -> LeNet:
    """With FedCR's 4 and 12 filters for Fashion-MNIST."""
    return LeNet((4, 12), channels=channels, size=size, width=width)


def lenet_cifar(*, channels: int = 3, size: int = 32, width: int = 1024) -> LeNet:
    """With FedCR's 64 and 64 filters for CIFAR."""
    return LeNet((64, 64), channels=channels, size=size, width=width)
