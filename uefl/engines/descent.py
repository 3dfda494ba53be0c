"""Optimisers for clients in one tensor: torch's formulas, but every client counts its own steps."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from uefl.engines.optimizer import adam_of
from uefl.federation import State
from uefl.local import Local


class Descent:
    """The optimiser of some stacked weights [m, ...]; `times` the rate of each. State is named as torch names it."""

    def __init__(self, local: Local, params: State, times: Mapping[str, float]) -> None:
        self.local, self.params, self.times = local, params, times
        entries = ("exp_avg", "exp_avg_sq") if local.optimizer != "sgd" else ("momentum_buffer",) * bool(local.momentum)
        self.state = {entry: {n: torch.zeros_like(p) for n, p in params.items()} for entry in entries}
        # On CUDA the fused kernel knows rates in single precision alone.
        self.fused = not any(p.is_cuda and p.dtype == torch.float64 for p in params.values())
        if local.optimizer != "sgd":
            kind = torch.float32 if self.fused else torch.float64
            self.state["step"] = {n: torch.zeros(len(p), dtype=kind, device=p.device) for n, p in params.items()}

    def clear(self) -> None:
        for tensors in self.state.values():
            torch._foreach_zero_(list(tensors.values()))

    @torch.no_grad()
    def step(self, gradients: State, at: slice, rate: Tensor) -> None:
        """One update of the clients `at`."""
        for times in sorted({self.times[n] for n in gradients}):
            some = {n: g for n, g in gradients.items() if self.times[n] == times}
            (self._sgd if self.local.optimizer == "sgd" else self._adam)(some, at, rate * times)

    def _sgd(self, gradients: State, at: slice, rate: Tensor) -> None:
        for n, g in gradients.items():
            p = self.params[n][at]
            g = g.add(p, alpha=self.local.weight_decay) if self.local.weight_decay else g
            if self.local.momentum:
                g = self.state["momentum_buffer"][n][at].mul_(self.local.momentum).add_(g)
            p.addcmul_(g, rate, value=-1)

    def _adam(self, gradients: State, at: slice, rate: Tensor) -> None:
        """By torch's own kernel for lists of tensors, each with its count of steps.

        A dozen kernels a weight would be a sixth of a step of a large network.
        """
        places = [{n: t[at] for n, t in ts.items()} for ts in (self.params, *self.state.values())]
        alike = {
            n: g if g.stride() == self.params[n].stride() else like(self.params[n][at], g) for n, g in gradients.items()
        }
        params, means, squares, steps = ([t for n in gradients for t in ts[n]] for ts in places)
        adam_of(self.local)(
            params,
            [t for g in alike.values() for t in g],
            means,
            squares,
            [],
            steps,
            fused=self.fused,
            foreach=not self.fused,
            capturable=not self.fused,
            lr=rate,
        )


def like(place: Tensor, tensor: Tensor) -> Tensor:
    """The same numbers in memory as a place has them."""
    return torch.empty_like(place).copy_(tensor)
