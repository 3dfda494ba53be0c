"""Augmentation of training images by addressed noise, on whatever device they are: shifts and mirror images."""

from __future__ import annotations

import torch
from torch import Tensor

from uefl.errors import InputError
from uefl.noise import Noise, uniform


class Augment(Noise):
    """Every training image is moved by up to `crop` pixels, and mirrored with a chance of one half if `flip`.

    What was outside the image is zero, which is the mean of standardised images. A prediction never sees any of it,
    and dropout passes do not either.
    """

    sampled = False

    def __init__(self, crop: int = 0, *, flip: bool = False) -> None:
        super().__init__()
        self.crop, self.flip = crop, flip

    @classmethod
    def spoken(cls, text: str) -> Augment:
        """`crop:4`, `flip`, or both as `crop:4+flip`."""
        crop, flip = 0, False
        for part in text.split("+"):
            kind, _, number = part.partition(":")
            if kind == "crop" and number.isdigit() and int(number) > 0:
                crop = int(number)
            elif part == "flip":
                flip = True
            else:
                raise InputError(f"augment={text}: '{part}' is none of crop:<pixels>, flip")
        return cls(crop, flip=flip)

    def forward(self, x: Tensor) -> Tensor:
        """Images [B,C,H,W]; anything else passes as it is."""
        if not self.training or x.dim() != 4:
            return x
        b, _, h, w = x.shape
        down, right, mirror = uniform(self.salted(), (3, b), x.device)
        rows = (
            torch.arange(h, device=x.device) + self._moved(down)[:, None]
        )  # [B, H]: which row of the image comes here
        columns = torch.arange(w, device=x.device) + self._moved(right)[:, None]
        if self.flip:
            columns = torch.where(mirror[:, None] < 0.5, w - 1 - columns, columns)
        inside = ((rows >= 0) & (rows < h))[:, :, None] & ((columns >= 0) & (columns < w))[:, None, :]
        image = torch.arange(b, device=x.device)[:, None, None]
        moved = x.permute(0, 2, 3, 1)[image, rows.clamp(0, h - 1)[:, :, None], columns.clamp(0, w - 1)[:, None, :]]
        return (moved * inside[..., None]).permute(0, 3, 1, 2)

    def _moved(self, draws: Tensor) -> Tensor:
        """Whole pixels from −crop to crop, all equally likely."""
        return (draws * (2 * self.crop + 1)).long().clamp_max(2 * self.crop) - self.crop

    def extra_repr(self) -> str:
        return f"crop={self.crop}, flip={self.flip}"
