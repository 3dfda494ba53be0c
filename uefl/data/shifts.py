"""Feature shifts: transformations that make the images of one domain differ from those of another.

A shift is written `name:value`, and steps are joined by `+`: `rotate:-50`, `noise:25`, `rotate:120+contrast:0.5`.
Every step maps uint8 pixels to uint8 pixels, so a chain equals its steps applied one after another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from uefl.core import noise_addresses as addresses
from uefl.core.errors import InputError, unknown_value_error
from uefl.core.noise import derive_key, normal

_IMAGES_PER_BLOCK = 256  # images shifted at once, which bounds the memory of their float copies


def rotate_images(x: Tensor, degrees: float, mode: str = "bilinear") -> Tensor:
    """Rotate uint8 images counter-clockwise about their center; fill with zeros and round back to uint8."""
    if degrees % 360 == 0:
        return x
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    height, width = x.shape[-2:]
    # The grid maps output to input, and y points down: this matrix rotates the image counter-clockwise.
    theta = torch.tensor([[cos, -sin * height / width, 0.0], [sin * width / height, cos, 0.0]])
    grid = F.affine_grid(theta.expand(1, 2, 3), [1, 1, height, width], align_corners=False)
    flat = x.reshape(1, -1, height, width).float()
    return _to_uint8(F.grid_sample(flat, grid, mode=mode, padding_mode="zeros", align_corners=False)).reshape(x.shape)


def add_noise(x: Tensor, std: float, keys: Iterable[int]) -> Tensor:
    """Add Gaussian noise with one key per image, so that it does not depend on the other images."""
    noise = torch.stack([normal(key, image.shape) for key, image in zip(keys, x)])
    return _to_uint8(x.float() + std * noise)


def blur_images(x: Tensor, std: float) -> Tensor:
    """Blur with a Gaussian kernel, `std` in pixels; borders are replicated."""
    radius = min(math.ceil(3 * std), min(x.shape[-2:]) - 1)
    kernel = torch.exp(-0.5 * (torch.arange(-radius, radius + 1) / std).square())
    kernel = kernel / kernel.sum()
    flat = x.reshape(-1, 1, *x.shape[-2:]).float()
    flat = F.conv2d(F.pad(flat, (radius, radius, 0, 0), mode="replicate"), kernel.view(1, 1, 1, -1))
    flat = F.conv2d(F.pad(flat, (0, 0, radius, radius), mode="replicate"), kernel.view(1, 1, -1, 1))
    return _to_uint8(flat).reshape(x.shape)


def scale_contrast(x: Tensor, factor: float) -> Tensor:
    """Scale the difference of pixels to the mean of their image."""
    mean = x.float().mean((1, 2, 3), keepdim=True)
    return _to_uint8(mean + factor * (x.float() - mean))


def scale_channels(x: Tensor, red: float, green: float, blue: float) -> Tensor:
    """Multiply each channel by its gain, like a wrong white balance."""
    return _to_uint8(x.float() * torch.tensor([red, green, blue]).view(3, 1, 1))


def rotate_hue(x: Tensor, degrees: float) -> Tensor:
    """Rotate colors about the gray axis: 120 turns red to green, green to blue and blue to red."""
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees)) / math.sqrt(3)
    same, behind, ahead = (1 + 2 * cos) / 3, (1 - cos) / 3 + sin, (1 - cos) / 3 - sin
    rotation = torch.tensor([[same, ahead, behind], [behind, same, ahead], [ahead, behind, same]])
    return _to_uint8(torch.einsum("ij,njhw->nihw", rotation, x.float()))


ShiftFunction = Callable[[Tensor, list[float], Iterable[int]], Tensor]


class Shift(NamedTuple):
    """A kind of shift: its function and the values that it takes."""

    apply: ShiftFunction
    meaning: str
    limit: float  # largest value; beyond it, a value is a typing error
    num_values: int = 1
    is_signed: bool = False


SHIFTS = {
    "rotate": Shift(lambda x, v, _: rotate_images(x, v[0]), "degrees counter-clockwise", 360, is_signed=True),
    "rotate-nearest": Shift(
        lambda x, v, _: rotate_images(x, v[0], "nearest"), "degrees counter-clockwise", 360, is_signed=True
    ),
    "noise": Shift(lambda x, v, keys: add_noise(x, v[0], keys), "standard deviation, pixels are 0 to 255", 255),
    "blur": Shift(lambda x, v, _: blur_images(x, v[0]), "standard deviation in pixels, greater than 0", 1000),
    "contrast": Shift(lambda x, v, _: scale_contrast(x, v[0]), "factor", 255),
    "color": Shift(lambda x, v, _: scale_channels(x, *v), "gains red/green/blue", 255, num_values=3),
    "hue": Shift(lambda x, v, _: rotate_hue(x, v[0]), "degrees from red toward green", 360, is_signed=True),
}
_COLOR_SHIFTS = ("color", "hue")
NO_SHIFT = "none"


def parse_shift(shift: str) -> list[tuple[str, list[float]]]:
    """Return the steps of a shift as names and values, or raise an error."""
    return [] if shift == NO_SHIFT else [_parse_step(shift, text) for text in shift.split("+")]


def _parse_step(shift: str, text: str) -> tuple[str, list[float]]:
    name, _, value = text.partition(":")
    if name not in SHIFTS:
        known = [NO_SHIFT, *(f"{name}:<{kind.meaning}>" for name, kind in SHIFTS.items())]
        raise unknown_value_error("shift", shift, known)
    kind = SHIFTS[name]
    least = -kind.limit if kind.is_signed else 0
    try:
        values = [float(v) for v in value.split("/")]
    except ValueError:
        values = []
    is_valid = len(values) == kind.num_values and all(least <= v <= kind.limit for v in values)
    if not is_valid or (name == "blur" and values[0] == 0):
        takes = f"{kind.meaning}, from {least:g} to {kind.limit:g}"
        raise InputError(f"shift '{shift}': invalid value '{value}' of {name}; it takes: {takes}")
    return name, values


def apply_shift(x: Tensor, shift: str, seed: int, indices: Tensor) -> Tensor:
    """Apply a shift to the uint8 images with these indices in their source."""
    steps = parse_shift(shift)
    color_steps = [name for name, _ in steps if name in _COLOR_SHIFTS]
    if color_steps and x.shape[1] != 3:
        raise InputError(f"shift '{shift}': {color_steps[0]} needs images with 3 channels, but these have {x.shape[1]}")
    for number, (name, values) in enumerate(steps if len(x) else []):
        address = addresses.SHIFTS.get(name, name)
        prefix = (seed, addresses.IMAGE_SHIFT, number, address)
        blocks = zip(torch.split(x, _IMAGES_PER_BLOCK), torch.split(indices, _IMAGES_PER_BLOCK))
        x = torch.cat(
            [SHIFTS[name].apply(images, values, _derive_keys(prefix, own_indices)) for images, own_indices in blocks]
        )
    return x


def _derive_keys(prefix: tuple[int | str, ...], indices: Tensor) -> Iterator[int]:
    """Yield the noise key of each image; most shifts have no noise and need none."""
    return (derive_key(*prefix, index) for index in indices.tolist())


def describe_shift(shift: str) -> str:
    """Return a short description of a shift for tables."""
    steps = parse_shift(shift)
    return " + ".join(
        f"{v[0]:g}°" if name.startswith("rotate") else f"{name} {'/'.join(f'{i:g}' for i in v)}" for name, v in steps
    )


def _to_uint8(x: Tensor) -> Tensor:
    return x.round().clamp(0, 255).to(torch.uint8)
