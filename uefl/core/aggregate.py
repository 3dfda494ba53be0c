"""Average replies one by one: θ ← Σ n_k/n θ_k (Eq. 3); each codeword over the silos that may use it (D6, D11).

`torch._foreach_*` is a private function that handles all tensors of a reply in one launch; the benchmark
`many-clients` averages 100 replies per round on a GPU and needs it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from uefl.core.federation import Reply, Tensors, gather_accessible_rows, is_codeword_tensor


class WeightedMean:
    """A running weighted mean of replies; its memory does not depend on the number of silos."""

    def __init__(self, previous: Tensors) -> None:
        self.previous = previous
        self.sums: Tensors = {}
        self.total_weights: dict[str, float] = {}  # of all tensors but codewords
        self.codeword_weights: Tensors = {}  # of codewords, per row
        self._scaled: Tensors = {}  # the last reply times its weight; allocated once

    def add(self, tensors: Tensors, weight: float, access_row: Tensor) -> None:
        """Add one silo's tensors; `access_row` tells which codewords they contain."""
        for name in tensors.keys() - self.sums.keys():
            self.sums[name] = torch.zeros_like(self.previous[name], dtype=torch.float64)
            if is_codeword_tensor(name):
                self.codeword_weights[name] = self.sums[name].new_zeros(len(self.previous[name]))
        for name in filter(is_codeword_tensor, tensors):
            self.sums[name][access_row] += weight * tensors[name].double()
            self.codeword_weights[name][access_row] += weight
        other_names = [name for name in tensors if not is_codeword_tensor(name)]
        if other_names:
            for name in self.sums.keys() - self._scaled.keys():
                self._scaled[name] = torch.empty_like(self.sums[name])
            sums, scaled = ([pieces[name] for name in other_names] for pieces in (self.sums, self._scaled))
            torch._foreach_copy_(scaled, [tensors[name] for name in other_names])
            torch._foreach_mul_(scaled, weight)
            torch._foreach_add_(sums, scaled)
        for name in other_names:
            self.total_weights[name] = self.total_weights.get(name, 0.0) + weight

    def result(self) -> Tensors:
        """Return the mean; tensors that no silo sent, and codewords that no silo used, keep their previous values."""
        result = dict(self.previous)
        for name, codeword_weights in self.codeword_weights.items():
            previous = self.previous[name]
            weights = codeword_weights.reshape(-1, *[1] * (previous.dim() - 1))
            mean = self.sums[name] / torch.where(weights > 0, weights, 1)
            result[name] = torch.where(weights > 0, mean.to(previous.dtype), previous)
        if names := list(self.total_weights):
            means = torch._foreach_div([self.sums[n] for n in names], [self.total_weights[n] for n in names])
            averaged = [torch.empty_like(self.previous[n]) for n in names]
            rounded = [mean if target.is_floating_point() else mean.round() for mean, target in zip(means, averaged)]
            torch._foreach_copy_(averaged, rounded)
            result |= dict(zip(names, averaged))
        return result


def find_reply_error(reply: Reply, model_state: Tensors, access_row: Tensor) -> str:
    """Return why a reply must not be averaged, or an empty string."""
    expected = gather_accessible_rows(model_state, access_row)
    if not 0 < reply.num_examples < math.inf:
        return f"num_examples={reply.num_examples} is not a positive number"
    if set(reply.tensors) != set(expected):
        name = min(set(reply.tensors) ^ set(expected))
        return f"tensor {name} is {'missing' if name in expected else 'not expected'}"
    for name, tensor in reply.tensors.items():
        if tensor.shape != expected[name].shape:
            return f"{name} has shape {tuple(tensor.shape)}, expected {tuple(expected[name].shape)}"
    name = "" if reply.is_finite else find_non_finite({**reply.extras, **reply.tensors})
    return f"{name} is not finite" if name else ""


def find_non_finite(tensors: Mapping[str, Tensor]) -> str:
    """Return the name of a tensor with a value that is not finite, or an empty string."""
    floats = {n: t for n, t in tensors.items() if t.is_floating_point() and t.numel()}
    for device in {t.device for t in floats.values()}:  # a method's state may be on another device than the model
        local = {n: t for n, t in floats.items() if t.device == device}
        # Maximum norms, so that one transfer from the device is enough.
        norms = torch._foreach_norm(list(local.values()), math.inf)
        largest = torch.stack(norms if len({t.dtype for t in norms}) == 1 else [t.double() for t in norms])
        for name, finite in zip(local, torch.isfinite(largest).tolist()):
            if not finite:
                return name
    return ""


def find_finite_rows(stacked: Mapping[str, Tensor], num_rows: int) -> list[bool]:
    """Return for each row of stacked tensors [m, ...] whether all its values are finite, with one transfer."""
    floats = [t.reshape(num_rows, -1) for t in stacked.values() if t.is_floating_point() and t.numel()]
    if not floats:
        return [True] * num_rows
    largest = torch.stack([t.abs().amax(1).double() for t in floats])
    finite: list[bool] = torch.isfinite(largest).all(0).tolist()
    return finite


def sum_tensors(tensor_dicts: Iterable[Tensors], like: Mapping[str, Tensor]) -> Tensors:
    """Return the sums over silos, tensor by tensor; tensors in other shapes than `like` are left out."""
    total: Tensors = {}
    for tensors in tensor_dicts:
        if {n: t.shape for n, t in tensors.items()} == {n: t.shape for n, t in like.items()}:
            total = {n: total[n] + t for n, t in tensors.items()} if total else dict(tensors)
    return total
