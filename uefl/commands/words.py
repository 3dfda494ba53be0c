"""What a user says: `uefl compare fedavg uefl mnist gamma=0.2` as experiments."""

from __future__ import annotations

from collections.abc import Sequence

from uefl import plugins
from uefl.algorithms import ALGORITHMS
from uefl.data import SOURCES
from uefl.errors import InputError
from uefl.experiment import Experiment
from uefl.recipes import recipe
from uefl.settings import has, override

DATA = "mnist5k"


def spoken(words: Sequence[str], methods: Sequence[str], preset: str) -> dict[str, Experiment]:
    """One experiment a method named (or of those meant when none is), with every `field=value` that it has."""
    assignments = [w for w in words if "=" in w]
    names = [w for w in words if "=" not in w]
    for name in names:
        if not (plugins.has(ALGORITHMS, "uefl.methods", name) or plugins.has(SOURCES, "uefl.readers", name)):
            raise InputError(
                f"'{name}' is neither a method ({', '.join(ALGORITHMS)}), nor a data set ({', '.join(SOURCES)}), "
                "nor field=value"
            )
    data = [n for n in names if n in SOURCES] or [DATA]
    if len(data) > 1:
        raise InputError(f"one data set at a time, not {', '.join(data)}")
    chosen = list(dict.fromkeys(n for n in names if n in ALGORITHMS)) or list(methods)
    # These decide what the other settings are.
    cut, encoder, book = (_said(assignments, name) for name in ("cut", "encoder", "codebook"))
    base = {name: recipe(name, data[0], preset, cut, encoder=encoder, book=book == "on") for name in chosen}
    rest = [a for a in assignments if a != "codebook=on"]
    return {name: override(e, _own(e, rest, base)) for name, e in base.items()}


def _said(assignments: Sequence[str], name: str) -> str:
    return next((a.removeprefix(f"{name}=") for a in assignments if a.startswith(f"{name}=")), "")


def _own(experiment: Experiment, assignments: Sequence[str], base: dict[str, Experiment]) -> list[str]:
    """The assignments that concern this method: `gamma=0.2` is for those with a codebook, but not for nobody."""
    return [
        a
        for a in assignments
        if has(experiment, a.partition("=")[0]) or not any(has(e, a.partition("=")[0]) for e in base.values())
    ]
