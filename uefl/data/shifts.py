"""Feature shifts: what makes the images of one domain look unlike those of another."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def rotated(x: Tensor, angle: float) -> Tensor:
    """Rotate uint8 images counter-clockwise about their centre: bilinear, zero fill, rounded back to uint8."""
    if angle % 360 == 0:
        return x
    cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    height, width = x.shape[-2:]
    # The grid maps output to input, and y points down: this matrix turns what is seen counter-clockwise.
    theta = torch.tensor([[cos, -sin * height / width, 0.0], [sin * width / height, cos, 0.0]])
    grid = F.affine_grid(theta.expand(1, 2, 3), [1, 1, height, width], align_corners=False)
    flat = x.reshape(1, -1, height, width).float()
    turned = F.grid_sample(flat, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    return turned.round().clamp(0, 255).to(torch.uint8).reshape(x.shape)
