"""UEFL: silos that stand out by their uncertainty get words of their own.

Uncertainty-based extensible codebook for federated learning in heterogeneous data silos (ICML 2025), Algorithm 1.
The round is FedAvg's (`fedavg.py`), the end of an iteration is the book's (`book.py`); this is their sum.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from uefl.algorithms.book import Book
from uefl.algorithms.fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class UEFL(FedAvg):
    """FedAvg with an extensible codebook: uncertain silos get their own words, found by K-means on their features."""

    codebook: Book | None = field(default_factory=Book)


@dataclass(frozen=True, kw_only=True)
class VQFedAvg(FedAvg):
    """FedAvg with a static codebook: one for all silos, or (`books=domain`, an oracle) one per true domain."""

    codebook: Book | None = field(default_factory=lambda: Book(extend=False))
