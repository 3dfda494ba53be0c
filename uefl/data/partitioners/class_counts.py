"""Label skew: rules that determine how many images of each class every silo gets.

Each rule maps the number of images per class [C] to numbers per silo and class [K, C]; K silos, C classes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from uefl.core.errors import InputError

Counts = NDArray[np.int64]
_MAX_DRAWS = 1000
_NUM_TURNS = 50  # turns in which `draw_fedcr_counts` fills a silo


def draw_vhl_counts(rng: Generator, counts: Counts, num_silos: int, *, alpha: float) -> Counts:
    """Divide each class among silos by Dir(α); a silo that has N/K images gets no more, and each gets at least C.

    Virtual Homogeneity Learning (Tang et al., ICML 2022): the common LDA partition with a cap.
    """
    for _ in range(_MAX_DRAWS):
        assigned = np.zeros((num_silos, len(counts)), np.int64)
        for c, count in enumerate(counts):
            fractions = rng.dirichlet(np.full(num_silos, alpha)) * (assigned.sum(1) < counts.sum() / num_silos)
            if not fractions.sum() > 0:  # a tiny α can leave nothing for the silos that still need images
                break
            ends = (np.cumsum(fractions / fractions.sum()) * count).astype(np.int64)
            ends[-1] = count
            assigned[:, c] = np.diff(ends, prepend=0)
        if assigned.sum() == counts.sum() and assigned.sum(1).min() >= len(counts):
            return assigned
    raise InputError(
        f"partitioner=dirichlet-vhl: in {_MAX_DRAWS} draws with alpha={alpha:g}, a silo always had fewer than "
        f"{len(counts)} images; increase alpha or reduce num_silos from {num_silos}"
    )


def draw_fedbr_counts(rng: Generator, counts: Counts, num_silos: int, *, alpha: float) -> Counts:
    """Fill silos of equal size one after another, with labels from Dir(α · frequencies of the remaining images).

    FedBR (Guo et al., ICML 2023). The concentration per class is only about α/C: the skew is stronger than α suggests.
    """
    return _draw_silo_by_silo(rng, counts, num_silos, alpha, by_frequency=True)


def draw_dirichlet_counts(rng: Generator, counts: Counts, num_silos: int, *, alpha: float) -> Counts:
    """Fill silos of equal size one after another, with labels from Dir(α · 1)."""
    return _draw_silo_by_silo(rng, counts, num_silos, alpha, by_frequency=False)


def _draw_silo_by_silo(rng: Generator, counts: Counts, num_silos: int, alpha: float, *, by_frequency: bool) -> Counts:
    remaining, silo_size = counts.copy(), counts.sum() // num_silos
    assigned = np.zeros((num_silos, len(counts)), np.int64)
    for silo_counts in assigned:
        distribution = np.zeros(len(counts))
        while silo_counts.sum() < silo_size:
            distribution = distribution * (remaining > 0)
            if not distribution.sum() > 0:  # at the start, and when all of its classes are used up
                base = remaining / remaining.sum() if by_frequency else np.ones(len(remaining))
                distribution[remaining > 0] = rng.dirichlet(alpha * base[remaining > 0])
            draws = rng.multinomial(silo_size - silo_counts.sum(), distribution / distribution.sum())
            taken = np.minimum(draws, remaining)
            silo_counts += taken
            remaining -= taken
    return assigned


def draw_fedcr_counts(rng: Generator, counts: Counts, num_silos: int, *, alpha: float) -> Counts:
    """Fill silos of equal size in parallel, with labels from Dir(α · 1).

    FedCR (Zhang et al., ICML 2023) assigns image by image to a random silo that is not full; we assign in small turns.
    Unlike `dirichlet`, no silo is last and has to take what remains: label distributions are less extreme.
    """
    remaining, silo_size = counts.copy(), counts.sum() // num_silos
    assigned = np.zeros((num_silos, len(counts)), np.int64)
    distributions = rng.dirichlet(np.full(len(counts), alpha), size=num_silos)
    while (num_missing := silo_size - assigned.sum(1)).any():
        available = distributions * (remaining > 0)
        is_exhausted = ~(available.sum(1) > 0)
        available[is_exhausted] = remaining / remaining.sum()
        turn_sizes = np.minimum(num_missing, -(-silo_size // _NUM_TURNS))
        draws = rng.multinomial(turn_sizes, available / available.sum(1, keepdims=True))
        for c in np.flatnonzero(draws.sum(0) > remaining):  # the last images of a class go to some of these silos
            draws[:, c] = rng.multivariate_hypergeometric(draws[:, c], remaining[c])
        assigned += draws
        remaining -= draws.sum(0)
    return assigned


def assign_consecutive_classes(_: Any, counts: Counts, num_silos: int, *, classes_per_silo: int) -> Counts:
    """Give silo k the classes k, k+1, … (mod C); the silos that have a class share its images evenly (FedCR)."""
    num_classes = len(counts)
    has_class = (np.arange(num_classes) - np.arange(num_silos)[:, None]) % num_classes < classes_per_silo  # [K, C]
    rank, num_holders = np.cumsum(has_class, 0) - 1, np.maximum(has_class.sum(0), 1)
    return np.where(has_class, counts // num_holders + (rank < counts % num_holders), 0)


def allocate_proportionally(counts: Counts, sizes: Counts) -> Counts:
    """Divide `sizes` [C] among silos in proportion to their `counts` [K, C], by largest remainders without loss."""
    exact = counts * (sizes / np.maximum(counts.sum(0), 1))
    rounded_down = np.floor(exact).astype(np.int64)
    num_missing = np.where(counts.sum(0) > 0, sizes - rounded_down.sum(0), 0)
    rank = np.argsort(np.argsort(-(exact - rounded_down), axis=0, kind="stable"), axis=0, kind="stable")
    allocated: Counts = rounded_down + (rank < num_missing)
    return allocated
