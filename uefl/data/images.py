"""The one result of every importer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Images:
    """Labelled images as they came from a source, before anybody owns them."""

    name: str
    x: Tensor  # uint8 [n, c, h, w]
    y: Tensor  # int64 [n]
    classes: tuple[str, ...]
    test: Tensor  # bool [n]: the source's own test split
    domain: Tensor | None = None  # int64 [n], an index into `domains`
    domains: tuple[str, ...] = ()
    # Fixed per data set, one per channel, of pixels in [0, 1]; never pooled from silos.
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)
    silo: Tensor | None = None  # int64 [n], an index into `silos`: the owner that the source itself names
    silos: tuple[str, ...] = ()
