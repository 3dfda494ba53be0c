"""Optimisers for clients in one tensor: torch's formulas, but every client counts its own steps."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from uefl.federation import State
from uefl.local import Local

FIRST, SECOND, LEAST = 0.9, 0.999, 1e-8  # β₁, β₂, ε of Adam, as torch has them


class Descent:
    """The optimiser of some stacked weights [m, ...]; `times` the rate of each. State is named as torch names it."""

    def __init__(self, local: Local, params: State, times: Mapping[str, float]) -> None:
        self.local, self.params, self.times = local, params, times
        entries = ("exp_avg", "exp_avg_sq") if local.optimizer != "sgd" else ("momentum_buffer",) * bool(local.momentum)
        self.state = {entry: {n: torch.zeros_like(p) for n, p in params.items()} for entry in entries}
        if local.optimizer != "sgd":
            self.state["step"] = {n: torch.zeros(len(p), device=p.device) for n, p in params.items()}

    def clear(self) -> None:
        for tensors in self.state.values():
            torch._foreach_zero_(list(tensors.values()))

    @torch.no_grad()
    def step(self, gradients: State, at: slice, rate: Tensor) -> None:
        """One update of the clients `at`."""
        move = self._sgd if self.local.optimizer == "sgd" else self._adam
        for n, g in gradients.items():
            move(n, self.params[n][at], g, {entry: t[n][at] for entry, t in self.state.items()}, rate)

    def _sgd(self, name: str, p: Tensor, g: Tensor, state: State, rate: Tensor) -> None:
        g = g.add(p, alpha=self.local.weight_decay) if self.local.weight_decay else g
        if self.local.momentum:
            g = state["momentum_buffer"].mul_(self.local.momentum).add_(g)
        p.addcmul_(g, rate, value=-self.times[name])

    def _adam(self, name: str, p: Tensor, g: Tensor, state: State, rate: Tensor) -> None:
        rate = rate * self.times[name]
        if self.local.weight_decay and self.local.optimizer == "adamw":
            p.mul_(1 - rate * self.local.weight_decay)
        elif self.local.weight_decay:
            g = g.add(p, alpha=self.local.weight_decay)
        done = state["step"].add_(1).double().reshape(-1, *[1] * (g.dim() - 1))
        first = state["exp_avg"].lerp_(g, 1 - FIRST)
        second = state["exp_avg_sq"].mul_(SECOND).addcmul_(g, g, value=1 - SECOND)
        root = (1 - SECOND**done).sqrt().to(p.dtype)
        p.addcmul_(first / (second.sqrt() / root).add_(LEAST), (rate / (1 - FIRST**done)).to(p.dtype), value=-1)
