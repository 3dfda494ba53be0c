"""Compare the predictive entropies of silos: which silos are more uncertain than others, beyond chance?

A silo sends a histogram of y = log(entropy + 0.001) over its validation examples. The statistic of silo k is its
largest Welch statistic against another silo, T_k = max_j (ȳ_k − ȳ_j) / √(s_k²/n_k + s_j²/n_j). Its distribution
where all silos are alike comes from permuting examples across silos. P-values are adjusted for the number of silos by
the step-down maximum (Westfall & Young, Resampling-based multiple testing, 1993).
The index of a bin serves as y. Every s² is the variance of these indices plus 1/12, that of values uniform in a bin.
A silo with more than its share of `MAX_EXAMPLES` has its histogram scaled down to that share, which bounds the time.
Legend: K silos, N examples, P permutations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from uefl.core.noise import batched_permutations, derive_key

ENTROPY_BINS = 64  # of equal width in y
MIN_ENTROPY = 1e-3  # added to an entropy before its logarithm
NUM_PERMUTATIONS = 999
MAX_EXAMPLES = 10_000  # of all silos together; histograms of more are scaled down, which makes the test conservative
_MIN_EXAMPLES_PER_SILO = 50  # to which a histogram may be scaled down
_VARIANCE_IN_BIN = 1 / 12  # of values that are uniform in a bin, in units of its width
_BLOCK_SIZE = 1 << 18  # values that are permuted at once
_ROUNDING = 1e-9  # statistics that differ by less are equal


class SiloComparison(NamedTuple):
    """The statistic of a silo and its p-value, adjusted for the number of silos."""

    statistic: float
    p_value: float


def count_entropies(entropy: Tensor, num_classes: int) -> Tensor:
    """Count examples by bin of log(entropy + 0.001), between entropy 0 and log C: [ENTROPY_BINS]."""
    low, high = math.log(MIN_ENTROPY), math.log(math.log(max(num_classes, 2)) + MIN_ENTROPY)
    y = (entropy.double().clamp_min(0) + MIN_ENTROPY).log()
    bins = ((y - low) / (high - low) * ENTROPY_BINS).long().clamp(0, ENTROPY_BINS - 1)
    zeros = torch.zeros(ENTROPY_BINS, dtype=torch.float64, device=entropy.device)
    return zeros.scatter_add(0, bins, torch.ones_like(bins, dtype=torch.float64))


def compare_entropies(
    histograms: Mapping[str, Tensor], noise_key: int, num_permutations: int = NUM_PERMUTATIONS
) -> dict[str, SiloComparison]:
    """Return the comparison of every silo with at least two examples; with fewer than two silos there is none."""
    limit = max(MAX_EXAMPLES // max(len(histograms), 1), _MIN_EXAMPLES_PER_SILO)
    counts = {name: _scale_down(counts.cpu(), limit) for name, counts in sorted(histograms.items())}
    counts = {name: c for name, c in counts.items() if int(c.sum()) > 1}
    if len(counts) < 2:
        return {}
    # The statistic does not change if y is shifted and scaled, so the index of a bin serves as y.
    y = torch.cat([torch.arange(ENTROPY_BINS).repeat_interleave(c) for c in counts.values()]).double()
    sizes = [int(c.sum()) for c in counts.values()]
    observed = _compute_statistics(y[None], sizes)[0]
    num_per_block = max(_BLOCK_SIZE // len(y), 1)
    blocks = [range(i, min(i + num_per_block, num_permutations)) for i in range(0, num_permutations, num_per_block)]
    permuted = [_compute_statistics(_permute(y, noise_key, block), sizes) for block in blocks]
    p_values = _adjust_p_values(observed, torch.cat(permuted))
    return {name: SiloComparison(float(t), float(p)) for name, t, p in zip(counts, observed, p_values)}


def _scale_down(counts: Tensor, limit: int) -> Tensor:
    """Return a histogram as integers; one of more examples than the limit gets about that many, in equal shares."""
    total = float(counts.sum())
    if total <= limit:
        return counts.round().long()
    ends = (counts.cumsum(0) * (limit / total)).round().long()  # rounding the cumulated counts keeps their sum
    return ends.diff(prepend=torch.zeros(1, dtype=torch.int64))


def _permute(y: Tensor, noise_key: int, block: range) -> Tensor:
    """Return the permutations of y [N] with these numbers: [len(block), N]."""
    keys = torch.tensor([derive_key(noise_key, i) for i in block])
    return y[batched_permutations(keys, [len(y)] * len(block))]


def _compute_statistics(y: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return T_k of every silo [P, K] for values y [P, N] that are sorted by silo."""
    n = torch.tensor(sizes, dtype=torch.float64)
    groups = torch.split(y, list(sizes), 1)
    mean = torch.stack([group.mean(1) for group in groups], 1)
    variance = torch.stack([group.var(1) for group in groups], 1) + _VARIANCE_IN_BIN
    squared_error = variance / n
    difference = mean[:, :, None] - mean[:, None, :]
    t = difference / (squared_error[:, :, None] + squared_error[:, None, :]).sqrt()
    is_self = torch.eye(len(sizes), dtype=torch.bool)
    return t.masked_fill(is_self, -math.inf).max(2).values


def _adjust_p_values(observed: Tensor, permuted: Tensor) -> Tensor:
    """Return step-down p-values: a silo is compared with the maximum over itself and all silos of smaller statistic."""
    order = observed.argsort()  # ascending
    maxima = permuted[:, order].cummax(1).values
    exceeded = (maxima >= observed[order] - _ROUNDING).sum(0)
    p = (1 + exceeded.double()) / (1 + len(permuted))
    p = p.flip(0).cummax(0).values.flip(0)  # a silo is found only if all silos of larger statistic are
    return torch.empty_like(p).scatter_(0, order, p)
