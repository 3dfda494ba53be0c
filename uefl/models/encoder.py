"""What every encoder of the literature has in common here."""

from __future__ import annotations

from torch import nn

from uefl.errors import InputError


class Encoder(nn.Module):
    """Images [B, c, h, w] become features: a map [B, d, h', w'], or a vector [B, d] where it is pooled or flattened."""

    width: int  # d
    official: str = ""  # torchvision's file of ImageNet weights, if there is one

    def __init__(self, *, channels: int, size: int, least: int = 1) -> None:
        super().__init__()
        if channels < 1:
            raise InputError(f"channels={channels}: an image has at least one")
        if size < least:
            name = type(self).__name__
            raise InputError(f"size={size}: {name} shrinks images so often that they need {least}x{least} pixels")


def kaiming(net: nn.Module) -> None:
    """Start as torchvision does: convolutions Kaiming-normal by fan-out, biases 0, norms the identity."""
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        elif isinstance(layer, nn.BatchNorm2d):
            nn.init.ones_(layer.weight)
            nn.init.zeros_(layer.bias)
