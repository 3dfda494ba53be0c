"""Build an encoder by its name."""

from __future__ import annotations

from inspect import signature
from typing import Any

from torch import nn

from uefl.core.errors import InputError
from uefl.models import get_encoder_builder


def build_encoder(name: str, in_channels: int, **settings: Any) -> nn.Module:
    """Return a new encoder. All accept `image_size`; those that end in a feature map accept `average_pool`."""
    build = get_encoder_builder(name)
    known = [setting for setting in signature(build).parameters if setting != "in_channels"]
    for setting in settings:
        if setting not in known:
            raise InputError(f"encoder {name} takes no {setting}; its settings: {', '.join(known)}")
    return build(in_channels=in_channels, **settings)
