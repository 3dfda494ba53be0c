"""How a client trains: optimiser, batches, epochs, and the learning rate over the rounds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from uefl.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Local:
    """Local training, the same for all methods in a comparison."""

    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    rate: float = 1e-3  # learning rate η
    schedule: Literal["constant", "cosine", "step"] = "constant"  # of the rate, over all rounds
    momentum: float = 0.9  # sgd only
    weight_decay: float = 0.0
    batch: int = 64
    epochs: int = 2
    clip: float = 0.0  # largest norm of the gradient; 0: no limit
    fresh: bool = True  # a new optimiser every round (D21); otherwise its state stays with the silo
    evaluation_batch: int = 256

    def __post_init__(self) -> None:
        for name in ("rate", "batch", "epochs", "evaluation_batch"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"{name}={getattr(self, name)} must be greater than 0 and finite")
        for name in ("momentum", "weight_decay", "clip"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"{name}={getattr(self, name)} must not be negative or infinite")

    def rate_at(self, round_: int, rounds: int) -> float:
        """The learning rate of a round (counted from 1) out of all."""
        done = (round_ - 1) / max(rounds, 1)
        if self.schedule == "cosine":
            return self.rate * 0.5 * (1 + math.cos(math.pi * done))
        if self.schedule == "step":
            return self.rate * 0.1 ** int(done * 3)  # a tenth after each third
        return self.rate

    def clipped(self, gradients: list[Tensor]) -> list[Tensor]:
        """Gradients scaled down to the largest norm allowed."""
        return clipped(gradients, self.clip) if self.clip else gradients


def clipped(gradients: list[Tensor], largest: float) -> list[Tensor]:
    """Gradients of one client, scaled down together to a norm."""
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
    scale = (largest / (norm + 1e-6)).clamp(max=1.0)
    return [g * scale for g in gradients]
