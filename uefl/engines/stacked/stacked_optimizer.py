"""Optimizers of stacked clients: torch's formulas, with a step count per client."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from uefl.core.federation import Tensors
from uefl.core.local import LocalTraining
from uefl.engines.optimizer import make_adam


class StackedOptimizer:
    """The optimizer of stacked weights [m, ...]; the entries of its state have torch's names."""

    def __init__(self, local: LocalTraining, params: Tensors, lr_multipliers: Mapping[str, float]) -> None:
        self.local, self.params, self.lr_multipliers = local, params, lr_multipliers
        entries = ("exp_avg", "exp_avg_sq") if local.optimizer != "sgd" else ("momentum_buffer",) * bool(local.momentum)
        self.state = {entry: {n: torch.zeros_like(p) for n, p in params.items()} for entry in entries}
        # On CUDA the fused kernel accepts learning rates in single precision only.
        self.fused = not any(p.is_cuda and p.dtype == torch.float64 for p in params.values())
        if local.optimizer != "sgd":
            dtype = torch.float32 if self.fused else torch.float64
            self.state["step"] = {n: torch.zeros(len(p), dtype=dtype, device=p.device) for n, p in params.items()}

    def reset(self) -> None:
        for tensors in self.state.values():
            for tensor in tensors.values():
                tensor.zero_()

    @torch.no_grad()
    def step(self, gradients: Tensors, clients: slice, lr: Tensor) -> None:
        """Update the weights of these clients that have a gradient."""
        for multiplier in sorted({self.lr_multipliers[n] for n in gradients}):
            group = {n: g for n, g in gradients.items() if self.lr_multipliers[n] == multiplier}
            (self._sgd if self.local.optimizer == "sgd" else self._adam)(group, clients, lr * multiplier)

    def _sgd(self, gradients: Tensors, clients: slice, lr: Tensor) -> None:
        for n, g in gradients.items():
            p = self.params[n][clients]
            g = g.add(p, alpha=self.local.weight_decay) if self.local.weight_decay else g
            if self.local.momentum:
                g = self.state["momentum_buffer"][n][clients].mul_(self.local.momentum).add_(g)
            p.addcmul_(g, lr, value=-1)

    def _adam(self, gradients: Tensors, clients: slice, lr: Tensor) -> None:
        """Call torch's kernel for lists of tensors, each with its own step count.

        A dozen kernels per weight would take a sixth of a step of a large network.
        """
        selected = [{n: t[clients] for n, t in tensors.items()} for tensors in (self.params, *self.state.values())]
        laid_out = {
            n: g if g.stride() == self.params[n].stride() else copy_with_layout(self.params[n][clients], g)
            for n, g in gradients.items()
        }
        params, means, squares, steps = ([t for n in gradients for t in tensors[n]] for tensors in selected)
        make_adam(self.local)(
            params,
            [t for g in laid_out.values() for t in g],
            means,
            squares,
            [],
            steps,
            fused=self.fused,
            foreach=not self.fused,
            capturable=not self.fused,
            lr=lr,
        )


def copy_with_layout(target: Tensor, tensor: Tensor) -> Tensor:
    """Return a copy of a tensor in the memory layout of `target`."""
    return torch.empty_like(target).copy_(tensor)
