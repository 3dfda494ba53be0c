"""What is learned. Algorithms never import engines."""

from uefl.algorithms.book import Book
from uefl.algorithms.bounds import Alone, Pooled
from uefl.algorithms.fedavg import FedAvg
from uefl.algorithms.uefl import UEFL, VQFedAvg
from uefl.errors import unknown
from uefl.plugins import has

ALGORITHMS: dict[str, type[FedAvg]] = {
    "uefl": UEFL,
    "fedavg": FedAvg,
    "vq-fedavg": VQFedAvg,
    "alone": Alone,
    "pooled": Pooled,
}


def algorithm(name: str) -> type[FedAvg]:
    """The method of this name."""
    if not has(ALGORITHMS, "uefl.methods", name):
        raise unknown("method", name, ALGORITHMS)
    return ALGORITHMS[name]


__all__ = ["ALGORITHMS", "UEFL", "Alone", "Book", "FedAvg", "Pooled", "VQFedAvg", "algorithm"]
