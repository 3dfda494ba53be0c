"""Torch's optimizers, called through their functions.

Creating an object of torch's optimizer classes imports torch's compiler, which takes most of a second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from uefl.core.federation import Tensors
from uefl.core.local import LocalTraining


def make_adam(local: LocalTraining) -> Callable[..., None]:
    """Return Adam or AdamW with torch's β₁, β₂ and ε; the caller passes the lists of tensors and the learning rate."""
    function = adamw if local.optimizer == "adamw" else adam
    decay = local.weight_decay
    return partial(function, amsgrad=False, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=decay, maximize=False)


class NamedOptimizer:
    """The optimizer of named weights. Each weight's learning rate is `lr` times its multiplier."""

    def __init__(
        self, local: LocalTraining, params: Mapping[str, Tensor], lr: float, lr_multipliers: Mapping[str, float]
    ) -> None:
        self.local, self.params = local, params
        self.state: dict[str, Tensors] = {}  # by weight; entries have torch's names
        self.groups: dict[float, list[str]] = {}  # weights by learning rate
        for name in params:
            self.groups.setdefault(lr * lr_multipliers.get(name, 1.0), []).append(name)

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor]) -> None:
        """Update all weights that have a gradient."""
        for lr, group in self.groups.items():
            names = [n for n in group if n in gradients]
            if names:
                (self._sgd if self.local.optimizer == "sgd" else self._adam)(names, gradients, lr)

    def _sgd(self, names: list[str], gradients: Mapping[str, Tensor], lr: float) -> None:
        velocities = [self.state.get(n, {}).get("momentum_buffer") for n in names]
        sgd(
            [self.params[n] for n in names],
            [gradients[n] for n in names],
            velocities,
            weight_decay=self.local.weight_decay,
            momentum=self.local.momentum,
            lr=lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
        self.state |= {n: {"momentum_buffer": v} for n, v in zip(names, velocities) if v is not None}

    def _adam(self, names: list[str], gradients: Mapping[str, Tensor], lr: float) -> None:
        for n in names:
            if n not in self.state:
                p = self.params[n]
                zeros = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                self.state[n] = {"step": torch.zeros(()), **zeros}
        states = [self.state[n] for n in names]
        make_adam(self.local)(
            [self.params[n] for n in names],
            [gradients[n] for n in names],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            lr=lr,
        )
