"""Data sets and partitioners by name. Importing this module imports neither torch nor any reader."""

from __future__ import annotations

from typing import TYPE_CHECKING

from uefl.core.registry import Entry, Registry

if TYPE_CHECKING:
    from uefl.data.partitioners.partition import Partitioner
    from uefl.data.sources import Source

SOURCES: Registry[Source] = Registry(
    "data set",
    {
        "mnist5k": Entry(
            "uefl.data.readers.embedded:MNIST5K", "5000 MNIST digits that ship with a dependency; no download"
        ),
        "digits": Entry(
            "uefl.data.readers.embedded:DIGITS", "1797 digits, 8×8 gray, that ship with a dependency; no download"
        ),
        "heart": Entry(
            "uefl.data.readers.heart:HEART", "Heart disease: 920 patients of four hospitals, a table; no download"
        ),
        "mnist": Entry("uefl.data.readers.idx:MNIST", "MNIST: 70 000 digits, 28×28 gray"),
        "fmnist": Entry("uefl.data.readers.idx:FMNIST", "Fashion-MNIST: 70 000 clothes, 28×28 gray"),
        "emnist-letters": Entry(
            "uefl.data.readers.idx:EMNIST_LETTERS", "EMNIST letters: 145 600 letters, 28×28 gray; a to j by default"
        ),
        "cifar10": Entry("uefl.data.readers.cifar:CIFAR10", "CIFAR10: 60 000 objects of 10 classes, 32×32 color"),
        "cifar100": Entry("uefl.data.readers.cifar:CIFAR100", "CIFAR100: 60 000 objects of 100 classes, 32×32 color"),
        "gtsrb": Entry("uefl.data.readers.gtsrb:GTSRB", "GTSRB: 51 839 traffic signs of 43 classes, 32×32 color"),
        "pacs": Entry(
            "uefl.data.readers.image_folder:PACS", "PACS: 9991 objects of 7 classes in 4 domains, color; set image_size"
        ),
        "folder": Entry(
            "uefl.data.readers.image_folder:FOLDER", "Your own images: path=<folder, zip archive or CSV manifest>"
        ),
        "tensors": Entry(
            "uefl.data.readers.tensor_file:TENSORS",
            "Your own images in one file, larger than memory if need be: path=<safetensors file with x, y, silo>",
        ),
        "table": Entry("uefl.data.readers.table:TABLE", "Your own table: path=<CSV file> label=<column> silo=<column>"),
    },
    group="uefl.readers",
)

PARTITIONERS: Registry[Partitioner] = Registry(
    "partitioner",
    {
        "domains": Entry(
            "uefl.data.partitioners.domains:DOMAINS", "Silos of equal or given size per domain; the paper's partition"
        ),
        "quantity": Entry("uefl.data.partitioners.skew:QUANTITY", "Silo sizes from Dir(alpha); labels are not skewed"),
        "dirichlet": Entry("uefl.data.partitioners.skew:DIRICHLET", "Labels per silo from Dir(alpha), equal sizes"),
        "dirichlet-vhl": Entry(
            "uefl.data.partitioners.skew:DIRICHLET_VHL", "Each class over silos by Dir(alpha), unequal sizes (VHL)"
        ),
        "dirichlet-fedbr": Entry(
            "uefl.data.partitioners.skew:DIRICHLET_FEDBR",
            "Labels per silo from Dir(alpha · remaining class frequencies), equal sizes (FedBR)",
        ),
        "dirichlet-fedcr": Entry(
            "uefl.data.partitioners.skew:DIRICHLET_FEDCR",
            "Labels per silo from Dir(alpha), equal sizes, all silos filled in parallel (FedCR)",
        ),
        "pathological": Entry(
            "uefl.data.partitioners.skew:PATHOLOGICAL", "classes_per_silo consecutive classes per silo (FedCR)"
        ),
        "leave-one-domain-out": Entry(
            "uefl.data.partitioners.leave_one_domain_out:LEAVE_ONE_DOMAIN_OUT",
            "The target domain is only tested; the other domains train (DomainBed, FedIIR)",
        ),
        "leave-one-domain-out-paired": Entry(
            "uefl.data.partitioners.leave_one_domain_out:LEAVE_ONE_DOMAIN_OUT_PAIRED",
            "The same, with the same 100 images per class in every domain (Ghifary et al.)",
        ),
        "natural": Entry("uefl.data.partitioners.natural:NATURAL", "The silos that the source itself names"),
    },
)
