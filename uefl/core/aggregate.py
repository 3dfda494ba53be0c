"""Average replies one by one: θ ← Σ n_k/n θ_k (Eq. 3); each codeword over the silos that may use it (D6, D11).

`torch._foreach_*` is a private function that handles many tensors in one launch; the benchmarks `many-clients` and
`seed-stack` average ninety replies and more per round on a GPU and need it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from uefl.core.device_copy import copy_without_waiting
from uefl.core.federation import Reply, Tensors, is_codeword_tensor


class PackedTensors(dict[str, Tensor]):
    """Tensors of a reply that are views of vectors: each has all tensors of one type but codewords, sorted by name."""

    def __init__(self, tensors: Tensors, vectors: dict[tuple[str, ...], Tensor]) -> None:
        super().__init__(tensors)
        self.vectors = vectors  # by the names in them, with the channels of filters last


class WeightedMean:
    """A running weighted mean of replies; its memory does not depend on the number of silos.

    Tensors of one type are added as one vector: a reply of fifty tensors takes a few launches instead of hundreds.
    """

    def __init__(self, previous: Tensors) -> None:
        self.previous = previous
        self.sums: dict[tuple[str, ...], Tensor] = {}  # of all tensors but codewords, by the names in a vector
        self.total_weights: dict[tuple[str, ...], float] = {}
        self.codeword_sums: Tensors = {}
        self.codeword_weights: Tensors = {}  # per row, on the host

    def add(self, tensors: Tensors, weight: float, access_row: Tensor) -> None:
        """Add one silo's tensors; `access_row` tells which codewords they contain."""
        for name in filter(is_codeword_tensor, tensors):
            self._add_codewords(name, tensors[name], weight, access_row)
        vectors = tensors.vectors if isinstance(tensors, PackedTensors) else join_by_type(tensors, self.previous)
        for names, values in vectors.items():
            vector = values.double()
            vector *= weight
            if names not in self.sums:
                self.sums[names], self.total_weights[names] = torch.zeros_like(vector), 0.0
            self.sums[names] += vector
            self.total_weights[names] += weight

    def _add_codewords(self, name: str, codewords: Tensor, weight: float, access_row: Tensor) -> None:
        if name not in self.codeword_sums:
            self.codeword_sums[name] = torch.zeros_like(self.previous[name], dtype=torch.float64)
            self.codeword_weights[name] = torch.zeros(len(self.previous[name]), dtype=torch.float64)
        rows = access_row.cpu().nonzero()[:, 0]  # a mask would make the host wait for the device
        self.codeword_weights[name][rows] += weight
        self.codeword_sums[name][copy_without_waiting(rows, codewords.device)] += weight * codewords.double()

    def result(self) -> Tensors:
        """Return the mean; tensors that no silo sent, and codewords that no silo used, keep their previous values."""
        result = dict(self.previous)
        for name, codeword_weights in self.codeword_weights.items():
            previous = self.previous[name]
            weights = codeword_weights.to(previous.device).reshape(-1, *[1] * (previous.dim() - 1))
            mean = self.codeword_sums[name] / torch.where(weights > 0, weights, 1)
            result[name] = torch.where(weights > 0, mean.to(previous.dtype), previous)
        groups = [(names, total, self.total_weights[names]) for names, total in self.sums.items()]
        if len(all_names := [n for names in self.sums for n in names]) > len(set(all_names)):
            groups = self._sum_by_name()
        for names, total, weight in groups:
            result |= self._split_mean(names, total / weight)
        return result

    def _sum_by_name(self) -> list[tuple[tuple[str, ...], Tensor, float]]:
        """Return sums and weights of single tensors: silos have sent different sets of tensors."""
        totals: dict[str, tuple[Tensor, float]] = {}
        for names, total in self.sums.items():
            for name, piece in zip(names, torch.split(total, [self.previous[n].numel() for n in names])):
                earlier, weight = totals.get(name, (torch.zeros_like(piece), 0.0))
                totals[name] = earlier + piece, weight + self.total_weights[names]
        return [((name,), total, weight) for name, (total, weight) in totals.items()]

    def _split_mean(self, names: Sequence[str], mean: Tensor) -> Tensors:
        """Return a vector of tensors of one type as tensors with the memory layout of the previous ones."""
        dtype = self.previous[names[0]].dtype
        mean = (mean if dtype.is_floating_point else mean.round()).to(dtype)
        # In memory of their own: products of tensors that are not aligned round differently.
        targets = {n: torch.empty_like(self.previous[n]) for n in names}
        pieces = torch.split(mean, [t.numel() for t in targets.values()])
        views = [move_channels_last(t) for t in targets.values()]
        torch._foreach_copy_(views, [piece.view(view.shape) for piece, view in zip(pieces, views)])
        return targets


def join_by_type(tensors: Tensors, like: Mapping[str, Tensor]) -> dict[tuple[str, ...], Tensor]:
    """Return the vectors of `PackedTensors`, by the types of tensors of the same names."""
    return {
        names: torch.cat([flatten_channels_last(tensors[name]) for name in names])
        for names in group_by_type({name: like[name] for name in tensors})
    }


def group_by_type(tensors: Mapping[str, Tensor]) -> list[tuple[str, ...]]:
    """Return the sorted names of all tensors but codewords, those of one type together."""
    groups: dict[torch.dtype, list[str]] = {}
    for name, tensor in tensors.items():
        if not is_codeword_tensor(name):
            groups.setdefault(tensor.dtype, []).append(name)
    return [tuple(sorted(names)) for names in groups.values()]


def move_channels_last(tensor: Tensor) -> Tensor:
    """Return filters with the axis of channels at the end, which is their order in memory; others as they are."""
    return tensor.movedim(1, -1) if tensor.dim() == 4 else tensor


def flatten_channels_last(tensor: Tensor) -> Tensor:
    """Return the values as a vector, without a copy if the channels of filters are last in memory."""
    return move_channels_last(tensor).reshape(-1)


def find_reply_error(reply: Reply, model_state: Tensors, access_row: Tensor) -> str:
    """Return why a reply must not be averaged, or an empty string."""
    if not 0 < reply.num_examples < math.inf:
        return f"num_examples={reply.num_examples} is not a positive number"
    if reply.tensors.keys() != model_state.keys():
        name = min(reply.tensors.keys() ^ model_state.keys())
        return f"tensor {name} is {'missing' if name in model_state else 'not expected'}"
    for name, tensor in reply.tensors.items():
        expected = model_state[name].shape
        if is_codeword_tensor(name):
            expected = torch.Size((int(access_row.sum()), *expected[1:]))
        if tensor.shape != expected:
            return f"{name} has shape {tuple(tensor.shape)}, expected {tuple(expected)}"
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
