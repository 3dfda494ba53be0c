"""Torch's optimisers by the functions behind its classes.

To make one of the classes imports torch's compiler, which takes most of a second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from uefl.federation import State
from uefl.local import Local


def adam_of(local: Local) -> Callable[..., None]:
    """Adam or AdamW with torch's β₁, β₂ and ε; what is left to say are lists of tensors and the rate."""
    kind = adamw if local.optimizer == "adamw" else adam
    decay = local.weight_decay
    return partial(kind, amsgrad=False, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=decay, maximize=False)


class Optimizer:
    """The optimiser of some named weights; `times` the rate of each."""

    def __init__(self, local: Local, params: Mapping[str, Tensor], rate: float, times: Mapping[str, float]) -> None:
        self.local, self.params = local, params
        self.state: dict[str, State] = {}  # of every weight that moved, its entries as torch names them
        self.groups: dict[float, list[str]] = {}
        for name in params:
            self.groups.setdefault(rate * times.get(name, 1.0), []).append(name)

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor]) -> None:
        """One update; a weight without a gradient stays as it is."""
        for rate, group in self.groups.items():
            names = [n for n in group if n in gradients]
            if names:
                (self._sgd if self.local.optimizer == "sgd" else self._adam)(names, gradients, rate)

    def _sgd(self, names: list[str], gradients: Mapping[str, Tensor], rate: float) -> None:
        velocities = [self.state.get(n, {}).get("momentum_buffer") for n in names]
        sgd(
            [self.params[n] for n in names],
            [gradients[n] for n in names],
            velocities,
            weight_decay=self.local.weight_decay,
            momentum=self.local.momentum,
            lr=rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
        self.state |= {n: {"momentum_buffer": v} for n, v in zip(names, velocities) if v is not None}

    def _adam(self, names: list[str], gradients: Mapping[str, Tensor], rate: float) -> None:
        for n in names:
            if n not in self.state:
                p = self.params[n]
                self.state[n] = {
                    "step": torch.zeros(()),
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                }
        state = [self.state[n] for n in names]
        adam_of(self.local)(
            [self.params[n] for n in names],
            [gradients[n] for n in names],
            [s["exp_avg"] for s in state],
            [s["exp_avg_sq"] for s in state],
            [],
            [s["step"] for s in state],
            lr=rate,
        )
