"""Images made of nothing but noise, for methods that share data no silo ever owned (VHL, FedBR)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from uefl.noise import key, normal

SIDE = 8  # pixels a side; smooth, and a sixteenth of the bytes of a 32×32 image


def patterns(seed: int, purpose: str, classes: int, each: int, channels: int, spread: float = 0.5) -> Tensor:
    """Images [classes·each, c, 8, 8]: a class mean ~ N(0, 1), plus noise ~ N(0, spread²) of each image's own."""
    shape = (channels, SIDE, SIDE)
    means = normal(key(seed, purpose, "means"), (classes, 1, *shape))
    noise = normal(key(seed, purpose, "noise"), (classes, each, *shape))
    return (means + spread * noise).flatten(0, 1)


def enlarged(small: Tensor, like: Tensor) -> Tensor:
    """Patterns in the size and kind of these images."""
    return F.interpolate(small.to(like.dtype), like.shape[-2:], mode="bilinear", align_corners=False)
