"""Copies from the host to a device."""

from __future__ import annotations

import torch
from torch import Tensor


def copy_without_waiting(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to a device, from pinned memory, so that the host does not wait for the device."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
