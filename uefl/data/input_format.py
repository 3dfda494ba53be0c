"""The inputs of a trained model: their shape, and how files and arrays are turned into them.

It travels as JSON in a model file, so that a prediction needs neither the data nor the settings of the training.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from uefl.core.errors import InputError
from uefl.core.example_checks import PIXEL_DEVIATION, PIXEL_MEAN, check_finite, to_tensor
from uefl.data import SOURCES
from uefl.data.images import resize_images, standardize_pixels
from uefl.data.readers.decode import decode_image

if TYPE_CHECKING:
    from uefl.data.config import DataConfig

Resizing = Literal["none", "reading", "decoded"]
OWNER = "predict"  # what error messages begin with


@dataclass(frozen=True)
class InputFormat:
    """Shape and scaling of the inputs of a model: images, the rows of a table, or other arrays."""

    shape: tuple[int, ...]  # of one example
    mean: tuple[float, ...] = ()  # per channel, of pixels in [0, 1]; empty: the inputs are not images
    std: tuple[float, ...] = ()
    resizing: Resizing = "none"  # of image files: none, by Pillow as they are read, or by torch after they are decoded
    is_integer: bool = False  # tokens in place of numbers
    table: str = ""  # columns, levels and scaling of a table, as JSON; empty: no table

    @property
    def is_image(self) -> bool:
        """Whether pixels are accepted."""
        return bool(self.mean)

    def convert(self, x: Any) -> Tensor:
        """Return examples as the model takes them: uint8 pixels are scaled, floats are used as they are."""
        tensor = to_tensor(OWNER, "x", x)
        if tuple(tensor.shape[1:]) != self.shape or tensor.dim() == 0:
            expected = f"[n, {', '.join(map(str, self.shape))}]"
            hint = "; for one example, use x[None]" if tuple(tensor.shape) == self.shape else ""
            raise InputError(f"{OWNER}: x has shape {list(tensor.shape)}; this model takes {expected}{hint}")
        if tensor.dtype == torch.uint8 and self.is_image:
            return standardize_pixels(tensor, self.mean, self.std)
        if self.is_integer != (not tensor.is_floating_point()) or tensor.is_complex():
            kinds = "integers" if self.is_integer else "uint8 pixels or floats" if self.is_image else "floats"
            name = str(tensor.dtype).removeprefix("torch.")
            raise InputError(f"{OWNER}: x has type {name}; this model takes {kinds}")
        return check_finite(OWNER, tensor)

    def decode_file(self, data: bytes) -> Tensor:
        """Return the pixels of an image file in the model's shape; the caller adds the name of the file to an error."""
        size = self.shape[-1]
        pixels = torch.from_numpy(decode_image(data, size if self.resizing == "reading" else None)[0])
        if self.resizing == "decoded":
            pixels = resize_images(pixels[None], size)[0]
        if pixels.shape[0] != self.shape[0]:
            raise InputError(f"{pixels.shape[0]} channels, but the model takes {self.shape[0]}")
        if tuple(pixels.shape) != self.shape:
            (_, height, width), (_, *expected) = pixels.shape, self.shape
            raise InputError(
                f"{width}×{height} pixels, but the model takes {expected[1]}×{expected[0]}; it was trained without "
                "image_size, which would resize all images"
            )
        return pixels

    def to_dict(self) -> dict[str, Any]:
        """Return the format as values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> InputFormat:
        """Return the format that `to_dict` wrote."""
        fields: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in values.items()}
        return cls(**fields)


def describe_source(config: DataConfig, shape: tuple[int, ...], table: str = "") -> InputFormat:
    """Return the format of a data set; mean and deviation of images are fixed and the same at every silo."""
    if table or len(shape) != 3:
        return InputFormat(shape, table=table)
    source = SOURCES[config.name]
    resizing: Resizing = "none"
    if config.image_size:
        resizing = "reading" if source.resize_when_reading else "decoded"
    mean, std = (values if len(values) == shape[0] else values[:1] * shape[0] for values in (source.mean, source.std))
    return InputFormat(shape, mean, std, resizing)


def describe_tensors(x: Tensor) -> InputFormat:
    """Return the format of examples that a user gave as tensors; images may be given as uint8 pixels."""
    shape, is_integer = tuple(x.shape[1:]), not x.is_floating_point()
    if len(shape) != 3 or is_integer:
        return InputFormat(shape, is_integer=is_integer)
    return InputFormat(shape, (PIXEL_MEAN,) * shape[0], (PIXEL_DEVIATION,) * shape[0])
