"""Local training: optimizer, batches, epochs, and the learning rate over the rounds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from uefl.core.field_rules import check_ranges, setting

RESTART_MULTIPLIER = 0.5  # of the first round's learning rate


@dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """How a client trains; equal for all methods in a comparison."""

    optimizer: Literal["adam", "adamw", "sgd"] = setting("adam", "Optimizer of a client's training steps.")
    lr: float = setting(1e-3, "Learning rate η of the first round.", above=0)
    schedule: Literal["constant", "cosine", "step"] = setting(
        "constant", "Learning rate over all rounds: constant, a cosine to 0, or a tenth after each third."
    )
    restart_rounds: int = setting(
        0,
        "Rounds at the end of a run in which the learning rate starts again at half of lr and falls linearly; "
        "schedule ends before them. 0: none, as in the paper. Group rounds of uefl start it again themselves.",
        at_least=0,
        in_run_id="when changed",
    )
    momentum: float = setting(0.9, "Momentum; used by sgd only.", at_least=0, below=1)
    weight_decay: float = setting(0.0, "Weight decay; 0 turns it off.", at_least=0)
    batch_size: int = setting(64, "Examples per training step.", at_least=1)
    epochs: int = setting(2, "Passes over a silo's training examples per round.", at_least=1)
    max_grad_norm: float = setting(0.0, "Gradients are scaled down to this norm; 0 sets no limit.", at_least=0)
    reset_optimizer: bool = setting(
        True, "Start every round with a new optimizer; false keeps its state at the silo between rounds (D21)."
    )
    eval_batch_size: int = setting(256, "Examples per evaluation batch; changes memory use, not results.", at_least=1)

    def __post_init__(self) -> None:
        check_ranges(self)

    def lr_at(self, round_number: int, total_rounds: int, restart_rounds: int | None = None) -> float:
        """Return the learning rate of a round, counted from 1; the last rounds may start it again."""
        num_restarted = min(self.restart_rounds if restart_rounds is None else restart_rounds, total_rounds)
        num_scheduled = total_rounds - num_restarted
        if num_scheduled < round_number <= total_rounds:
            return RESTART_MULTIPLIER * self.lr * (1 - (round_number - num_scheduled - 1) / num_restarted)
        done = (round_number - 1) / max(num_scheduled, 1)
        if self.schedule == "cosine":
            return self.lr * 0.5 * (1 + math.cos(math.pi * done))
        if self.schedule == "step":
            return self.lr * 0.1 ** int(done * 3)  # a tenth after each third
        return self.lr

    def clip_gradients(self, gradients: list[Tensor]) -> list[Tensor]:
        """Scale gradients down to `max_grad_norm`, if one is set."""
        return clip_grad_norm(gradients, self.max_grad_norm) if self.max_grad_norm else gradients


def clip_grad_norm(gradients: list[Tensor], max_norm: float) -> list[Tensor]:
    """Scale the gradients of one client together so that their norm is at most `max_norm`."""
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return [g * scale for g in gradients]
