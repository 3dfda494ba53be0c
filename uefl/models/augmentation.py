"""Augmentation of training images by addressed noise, on any device: shifts, flips, resized crops, colors and gray."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from uefl.core import noise_addresses as addresses
from uefl.core.errors import InputError
from uefl.core.noise import NoiseLayer, derive_key, uniform
from uefl.models.color import jitter_colors, to_gray

MAX_LOG_RATIO = math.log(4 / 3)  # of width and height of a resized crop, as torchvision's
KNOWN_PARTS = "crop:<pixels>, flip, resized-crop:<least area>, jitter:<strength>, gray:<probability>"


class Augmentation(NoiseLayer):
    """Change every training image at random; predictions and Monte Carlo dropout passes use images as they are.

    `crop` shifts by up to so many pixels; pixels from outside are zero, the mean of standardized images. `flip` mirrors
    with probability one half. `resized_crop` enlarges a part of at least this share of the area. `jitter` changes
    brightness, contrast, saturation and hue by up to this strength, and `gray` removes color with this probability;
    both need color images and the constants that pixels were standardized with.
    """

    active_in_mc_passes = False
    pixel_mean: Tensor  # [C, 1, 1]
    pixel_std: Tensor

    def __init__(
        self,
        crop: int = 0,
        *,
        flip: bool = False,
        resized_crop: float = 0.0,
        jitter: float = 0.0,
        gray: float = 0.0,
        pixel_mean: Sequence[float] = (0.5,),
        pixel_std: Sequence[float] = (0.25,),
    ) -> None:
        super().__init__()
        self.crop, self.flip, self.resized_crop, self.jitter, self.gray = crop, flip, resized_crop, jitter, gray
        # Buffers, so that they are on the device of the images; not persistent, so that they are never sent.
        self.register_buffer("pixel_mean", torch.tensor(pixel_mean)[:, None, None], persistent=False)
        self.register_buffer("pixel_std", torch.tensor(pixel_std)[:, None, None], persistent=False)

    @classmethod
    def parse(
        cls, specification: str, pixel_mean: Sequence[float] = (0.5,), pixel_std: Sequence[float] = (0.25,)
    ) -> Augmentation:
        """Parse parts joined by +, such as `crop:4+flip` or `resized-crop:0.7+flip+jitter:0.3+gray:0.1`."""
        values: dict[str, float] = {}
        for part in specification.split("+"):
            kind, _, number = part.partition(":")
            value = _parse_fraction(number)
            if kind == "crop" and number.isdigit() and int(number) > 0:
                values["crop"] = int(number)
            elif part == "flip":
                values["flip"] = True
            elif (kind in ("resized-crop", "gray") and 0 < value <= 1) or (kind == "jitter" and 0 < value <= 0.5):
                values[kind.replace("-", "_")] = value
            else:
                raise InputError(f"augment={specification}: unknown part '{part}'; known: {KNOWN_PARTS}")
        return cls(**values, pixel_mean=pixel_mean, pixel_std=pixel_std)  # type: ignore[arg-type]

    @property
    def needs_color(self) -> bool:
        """Whether a part changes colors."""
        return bool(self.jitter or self.gray)

    def forward(self, x: Tensor) -> Tensor:
        """Augment images [B,C,H,W]; other inputs pass unchanged."""
        if not self.training or x.dim() != 4:
            return x
        if self.resized_crop:
            x = self._crop_and_resize(x)
        if self.crop or self.flip:
            x = self._shift_and_flip(x)
        return self._change_colors(x) if self.needs_color else x

    def _draw(self, purpose: str, num_draws: int, x: Tensor) -> Tensor:
        """Return uniform draws [num_draws, B], one row per random quantity."""
        key = self.salted_key() ^ derive_key(purpose)
        return uniform(key, (num_draws, len(x)), x.device).to(x.dtype)

    def _crop_and_resize(self, x: Tensor) -> Tensor:
        """Enlarge a random part of every image to the image's size, bilinearly."""
        area, ratio, down, right = self._draw(addresses.RESIZED_CROP, 4, x)
        area = self.resized_crop + (1 - self.resized_crop) * area
        stretch = ((2 * ratio - 1) * MAX_LOG_RATIO / 2).exp()
        height, width = (area.sqrt() / stretch).clamp_max(1), (area.sqrt() * stretch).clamp_max(1)
        # Source coordinates in [-1, 1], at the centers of pixels; `affine_grid` has no rule for stacked clients.
        b, _, h, w = x.shape
        rows = height[:, None] * _pixel_centers(h, x) + ((1 - height) * (2 * down - 1))[:, None]
        columns = width[:, None] * _pixel_centers(w, x) + ((1 - width) * (2 * right - 1))[:, None]
        grid = torch.stack([columns[:, None, :].expand(b, h, w), rows[:, :, None].expand(b, h, w)], -1)
        return F.grid_sample(x, grid, mode="bilinear", padding_mode="border", align_corners=False)

    def _shift_and_flip(self, x: Tensor) -> Tensor:
        b, _, h, w = x.shape
        down, right, mirror = uniform(self.salted_key(), (3, b), x.device)
        rows = torch.arange(h, device=x.device) + self._draw_offsets(down)[:, None]  # [B, H]: source row of each row
        columns = torch.arange(w, device=x.device) + self._draw_offsets(right)[:, None]
        if self.flip:
            columns = torch.where(mirror[:, None] < 0.5, w - 1 - columns, columns)
        inside = ((rows >= 0) & (rows < h))[:, :, None] & ((columns >= 0) & (columns < w))[:, None, :]
        image = torch.arange(b, device=x.device)[:, None, None]
        shifted = x.permute(0, 2, 3, 1)[image, rows.clamp(0, h - 1)[:, :, None], columns.clamp(0, w - 1)[:, None, :]]
        return (shifted * inside[..., None]).permute(0, 3, 1, 2)

    def _draw_offsets(self, draws: Tensor) -> Tensor:
        """Return whole pixels from −crop to crop, uniformly distributed."""
        return (draws * (2 * self.crop + 1)).long().clamp_max(2 * self.crop) - self.crop

    def _change_colors(self, x: Tensor) -> Tensor:
        mean, std = self.pixel_mean, self.pixel_std
        pixels = (x * std + mean).clamp(0, 1)
        if self.jitter:
            *factors, hue = (2 * self._draw(addresses.COLOR_JITTER, 4, x) - 1) * self.jitter
            pixels = jitter_colors(pixels, *(1 + f for f in factors), hue)  # type: ignore[call-arg]
        if self.gray:
            is_gray = self._draw(addresses.GRAY_IMAGES, 1, x)[0] < self.gray
            pixels = torch.where(is_gray[:, None, None, None], to_gray(pixels), pixels)
        return (pixels - mean) / std

    def extra_repr(self) -> str:
        names = ("crop", "flip", "resized_crop", "jitter", "gray")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)


def _pixel_centers(n: int, like: Tensor) -> Tensor:
    """Return the centers of n pixels, in [-1, 1]."""
    return (2 * torch.arange(n, device=like.device, dtype=like.dtype) + 1) / n - 1


def _parse_fraction(text: str) -> float:
    """Return a number, or 0 for text that is none."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if math.isfinite(value) else 0.0
