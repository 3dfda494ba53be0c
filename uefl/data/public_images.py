"""Public images: images without labels that every silo can read, and that no silo trains or tests on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from uefl.core import noise_addresses as addresses
from uefl.core.errors import InputError
from uefl.core.noise import derive_key, permutation
from uefl.data.images import Images


def mark_public_images(images: Images, count: int, seed: int) -> Tensor:
    """Return a mask [n] of images drawn by the seed, none of them from the test split of the source."""
    is_public = torch.zeros(len(images.y), dtype=torch.bool)
    candidates = (~images.is_test).nonzero()[:, 0]
    if count > len(candidates):
        raise InputError(
            f"public_images={count} must be at most {len(candidates)}, the training images of {images.name}"
        )
    if count:
        order = permutation(derive_key(seed, images.name, addresses.PUBLIC_IMAGES), len(candidates))
        is_public[candidates[order[:count]]] = True
    return is_public


def fit_images(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return images [n, c, h, w] in another shape: resized, and color as gray or gray as color."""
    channels, *size = shape
    if x.shape[1] != channels:
        x = x.mean(1, keepdim=True).expand(-1, channels, -1, -1)
    if tuple(x.shape[2:]) != tuple(size):
        x = F.interpolate(x, tuple(size), mode="bilinear", antialias=True, align_corners=False)
    return x.contiguous()
