"""Test whether new examples are drawn like those of a reference: permutation tests on whole examples.

Features of one image are not independent, so that only images are exchanged. Two statistics are tested: the distance of
Kolmogorov and Smirnov between predictive entropies, and the total variation between the use of codewords. Holm's rule
keeps the chance of a false alarm below the level, and planned looks share the level equally (Bonferroni).

Legend for shapes: n reference examples, m new ones, N = n + m, V codewords, P permutations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.random import PCG64, Generator
from numpy.typing import NDArray

Array = NDArray[np.float64]
Tracker = Callable[[Iterable[NDArray[np.bool_]], int], Iterable[NDArray[np.bool_]]]
ENTROPY, CODEWORDS = "entropy", "codeword use"
MIN_PERMUTATIONS = 1999
PERMUTATIONS_PER_LEVEL = 20  # the smallest p-value is this much below the level that it is compared with
_NUMBERS_AT_ONCE = 4_000_000  # which bounds the memory of permutations


@dataclass(frozen=True)
class Comparison:
    """One statistic of a reference and new examples."""

    name: str
    statistic: float  # between 0, equal, and 1
    p_value: float
    level: float  # by Holm's rule; an alarm is a p-value of at most this

    @property
    def is_alarm(self) -> bool:
        """Whether the new examples differ by more than chance explains."""
        return self.p_value <= self.level


def compare_examples(
    reference_entropy: Array,
    new_entropy: Array,
    reference_counts: Array,
    new_counts: Array,
    *,
    level: float,
    looks: int,
    seed: int,
    track: Tracker = lambda masks, _: masks,
) -> list[Comparison]:
    """Compare entropies [n], [m] and, where there are codewords, their counts per example [n, V], [m, V].

    `track` can show the progress of iterating over blocks of permutations, given their number.
    """
    n = len(reference_entropy)
    entropy = np.concatenate([reference_entropy, new_entropy])
    counts = np.concatenate([reference_counts, new_counts])
    names = [ENTROPY, *([CODEWORDS] if counts.shape[1] else [])]
    functions: dict[str, Callable[[NDArray[np.bool_]], Array]]
    functions = {ENTROPY: EntropyDistance(entropy, n), CODEWORDS: CodewordDistance(counts, n)}
    observed = np.arange(len(entropy))[None] < n
    statistics = {name: float(functions[name](observed)[0]) for name in names}
    exceeding = dict.fromkeys(names, 0)
    num_permutations = count_permutations(level / looks / len(names))
    blocks = draw_references(n, len(entropy), num_permutations, seed)
    for masks in track(blocks, -(-num_permutations // count_per_block(len(entropy)))):
        for name in names:
            # Equal arrangements give equal statistics up to rounding.
            exceeding[name] += int((functions[name](masks) >= statistics[name] - 1e-12).sum())
    p_values = {name: (1 + exceeding[name]) / (1 + num_permutations) for name in names}
    levels = assign_levels(p_values, level / looks)
    return [Comparison(name, statistics[name], p_values[name], levels[name]) for name in names]


def assign_levels(p_values: dict[str, float], level: float) -> dict[str, float]:
    """Return the level of each test by Holm's rule; after the first p-value that is too large, none is an alarm."""
    levels, is_rejecting = {}, True
    for rank, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        own = level / (len(p_values) - rank)
        is_rejecting = is_rejecting and p_values[name] <= own
        # The largest p-value may be below its level, although a smaller one was not: then only the first level counts.
        levels[name] = own if is_rejecting or p_values[name] > own else level / len(p_values)
    return levels


def count_permutations(level: float) -> int:
    """Return how many permutations give p-values well below a level."""
    return max(MIN_PERMUTATIONS, int(np.ceil(PERMUTATIONS_PER_LEVEL / level)) - 1)


def count_per_block(total: int) -> int:
    """Return how many permutations of N examples are drawn at once."""
    return max(1, _NUMBERS_AT_ONCE // total)


def draw_references(n: int, total: int, num_permutations: int, seed: int) -> Iterator[NDArray[np.bool_]]:
    """Yield masks [.., N] that choose n of N examples at random."""
    rng = Generator(PCG64(seed))
    per_block = count_per_block(total)
    for start in range(0, num_permutations, per_block):
        keys = rng.random((min(per_block, num_permutations - start), total))
        masks = np.zeros(keys.shape, dtype=bool)
        np.put_along_axis(masks, np.argpartition(keys, n - 1, axis=1)[:, :n], True, axis=1)
        yield masks


class EntropyDistance:
    """The largest distance between the empirical distributions of two parts of the values [N], given the first part."""

    def __init__(self, values: Array, n: int) -> None:
        self.order = np.argsort(values, kind="stable")
        in_order = values[self.order]
        self.is_last = np.append(in_order[1:] != in_order[:-1], True)  # of equal values
        self.n, self.m = n, len(values) - n

    def __call__(self, masks: NDArray[np.bool_]) -> Array:
        steps = np.where(masks[:, self.order], 1 / self.n, -1 / self.m)
        sums = np.cumsum(steps, 1, out=steps)
        sums = sums if self.is_last.all() else sums[:, self.is_last]
        distances: Array = np.maximum(sums.max(1), -sums.min(1))
        return distances


class CodewordDistance:
    """Half the sum of absolute differences between the mean use of codewords [N, V] in two parts."""

    def __init__(self, counts: Array, n: int) -> None:
        self.use = counts / np.maximum(counts.sum(1, keepdims=True), 1)
        self.n, self.m = n, len(counts) - n

    def __call__(self, masks: NDArray[np.bool_]) -> Array:
        first = masks.astype(np.float64) @ self.use
        distances: Array = np.abs(first / self.n - (self.use.sum(0) - first) / self.m).sum(1) / 2
        return distances
