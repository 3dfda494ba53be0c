"""The small networks of the baselines, without their classifiers; initialized by PyTorch (Kaiming-uniform)."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from uefl.models.base import Encoder


class GroupNormConv(Encoder):
    """FedIIR's network for Rotated MNIST: [B, c, h, w] -> [B, 128], or a map [B, 128, h/2, w/2] without `average_pool`.

    Guo et al., "Out-of-distribution generalization of federated learning via implicit invariant relationships",
    ICML 2023. ReLU precedes the norm, as in the original.
    """

    def __init__(self, *, in_channels: int = 1, image_size: int = 28, average_pool: bool = True) -> None:
        super().__init__(in_channels=in_channels, image_size=image_size)
        layers: list[nn.Module] = []
        for (inputs, outputs), stride in zip(pairwise((in_channels, 64, 128, 128, 128)), (1, 2, 1, 1), strict=True):
            layers += [nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1), nn.ReLU(), nn.GroupNorm(8, outputs)]
        self.layers = nn.Sequential(*layers)
        self.num_features, self.average_pool = 128, average_pool

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        return x.mean((2, 3)) if self.average_pool else x


class MLP(Encoder):
    """FedCR's network for EMNIST: [B, c, size, size] -> [B, 1024], the second hidden layer; also for tables, [B, c].

    Zhang et al., "FedCR: personalized federated learning based on across-client common representation with conditional
    mutual information regularization", ICML 2023, which also has the LeNets.
    """

    accepts_rows = True

    def __init__(self, *, in_channels: int = 1, image_size: int = 28, width: int = 1024) -> None:
        super().__init__(in_channels=in_channels, image_size=image_size)
        self.layers = nn.Sequential(nn.Flatten(), *_make_hidden_layers(in_channels * image_size**2, width))
        self.num_features = width

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.layers(x)
        return features


class BatchNormMLP(Encoder):
    """Two hidden layers with batch norm, for methods that need one on tables: [B, c] or images -> [B, width]."""

    accepts_rows = True

    def __init__(self, *, in_channels: int = 1, image_size: int = 28, width: int = 1024) -> None:
        super().__init__(in_channels=in_channels, image_size=image_size)
        sizes = (in_channels * image_size**2, width, width)
        layers = [(nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU()) for a, b in pairwise(sizes)]
        self.layers = nn.Sequential(nn.Flatten(), *(layer for block in layers for layer in block))
        self.num_features = width

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.layers(x)
        return features


class Identity(Encoder):
    """The inputs themselves as one token: [B, c, size, size] or [B, c] -> [B, c·size²].

    With feature_norm=none and hidden_size=0 the network is a logistic regression; weight_decay is its ridge penalty.
    """

    accepts_rows = True

    def __init__(self, *, in_channels: int = 1, image_size: int = 28) -> None:
        super().__init__(in_channels=in_channels, image_size=image_size)
        self.num_features = in_channels * image_size**2

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)


class LeNet(Encoder):
    """Two 5x5 convolutions with a max-pool after each, two hidden layers: [B, c, size, size] -> [B, 1024]."""

    def __init__(self, filters: tuple[int, int], *, in_channels: int, image_size: int, width: int = 1024) -> None:
        super().__init__(in_channels=in_channels, image_size=image_size, min_image_size=_MIN_IMAGE_SIZE)
        first, second = filters
        self.layers = nn.Sequential(
            *(nn.Conv2d(in_channels, first, 5), nn.MaxPool2d(2), nn.ReLU()),
            *(nn.Conv2d(first, second, 5), nn.MaxPool2d(2), nn.ReLU()),
            nn.Flatten(),
            *_make_hidden_layers(second * _output_size(image_size) ** 2, width),
        )
        self.num_features = width

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.layers(x)
        return features


class DIRT(Encoder):
    """DIRT's network for Ghifary's Rotated MNIST: [B, c, size, size] -> a linear code [B, 64].

    Nguyen et al., "Domain invariant representation learning with domain density transformations", NeurIPS 2021.
    """

    def __init__(self, *, in_channels: int = 1, image_size: int = 28, width: int = 64) -> None:
        super().__init__(in_channels=in_channels, image_size=image_size, min_image_size=_MIN_IMAGE_SIZE)
        self.layers = nn.Sequential(
            *(nn.Conv2d(in_channels, 32, 5), nn.BatchNorm2d(32), nn.MaxPool2d(2), nn.ReLU()),
            *(nn.Conv2d(32, 64, 5), nn.BatchNorm2d(64), nn.MaxPool2d(2), nn.ReLU()),
            nn.Flatten(),
            nn.Linear(64 * _output_size(image_size) ** 2, width),
        )
        self.num_features = width

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.layers(x)
        return features


_MIN_IMAGE_SIZE = 16  # pixels per side; two 5x5 convolutions and two max-pools leave one


def _output_size(size: int) -> int:
    """Return the pixels per side after two 5x5 convolutions, each followed by a 2x2 max-pool."""
    return ((size - 4) // 2 - 4) // 2


def _make_hidden_layers(in_features: int, width: int) -> list[nn.Module]:
    return [nn.Linear(in_features, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]


def lenet_fmnist(*, in_channels: int = 1, image_size: int = 28, width: int = 1024) -> LeNet:
    """Return FedCR's LeNet for Fashion-MNIST, with 4 and 12 filters."""
    return LeNet((4, 12), in_channels=in_channels, image_size=image_size, width=width)


def lenet_cifar(*, in_channels: int = 3, image_size: int = 32, width: int = 1024) -> LeNet:
    """Return FedCR's LeNet for CIFAR, with 64 and 64 filters."""
    return LeNet((64, 64), in_channels=in_channels, image_size=image_size, width=width)
