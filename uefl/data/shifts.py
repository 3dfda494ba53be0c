"""Feature shifts: what makes the images of one domain look unlike those of another.

A shift is written `name:value`, several joined by `+`: `rotate:-50`, `noise:25`, `rotate:120+contrast:0.5`.
Every step takes and gives uint8 pixels, so a chain means the same as its steps one after another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from uefl.errors import InputError, unknown
from uefl.noise import key, normal

_BLOCK = 256  # images shifted at once: float copies of a whole silo of large images would not fit


def rotated(x: Tensor, angle: float, mode: str = "bilinear") -> Tensor:
    """Rotate uint8 images counter-clockwise about their centre: zero fill, rounded back to uint8."""
    if angle % 360 == 0:
        return x
    cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    height, width = x.shape[-2:]
    # The grid maps output to input, and y points down: this matrix turns what is seen counter-clockwise.
    theta = torch.tensor([[cos, -sin * height / width, 0.0], [sin * width / height, cos, 0.0]])
    grid = F.affine_grid(theta.expand(1, 2, 3), [1, 1, height, width], align_corners=False)
    flat = x.reshape(1, -1, height, width).float()
    return _pixels(F.grid_sample(flat, grid, mode=mode, padding_mode="zeros", align_corners=False)).reshape(x.shape)


def noisy(x: Tensor, deviation: float, keys: Sequence[int]) -> Tensor:
    """Add Gaussian noise; an image's noise has its own key, so it does not depend on the images beside it."""
    drawn = torch.stack([normal(k, image.shape) for k, image in zip(keys, x)])
    return _pixels(x.float() + deviation * drawn)


def blurred(x: Tensor, width: float) -> Tensor:
    """Blur with a Gaussian of this deviation in pixels; borders repeat."""
    radius = min(math.ceil(3 * width), min(x.shape[-2:]) - 1)
    kernel = torch.exp(-0.5 * (torch.arange(-radius, radius + 1) / width).square())
    kernel = kernel / kernel.sum()
    flat = x.reshape(-1, 1, *x.shape[-2:]).float()
    flat = F.conv2d(F.pad(flat, (radius, radius, 0, 0), mode="replicate"), kernel.view(1, 1, 1, -1))
    flat = F.conv2d(F.pad(flat, (0, 0, radius, radius), mode="replicate"), kernel.view(1, 1, -1, 1))
    return _pixels(flat).reshape(x.shape)


def contrasted(x: Tensor, factor: float) -> Tensor:
    """Pull pixels towards (below 1) or push them from (above 1) the mean of their image."""
    mean = x.float().mean((1, 2, 3), keepdim=True)
    return _pixels(mean + factor * (x.float() - mean))


def coloured(x: Tensor, red: float, green: float, blue: float) -> Tensor:
    """Multiply each channel by its gain, as a badly balanced camera does."""
    return _pixels(x.float() * torch.tensor([red, green, blue]).view(3, 1, 1))


def hued(x: Tensor, angle: float) -> Tensor:
    """Turn colours about the grey axis: 120 makes red green, green blue and blue red."""
    cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle)) / math.sqrt(3)
    same, behind, ahead = (1 + 2 * cos) / 3, (1 - cos) / 3 + sin, (1 - cos) / 3 - sin
    turn = torch.tensor([[same, ahead, behind], [behind, same, ahead], [ahead, behind, same]])
    return _pixels(torch.einsum("ij,njhw->nihw", turn, x.float()))


Step = Callable[[Tensor, list[float], Sequence[int]], Tensor]
SHIFTS: dict[str, tuple[Step, int, str]] = {  # step, how many values it takes, which
    "rotate": (lambda x, v, _: rotated(x, v[0]), 1, "degrees counter-clockwise"),
    "rotate-nearest": (lambda x, v, _: rotated(x, v[0], "nearest"), 1, "degrees counter-clockwise"),
    "noise": (lambda x, v, keys: noisy(x, v[0], keys), 1, "deviation, of 255"),
    "blur": (lambda x, v, _: blurred(x, v[0]), 1, "deviation in pixels, above 0"),
    "contrast": (lambda x, v, _: contrasted(x, v[0]), 1, "factor"),
    "colour": (lambda x, v, _: coloured(x, *v), 3, "gains red/green/blue"),
    "hue": (lambda x, v, _: hued(x, v[0]), 1, "degrees from red towards green"),
}
_SIGNED = ("rotate", "rotate-nearest", "hue")
_IN_COLOUR = ("colour", "hue")
PLAIN = "none"


def parsed(shift: str) -> list[tuple[str, list[float]]]:
    """The steps of a shift, checked."""
    return [] if shift == PLAIN else [_step(shift, text) for text in shift.split("+")]


def _step(shift: str, text: str) -> tuple[str, list[float]]:
    name, _, value = text.partition(":")
    if name not in SHIFTS:
        raise unknown("shift", shift, [PLAIN, *(f"{n}:<{says}>" for n, (_, _, says) in SHIFTS.items())])
    _, count, says = SHIFTS[name]
    try:
        values = [float(v) for v in value.split("/")]
    except ValueError:
        values = []
    good = len(values) == count and all(math.isfinite(v) and (v >= 0 or name in _SIGNED) for v in values)
    if not good or (name == "blur" and values[0] == 0):
        raise InputError(f"shift '{shift}': '{value}' is not a value of {name}; it takes {says}")
    return name, values


def shifted(x: Tensor, shift: str, seed: int, at: Tensor) -> Tensor:
    """Shift the uint8 images that stand at these positions of their source."""
    steps = parsed(shift)
    bad = [name for name, _ in steps if name in _IN_COLOUR and x.shape[1] != 3]
    if bad:
        raise InputError(f"shift '{shift}': {bad[0]} needs images of 3 channels, these have {x.shape[1]}")
    for number, (name, values) in enumerate(steps if len(x) else []):
        keys = [key(seed, "shift", number, name, position) for position in at.tolist()]
        blocks = [slice(i, i + _BLOCK) for i in range(0, len(x), _BLOCK)]
        x = torch.cat([SHIFTS[name][0](x[block], values, keys[block]) for block in blocks])
    return x


def described(shift: str) -> str:
    """A shift in words short enough for a table."""
    steps = parsed(shift)
    return " + ".join(
        f"{v[0]:g}°" if name.startswith("rotate") else f"{name} {'/'.join(f'{i:g}' for i in v)}" for name, v in steps
    )


def _pixels(x: Tensor) -> Tensor:
    return x.round().clamp(0, 255).to(torch.uint8)
