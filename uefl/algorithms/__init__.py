"""What is learned. Algorithms never import engines."""

from uefl.algorithms.book import Book
from uefl.algorithms.bounds import Alone, Pooled
from uefl.algorithms.distrans import DisTrans
from uefl.algorithms.fedavg import FedAvg
from uefl.algorithms.fedbn import FedBN
from uefl.algorithms.fedbr import FedBR
from uefl.algorithms.fedcr import FedCR
from uefl.algorithms.fediir import FedIIR
from uefl.algorithms.fedprox import FedProx
from uefl.algorithms.fedsr import FedSR
from uefl.algorithms.scaffold import Scaffold
from uefl.algorithms.uefl import UEFL, VQFedAvg
from uefl.algorithms.vhl import VHL
from uefl.errors import unknown
from uefl.plugins import has

ALGORITHMS: dict[str, type[FedAvg]] = {
    "uefl": UEFL,
    "fedavg": FedAvg,
    "vq-fedavg": VQFedAvg,
    "fedprox": FedProx,
    "scaffold": Scaffold,
    "fedbn": FedBN,
    "fedsr": FedSR,
    "fediir": FedIIR,
    "fedcr": FedCR,
    "vhl": VHL,
    "fedbr": FedBR,
    "distrans": DisTrans,
    "alone": Alone,
    "pooled": Pooled,
}


def algorithm(name: str) -> type[FedAvg]:
    """The method of this name."""
    if not has(ALGORITHMS, "uefl.methods", name):
        raise unknown("method", name, ALGORITHMS)
    return ALGORITHMS[name]


__all__ = [
    "ALGORITHMS",
    "UEFL",
    "VHL",
    "Alone",
    "Book",
    "DisTrans",
    "FedAvg",
    "FedBN",
    "FedBR",
    "FedCR",
    "FedIIR",
    "FedProx",
    "FedSR",
    "Pooled",
    "Scaffold",
    "VQFedAvg",
    "algorithm",
]
