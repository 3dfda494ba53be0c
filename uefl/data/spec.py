"""Which images, cut into which silos."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from uefl.data.embedded import mnist5k
from uefl.data.images import Images
from uefl.data.shifts import rotated
from uefl.errors import InputError, unknown
from uefl.federation import Part, Silo
from uefl.noise import key, permutation

SOURCES: dict[str, Callable[[], Images]] = {"mnist5k": mnist5k}


@dataclass(frozen=True, kw_only=True)
class Data:
    """Which images, cut into which silos: all that decides what a silo holds, the seed apart."""

    name: str = "mnist5k"
    angles: tuple[float, ...] = (0.0, -50.0, 120.0)  # one domain each, counter-clockwise
    silos: tuple[int, ...] = (3, 3, 3)  # silos of each domain
    train: int = 440  # images a silo trains with, its validation part included
    test: int = 110
    validation: float = 0.1  # part of the training images that decides (D3)

    def __post_init__(self) -> None:
        if self.name not in SOURCES:
            raise unknown("data set", self.name, SOURCES)
        if len(self.angles) != len(self.silos):
            raise InputError(f"angles={self.angles} and silos={self.silos} must have one entry per domain each")

    def load(self, seed: int) -> tuple[list[Silo], Images]:
        """The silos, and the images they were cut from."""
        images = SOURCES[self.name]()
        order = permutation(key(seed, self.name, "cut"), len(images.y))
        each = self.train + self.test
        if each * sum(self.silos) > len(order):
            raise InputError(
                f"{sum(self.silos)} silos of {self.train}+{self.test} images need {each * sum(self.silos)}, "
                f"{self.name} has {len(order)}"
            )
        owners = [(d, i) for d, count in enumerate(self.silos) for i in range(count)]
        silos = []
        for k, (domain, i) in enumerate(owners):
            mine = order[k * each : (k + 1) * each]
            angle = self.angles[domain]
            x = standardised(rotated(images.x[mine], angle), images)
            y, held = images.y[mine], round(self.train * self.validation)
            parts = [slice(held, self.train), slice(0, held), slice(self.train, each)]
            silos.append(
                Silo(f"D{domain + 1}-{i + 1}", *(Part(x[s], y[s]) for s in parts), domain=f"D{domain + 1} ({angle:g}°)")
            )
        return silos, images


def standardised(x: Tensor, images: Images) -> Tensor:
    """Pixels in [0, 1], less the data set's fixed mean, over its fixed deviation (D13)."""
    mean = torch.tensor(images.mean).view(-1, 1, 1)
    std = torch.tensor(images.std).view(-1, 1, 1)
    return (x.float() / 255 - mean) / std
