"""Label skew: rules that say how many images of each class every silo gets.

Each rule sees counts only, [C] images a class, and answers with counts, [K, C]; K silos, C classes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from uefl.errors import InputError

Counts = NDArray[np.int64]
_TRIES = 1000
_TURNS = 50


def vhl(draw: Generator, counts: Counts, silos: int, *, alpha: float) -> Counts:
    """Each class spreads over silos by Dir(α); a silo with its N/K images gets no more, and all get at least C.

    Virtual Homogeneity Learning (Tang et al., ICML 2022): the common LDA cut with a cap.
    """
    for _ in range(_TRIES):
        given = np.zeros((silos, len(counts)), np.int64)
        for c, count in enumerate(counts):
            shares = draw.dirichlet(np.full(silos, alpha)) * (given.sum(1) < counts.sum() / silos)
            if not shares.sum() > 0:  # a tiny α can leave nothing to the silos with room
                break
            ends = (np.cumsum(shares / shares.sum()) * count).astype(np.int64)
            ends[-1] = count
            given[:, c] = np.diff(ends, prepend=0)
        if given.sum() == counts.sum() and given.sum(1).min() >= len(counts):
            return given
    raise InputError(
        f"cut=vhl: {_TRIES} draws with alpha={alpha:g} left one of {silos} silos with fewer than {len(counts)} images; "
        "raise alpha or have fewer silos"
    )


def fedbr(draw: Generator, counts: Counts, silos: int, *, alpha: float) -> Counts:
    """Silos of one size, one after another; a silo's mix is Dir(α · frequencies of what is left), so α/C a class.

    FedBR (Guo et al., ICML 2023). Far harsher than α suggests.
    """
    return _in_turn(draw, counts, silos, alpha, by_frequency=True)


def dirichlet(draw: Generator, counts: Counts, silos: int, *, alpha: float) -> Counts:
    """Silos of one size, one after another; a silo's mix is Dir(α · 1)."""
    return _in_turn(draw, counts, silos, alpha, by_frequency=False)


def _in_turn(draw: Generator, counts: Counts, silos: int, alpha: float, *, by_frequency: bool) -> Counts:
    left, each = counts.copy(), counts.sum() // silos
    given = np.zeros((silos, len(counts)), np.int64)
    for mine in given:
        mix = np.zeros(len(counts))
        while mine.sum() < each:
            mix = mix * (left > 0)
            if not mix.sum() > 0:  # at the start, and when all classes of the mix are used up
                base = left / left.sum() if by_frequency else np.ones(len(left))
                mix[left > 0] = draw.dirichlet(alpha * base[left > 0])
            taken = np.minimum(draw.multinomial(each - mine.sum(), mix / mix.sum()), left)
            mine += taken
            left -= taken
    return given


def fedcr(draw: Generator, counts: Counts, silos: int, *, alpha: float) -> Counts:
    """Silos of one size draw mixes from Dir(α · 1) and are all dealt to at the same time.

    FedCR (Zhang et al., ICML 2023) deals image by image to a random silo that is not full; we deal in small turns.
    Unlike `dirichlet`, no silo comes last and has to take what is left: mixes are less extreme.
    """
    left, each = counts.copy(), counts.sum() // silos
    given = np.zeros((silos, len(counts)), np.int64)
    mixes = draw.dirichlet(np.full(len(counts), alpha), size=silos)
    while (lacking := each - given.sum(1)).any():
        open_mixes = mixes * (left > 0)
        stuck = ~(open_mixes.sum(1) > 0)
        open_mixes[stuck] = left / left.sum()
        asked = draw.multinomial(np.minimum(lacking, -(-each // _TURNS)), open_mixes / open_mixes.sum(1, keepdims=True))
        for c in np.flatnonzero(asked.sum(0) > left):  # the last images of a class go to some of those who ask
            asked[:, c] = draw.multivariate_hypergeometric(asked[:, c], left[c])
        given += asked
        left -= asked.sum(0)
    return given


def consecutive(_: Any, counts: Counts, silos: int, *, each: int) -> Counts:
    """Silo k has classes k, k+1, … (mod C), `each` of them; a class is shared evenly by those who have it (FedCR)."""
    classes = len(counts)
    has = (np.arange(classes) - np.arange(silos)[:, None]) % classes < each  # [K, C]
    rank, holders = np.cumsum(has, 0) - 1, np.maximum(has.sum(0), 1)
    return np.where(has, counts // holders + (rank < counts % holders), 0)


def alike(counts: Counts, sizes: Counts) -> Counts:
    """Spread `sizes` [C] over silos in the proportions of their `counts` [K, C]: largest remainders, nothing lost."""
    exact = counts * (sizes / np.maximum(counts.sum(0), 1))
    whole = np.floor(exact).astype(np.int64)
    missing = np.where(counts.sum(0) > 0, sizes - whole.sum(0), 0)
    rank = np.argsort(np.argsort(-(exact - whole), axis=0, kind="stable"), axis=0, kind="stable")
    given: Counts = whole + (rank < missing)
    return given
