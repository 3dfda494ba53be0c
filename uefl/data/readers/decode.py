"""Decode one image file into uint8 pixels, or raise an error with the reason.

Conversions: black-and-white becomes gray; a palette becomes color; transparency is composited on black; CMYK and YCbCr
become RGB by Pillow's default formula, without color profile; EXIF orientation is applied. Rejected: more than 8 bits
per channel (the window must be chosen by the owner of the images), animations and multi-page files.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from uefl.core.errors import InputError

Pixels = NDArray[np.uint8]  # [c, h, w]
MAX_PIXELS = 1 << 26
GRAY_MODES = ("1", "L", "LA", "La")
ALPHA_MODES = ("LA", "La", "RGBA", "RGBa", "PA")
CONVERSION_NOTES = {
    "CMYK": "CMYK images converted to RGB without color profile",
    "YCbCr": "YCbCr images converted to RGB",
    "alpha": "images with transparency composited on black",
}

Image.init()
# Without EPS: Pillow runs Ghostscript for it, and a data set must not start programs. Common formats are tried first.
COMMON_FORMATS = ("PNG", "JPEG", "WEBP", "PPM", "BMP", "GIF", "TIFF")
FORMATS = (*COMMON_FORMATS, *(f for f in Image.ID if f not in (*COMMON_FORMATS, "EPS")))
SUFFIXES = {suffix for suffix, name in Image.registered_extensions().items() if name in FORMATS and name in Image.OPEN}


def decode_image(data: bytes, image_size: int | None = None) -> tuple[Pixels, str]:
    """Return pixels and a key of CONVERSION_NOTES or ""; the caller adds the name of the file to an error.

    Files of different sizes are resized here, by Pillow, because only images of one size can be stacked.
    """
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            _check_supported(image)
            image.load()
            converted, conversion = _convert_mode(_apply_orientation(image))
            if image_size and converted.size != (image_size, image_size):
                converted = converted.resize((image_size, image_size), Image.Resampling.BILINEAR)
            pixels = np.array(converted, dtype=np.uint8)
    except InputError:
        raise
    except Exception as e:  # Pillow can raise any exception for a damaged image
        raise InputError(_describe_error(e)) from e
    return (pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)), conversion


def _check_supported(image: Image.Image) -> None:
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise InputError(f"{width}×{height} pixels, more than {MAX_PIXELS}")
    if getattr(image, "n_frames", 1) > 1 and image.format != "MPO":  # MPO: a photo with embedded previews
        raise InputError("animated and multi-page images are not supported; store one image per file")
    if _has_high_bit_depth(image):
        raise InputError("more than 8 bits per channel; convert to 8 bits first")


def _has_high_bit_depth(image: Image.Image) -> bool:
    """Return whether channels have more than 8 bits; Pillow converts some silently, visible in decoder arguments."""
    if image.mode[0] in "IF":
        return True
    for tile in getattr(image, "tile", ()):
        arguments: Any = tile[3] if isinstance(tile[3], tuple) else (tile[3],)
        if any(isinstance(a, str) and ";16" in a for a in arguments):
            return True
        if tile[0].startswith("ppm") and isinstance(arguments[-1], int) and arguments[-1] > 255:
            return True
    return False


def _apply_orientation(image: Image.Image) -> Image.Image:
    if "exif" in image.info:
        return ImageOps.exif_transpose(image)
    return image


def _convert_mode(image: Image.Image) -> tuple[Image.Image, str]:
    """Return the image in mode L or RGB, and the key of CONVERSION_NOTES or ""."""
    if image.mode in ALPHA_MODES or "transparency" in image.info:
        return _composite_on_black(image, "L" if image.mode in GRAY_MODES else "RGB"), "alpha"
    if image.mode in GRAY_MODES:
        return image.convert("L"), ""
    if image.mode in ("RGB", "P", "RGBX"):
        return image.convert("RGB"), ""
    if image.mode in ("CMYK", "YCbCr"):
        return image.convert("RGB"), image.mode
    raise InputError(f"color mode {image.mode} is not supported; convert to RGB or gray first")


def _composite_on_black(image: Image.Image, mode: str) -> Image.Image:
    black = Image.new("RGBA", image.size, (0, 0, 0, 255))
    return Image.alpha_composite(black, image.convert("RGBA")).convert(mode)


def _describe_error(e: Exception) -> str:
    if isinstance(e, UnidentifiedImageError):
        return "not an image format that Pillow supports"
    reason = " ".join(str(e).split()) or type(e).__name__
    return f"cannot be decoded ({reason})"
