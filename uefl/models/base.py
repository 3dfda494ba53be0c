"""The base class of our encoders, and their initialization."""

from __future__ import annotations

from torch import nn

from uefl.core.errors import InputError


class Encoder(nn.Module):
    """Map images [B, c, h, w] to features: a map [B, d, h', w'], or a vector [B, d] if pooled or flattened.

    Encoders apply max-pool before ReLU. Both orders give the same values and gradients, since ReLU is monotonic, and
    ReLU then works on a quarter of the values.
    """

    num_features: int  # d
    accepts_rows = False  # also encodes the rows of a table [B, c]
    torchvision_file: str = ""  # torchvision's file of ImageNet weights, if one exists

    def __init__(self, *, in_channels: int, image_size: int, min_image_size: int = 1) -> None:
        super().__init__()
        if in_channels < 1:
            raise InputError(f"in_channels={in_channels} must be at least 1")
        if image_size < min_image_size:
            name = type(self).__name__
            raise InputError(f"image_size={image_size} must be at least {min_image_size} for encoder {name}")


def init_kaiming_normal(net: nn.Module) -> None:
    """Initialize as torchvision does: convolutions Kaiming-normal by fan-out, biases 0, batch norms the identity."""
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        elif isinstance(layer, nn.BatchNorm2d):
            nn.init.ones_(layer.weight)
            nn.init.zeros_(layer.bias)
