"""Federated learning across silos whose data do not look alike."""

__version__ = "0.1.0"

from uefl.algorithms import UEFL, Alone, Book, FedAvg, Pooled, VQFedAvg
from uefl.codebook import Codebook
from uefl.data import Data
from uefl.engines import Serial
from uefl.errors import InputError
from uefl.experiment import Architecture, Experiment
from uefl.federation import Part, Server, Silo
from uefl.kmeans import kmeans
from uefl.loading import load_model
from uefl.local import Local
from uefl.models.net import Net
from uefl.train import train
from uefl.uncertainty import uncertainty

__all__ = [
    "UEFL",
    "Alone",
    "Architecture",
    "Book",
    "Codebook",
    "Data",
    "Experiment",
    "FedAvg",
    "InputError",
    "Local",
    "Net",
    "Part",
    "Pooled",
    "Serial",
    "Server",
    "Silo",
    "VQFedAvg",
    "kmeans",
    "load_model",
    "train",
    "uncertainty",
]
