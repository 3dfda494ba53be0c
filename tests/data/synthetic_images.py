"""Make small random images for tests of partitioners, which use only labels, splits, domains and silos."""

import torch

from uefl.core.noise import derive_key, random_bits, uniform
from uefl.data.images import Images


def make_synthetic_images(
    count: int = 6000, num_classes: int = 10, *, test_fraction: float = 0.0, channels: int = 1
) -> Images:
    """Make images sorted by class, as in many sources, with 4 domains, 5 silos and a test split."""
    pixels = (random_bits(derive_key("pixels"), count * channels * 36) & 0xFF).to(torch.uint8)
    return Images(
        "mnist5k",
        pixels.reshape(count, channels, 6, 6),
        torch.arange(count) * num_classes // count,
        tuple(str(c) for c in range(num_classes)),
        uniform(derive_key("test"), (count,)) < test_fraction,
        domain_ids=torch.arange(count) % 4,
        domains=("art", "cartoon", "photo", "sketch"),
        silo_ids=torch.arange(count) % 5,
        silos=("anna", "bert", "carl", "dora", "emil"),
    )
