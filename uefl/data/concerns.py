"""What is odd about silos but no error: the command line counts it, `strict` refuses it."""

from __future__ import annotations

from collections.abc import Sequence

from uefl.data.images import Images
from uefl.federation import Silo

_NAMED = 5


def concerns(silos: Sequence[Silo], images: Images) -> list[str]:
    """One line for each kind of oddity, of the images and of the silos cut from them."""
    skipped = [f"{images.skipped} bad items were left out"] if images.skipped else []
    return [*skipped, *images.warnings, *images.notes, *lonely(silos)]


def lonely(silos: Sequence[Silo]) -> list[str]:
    """Silos that train with one class."""
    single = [s.name for s in silos if len(s.train.y) and bool((s.train.y == s.train.y[0]).all())]
    return [f"{len(single)} of {len(silos)} silos train with one class only: {_listed(single)}"] if single else []


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
