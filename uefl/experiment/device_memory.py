"""What a run does with the memory of its device: give it back, and notice where it does not suffice."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


def try_within_memory(run_once: Callable[[], Result], device: str) -> Result | None:
    """Return what a run of stacks returns, or None if it does not fit into the device's memory.

    An engine splits its stacks by itself. This is for memory that ends elsewhere, as in a server's average, while other
    programs use the device. Completed rounds are kept, and nothing is left on the device.
    """
    try:
        return run_once()
    except torch.OutOfMemoryError:
        return None
    finally:
        free_cached_memory(device)


def free_cached_memory(device: str) -> None:
    """Give back the device memory that torch keeps after the engine of a run, and its data, are gone."""
    if device.startswith("cuda"):
        gc.collect()
        torch.cuda.empty_cache()
