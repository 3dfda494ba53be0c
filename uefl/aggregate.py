"""θ ← Σ n_k/n θ_k, folded reply by reply; each codeword over the silos that may use it (D6, D11)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from uefl.federation import Reply, State, gathered, is_words


class Mean:
    """A running weighted mean of replies: memory for one sum, however many silos there are."""

    def __init__(self, old: State) -> None:
        self.old = old
        self.sums: State = {}
        self.weight: State = {}

    def add(self, tensors: State, weight: float, row: Tensor) -> None:
        """Fold in one silo's tensors; `row` is its row of the ledger, the words its tensors speak of."""
        for name, tensor in tensors.items():
            old = self.old[name]
            if name not in self.sums:
                self.sums[name] = torch.zeros_like(old, dtype=torch.float64)
                self.weight[name] = torch.zeros(len(old) if is_words(name) else (), dtype=torch.float64).to(old.device)
            if is_words(name):
                self.sums[name][row] += weight * tensor.double()
                self.weight[name][row] += weight
            else:
                self.sums[name] += weight * tensor.double()
                self.weight[name] += weight

    def result(self) -> State:
        """The mean; what nobody sent, and a word without a user this round, stays as it was."""
        merged = dict(self.old)
        for name, total in self.sums.items():
            weight, old = self.weight[name], self.old[name]
            weight = weight.reshape(-1, *[1] * (old.dim() - 1)) if is_words(name) else weight
            mean = total / torch.where(weight > 0, weight, 1)
            mean = mean if old.is_floating_point() else mean.round()
            merged[name] = torch.where(weight > 0, mean.to(old.dtype), old)
        return merged


def flaw(reply: Reply, state: State, row: Tensor) -> str:
    """Why a reply must not be averaged, or nothing: one poisoned silo must not poison the others."""
    expected = gathered(state, row)
    if not 0 < reply.size < math.inf:
        return f"size {reply.size} is not a positive number"
    if set(reply.tensors) != set(expected):
        odd = sorted(set(reply.tensors) ^ set(expected))
        return f"tensor {odd[0]} is {'missing' if odd[0] in expected else 'not expected'}"
    for name, tensor in reply.tensors.items():
        if tensor.shape != expected[name].shape:
            return f"{name} has shape {tuple(tensor.shape)}, expected {tuple(expected[name].shape)}"
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return f"{name} is not finite"
    for name, tensor in reply.extra.items():
        if not bool(torch.isfinite(tensor).all()):
            return f"{name} is not finite"
    return ""


def summed(states: Iterable[State], like: Mapping[str, Tensor]) -> State:
    """Tensor by tensor, the sum of what several silos say, or nothing; who says something else is not heard."""
    total: State = {}
    for state in states:
        if {n: t.shape for n, t in state.items()} == {n: t.shape for n, t in like.items()}:
            total = {n: total[n] + t for n, t in state.items()} if total else dict(state)
    return total
