"""Small made-up images for the laws of cuts: only labels, splits, domains and owners matter."""

import torch

from uefl.data import Images
from uefl.noise import bits, key, uniform


def synthetic(n: int = 6000, classes: int = 10, *, test: float = 0.0, channels: int = 1) -> Images:
    """Labels sorted by class, as many sources come; 4 domains, 5 silos; part `test` is the source's test split."""
    pixels = (bits(key("pixels"), n * channels * 36) & 0xFF).to(torch.uint8)
    return Images(
        "mnist5k",
        pixels.reshape(n, channels, 6, 6),
        torch.arange(n) * classes // n,
        tuple(str(c) for c in range(classes)),
        uniform(key("test"), (n,)) < test,
        domain=torch.arange(n) % 4,
        domains=("art", "cartoon", "photo", "sketch"),
        silo=torch.arange(n) % 5,
        silos=("anna", "bert", "carl", "dora", "emil"),
    )
