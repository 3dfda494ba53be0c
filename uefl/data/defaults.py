"""What each data set and each cut means unless told otherwise: the paper's set-ups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from uefl.data.cuts import CUTS
from uefl.data.spec import Data
from uefl.errors import unknown

_PAPER: dict[str, Any] = {"train": 2000, "test": 500}  # nine silos: 0°, −50°, 120°, three of each
_ALL: dict[str, Any] = {"train": 0, "test": 0}
_SIX = tuple(f"rotate:{angle}" for angle in (0, 15, 30, 45, 60, 75))

SETS: dict[str, dict[str, Any]] = {
    "mnist5k": {},
    "mnist": _PAPER,
    "fmnist": _PAPER,
    "emnist-letters": {**_PAPER, "only": 10},  # FedCR takes the letters a to j
    "gtsrb": _PAPER,
    "cifar10": _PAPER,
    "cifar100": {**_PAPER, "train": 4000},
    "pacs": {**_ALL, "cut": "held-out"},
}
OWN_DOMAINS = {"pacs": "sketch"}  # sources with domains of their own, and the one held out unless told

_TEN: dict[str, Any] = {**_ALL, "shifts": ("none",), "silos": (10,)}
_HUNDRED: dict[str, Any] = {  # FedCR: merge, shuffle, 70/30 of each client's own images
    **_TEN,
    "silos": (100,),
    "merge": True,
    "test_part": 0.3,
    "test_labels": "own",
}
_ONE_EACH: dict[str, Any] = {**_ALL, "silos": ()}

_BY_CUT: dict[str, dict[str, Any]] = {
    "domains": {},
    "quantity": {**_TEN, "alpha": 0.5},
    "dirichlet": _TEN,
    "vhl": _TEN,
    "fedbr": _TEN,
    "fedcr": {**_HUNDRED, "alpha": 0.3},
    "classes": _HUNDRED,
    "held-out": {**_ONE_EACH, "shifts": _SIX, "target": _SIX[0]},
    "ghifary": {
        **_ONE_EACH,
        "shifts": tuple(s.replace("rotate", "rotate-nearest") for s in _SIX),
        "target": "rotate-nearest:0",
    },
    "given": {**_ONE_EACH, "shifts": ()},
}


def defaults(name: str, cut: str = "") -> Data:
    """The paper's set-up of a data set, or what a cut is usually made with; other sources have silos of their own."""
    of_set = SETS.get(name, {"cut": "given"})
    cut = cut or of_set.get("cut", "domains")
    if cut not in CUTS:
        raise unknown("cut", cut, CUTS)
    fields = {**of_set, **_BY_CUT[cut], "name": name, "cut": cut}
    if name in OWN_DOMAINS and cut in ("domains", "held-out"):
        fields |= {"shifts": (), "silos": (), "target": OWN_DOMAINS[name] if cut == "held-out" else ""}
    return replace(Data(), **fields)
