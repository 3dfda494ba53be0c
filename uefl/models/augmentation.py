"""Augmentation of training images by addressed noise, on any device: random shifts and horizontal flips."""

from __future__ import annotations

import torch
from torch import Tensor

from uefl.core.errors import InputError
from uefl.core.noise import NoiseLayer, uniform


class Augmentation(NoiseLayer):
    """Shift every training image by up to `crop` pixels; with `flip`, mirror it with probability one half.

    Pixels from outside the image are zero, the mean of standardized images. Predictions and Monte Carlo dropout
    passes use images as they are.
    """

    active_in_mc_passes = False

    def __init__(self, crop: int = 0, *, flip: bool = False) -> None:
        super().__init__()
        self.crop, self.flip = crop, flip

    @classmethod
    def parse(cls, specification: str) -> Augmentation:
        """Parse `crop:4`, `flip`, or both as `crop:4+flip`."""
        crop, flip = 0, False
        for part in specification.split("+"):
            kind, _, number = part.partition(":")
            if kind == "crop" and number.isdigit() and int(number) > 0:
                crop = int(number)
            elif part == "flip":
                flip = True
            else:
                raise InputError(f"augment={specification}: unknown part '{part}'; known: crop:<pixels>, flip")
        return cls(crop, flip=flip)

    def forward(self, x: Tensor) -> Tensor:
        """Augment images [B,C,H,W]; other inputs pass unchanged."""
        if not self.training or x.dim() != 4:
            return x
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

    def extra_repr(self) -> str:
        return f"crop={self.crop}, flip={self.flip}"
