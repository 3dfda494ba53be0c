"""Noise images for methods whose silos share images that belong to none of them (VHL, FedBR)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from uefl.core import noise_addresses as addresses
from uefl.core.noise import derive_key, normal

IMAGE_SIZE = 8  # pixels per side: smooth after enlarging, and a sixteenth of the bytes of a 32×32 image


def make_noise_images(
    seed: int, purpose: str, num_classes: int, images_per_class: int, channels: int, noise_deviation: float = 0.5
) -> Tensor:
    """Return images [num_classes · images_per_class, c, 8, 8]: a class mean ~ N(0, 1) plus noise per image."""
    shape = (channels, IMAGE_SIZE, IMAGE_SIZE)
    means = normal(derive_key(seed, purpose, addresses.NOISE_IMAGE_MEANS), (num_classes, 1, *shape))
    noise = normal(derive_key(seed, purpose, addresses.NOISE_IMAGE_DEVIATIONS), (num_classes, images_per_class, *shape))
    return (means + noise_deviation * noise).flatten(0, 1)


def resize_like(images: Tensor, like: Tensor) -> Tensor:
    """Resize images to the size and type of others."""
    return F.interpolate(images.to(like.dtype), like.shape[-2:], mode="bilinear", align_corners=False)
