"""Changes of the colors of pixels [B, 3, H, W] in [0, 1], one factor per image [B]: jitter and gray.

The formulas are those of torchvision's `ColorJitter` and `RandomGrayscale`; here a whole batch is changed at once, and
the caller draws the factors.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LUMA = (0.299, 0.587, 0.114)  # weights of red, green and blue in a gray value


def to_gray(pixels: Tensor) -> Tensor:
    """Return gray values [B, 1, H, W]."""
    red, green, blue = pixels.unbind(1)
    return (_LUMA[0] * red + _LUMA[1] * green + _LUMA[2] * blue).unsqueeze(1)


def blend(pixels: Tensor, other: Tensor, factors: Tensor) -> Tensor:
    """Return f · pixels + (1 − f) · other, within [0, 1]."""
    f = factors[:, None, None, None]
    return (f * pixels + (1 - f) * other).clamp(0, 1)


def jitter_colors(
    pixels: Tensor, brightness: Tensor, contrast: Tensor, saturation: Tensor, hue_shift: Tensor
) -> Tensor:
    """Change brightness, contrast, saturation and hue, in this order; a hue shift of 1 is the whole color circle."""
    pixels = blend(pixels, torch.zeros_like(pixels), brightness)
    pixels = blend(pixels, to_gray(pixels).mean((2, 3), keepdim=True), contrast)
    pixels = blend(pixels, to_gray(pixels), saturation)
    return shift_hue(pixels, hue_shift)


def shift_hue(pixels: Tensor, shift: Tensor) -> Tensor:
    """Turn the hue of every pixel by a fraction of the color circle."""
    hue, saturation, value = _rgb_to_hsv(pixels)
    return _hsv_to_rgb((hue + shift[:, None, None]) % 1, saturation, value)


def _rgb_to_hsv(pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    red, green, blue = pixels.unbind(1)
    value, least = pixels.amax(1), pixels.amin(1)
    spread = value - least
    is_gray = spread == 0
    divisor = torch.where(is_gray, 1, spread)
    from_red, from_green, from_blue = ((value - channel) / divisor for channel in (red, green, blue))
    hue = torch.where(value == red, from_blue - from_green, 2 + from_red - from_blue)
    hue = torch.where((value != red) & (value != green), 4 + from_green - from_red, hue)
    saturation = spread / torch.where(value == 0, 1, value)
    return torch.where(is_gray, 0, hue / 6) % 1, saturation, value


def _hsv_to_rgb(hue: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    def channel(offset: int) -> Tensor:
        k = (offset + 6 * hue) % 6
        return value - value * saturation * torch.minimum(k, 4 - k).clamp(0, 1)

    return torch.stack([channel(5), channel(3), channel(1)], 1)
