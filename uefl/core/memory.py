"""Refuse work that cannot fit into memory before it allocates: the system would end the process without a message."""

from __future__ import annotations

import os
from pathlib import Path

from uefl.core.errors import InputError

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")  # of a container


def read_total_memory() -> int | None:
    """Return the bytes of memory that this process may use, or None where the system does not tell."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None
    try:
        return min(total, int(_CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):  # no container, or one without a limit
        return total


def check_memory(num_bytes: int, purpose: str, advice: str) -> None:
    """Raise an `InputError` if something needs more memory than this machine has; `advice` names the setting."""
    total = read_total_memory()
    if total is not None and num_bytes > total:
        needed, available = (f"{n / 1e9:.1f} GB" for n in (num_bytes, total))
        raise InputError(f"{purpose} would need {needed} of memory, but this machine has {available}; {advice}")
