"""What a shell offers after Tab: names from the registries, which import nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable


def complete_dataset(incomplete: str) -> list[str]:
    """Return the data sets that begin with a text."""
    from uefl.data import SOURCES

    return _select(SOURCES, incomplete)


def complete_topic(incomplete: str) -> list[str]:
    """Return the topics of `uefl list` that begin with a text."""
    from uefl.algorithms import METHODS

    return _select(("methods", "data", "partitioners", "encoders", "engines", *METHODS), incomplete)


def complete_argument(incomplete: str) -> list[str]:
    """Return the methods, data sets, partitioners and encoders that begin with a text."""
    from uefl.algorithms import METHODS
    from uefl.data import PARTITIONERS, SOURCES
    from uefl.models import ENCODERS

    choices = [f"partitioner={name}" for name in PARTITIONERS] + [f"encoder={name}" for name in ENCODERS]
    return _select((*METHODS, *SOURCES, *choices), incomplete)


def _select(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
