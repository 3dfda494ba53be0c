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
        self.weight: dict[str, float] = {}  # of all tensors but words
        self.users: State = {}  # the same of words, by row

    def add(self, tensors: State, weight: float, row: Tensor) -> None:
        """Fold in one silo's tensors; `row` is its row of the ledger, the words its tensors speak of."""
        for name in tensors.keys() - self.sums.keys():
            self.sums[name] = torch.zeros_like(self.old[name], dtype=torch.float64)
            if is_words(name):
                self.users[name] = self.sums[name].new_zeros(len(self.old[name]))
        for name in filter(is_words, tensors):
            self.sums[name][row] += weight * tensors[name].double()
            self.users[name][row] += weight
        plain = [name for name in tensors if not is_words(name)]
        if plain:
            scaled = torch._foreach_mul([tensors[name].double() for name in plain], weight)
            torch._foreach_add_([self.sums[name] for name in plain], scaled)
        for name in plain:
            self.weight[name] = self.weight.get(name, 0.0) + weight

    def result(self) -> State:
        """The mean; what nobody sent, and a word without a user this round, stays as it was."""
        merged = dict(self.old)
        for name, total in self.sums.items():
            old = self.old[name]
            if is_words(name):
                users = self.users[name].reshape(-1, *[1] * (old.dim() - 1))
                mean = total / torch.where(users > 0, users, 1)
                merged[name] = torch.where(users > 0, mean.to(old.dtype), old)
            else:
                mean = total / self.weight[name]
                merged[name] = (mean if old.is_floating_point() else mean.round()).to(old.dtype)
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
    said = {n: t for n, t in {**reply.extra, **reply.tensors}.items() if t.is_floating_point() and t.numel()}
    if said:  # the largest of each, so that a device is asked but once
        largest = torch.stack([t.double() for t in torch._foreach_norm(list(said.values()), math.inf)])
        for name, finite in zip(said, torch.isfinite(largest).tolist()):
            if not finite:
                return f"{name} is not finite"
    return ""


def summed(states: Iterable[State], like: Mapping[str, Tensor]) -> State:
    """Tensor by tensor, the sum of what several silos say, or nothing; who says something else is not heard."""
    total: State = {}
    for state in states:
        if {n: t.shape for n, t in state.items()} == {n: t.shape for n, t in like.items()}:
            total = {n: total[n] + t for n, t in state.items()} if total else dict(state)
    return total
