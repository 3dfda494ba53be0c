"""One encoded image becomes uint8 pixels, or one line that says why not.

Stated conversions: black-and-white becomes grey; a palette becomes colour; transparency is laid on black; CMYK and
YCbCr become RGB by Pillow's plain formula, without colour profile; EXIF orientation is applied. Refused: more than
8 bits a channel (whoever made them must choose the window), animations and files of several pages.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from uefl.errors import InputError

Pixels = NDArray[np.uint8]  # [c, h, w]
MOST_PIXELS = 1 << 26
GREY = ("1", "L", "LA", "La")
ALPHA = ("LA", "La", "RGBA", "RGBa", "PA")
CONVERTED = {
    "CMYK": "CMYK images turned into RGB without colour profile",
    "YCbCr": "YCbCr images turned into RGB",
    "alpha": "images with transparency laid on black",
}

Image.init()
# Pillow hands EPS to Ghostscript, and a data set must not start programs. The usual formats go first.
USUAL = ("PNG", "JPEG", "WEBP", "PPM", "BMP", "GIF", "TIFF")
FORMATS = (*USUAL, *(f for f in Image.ID if f not in (*USUAL, "EPS")))
SUFFIXES = {suffix for suffix, kind in Image.registered_extensions().items() if kind in FORMATS and kind in Image.OPEN}


def decoded(data: bytes, size: int | None = None) -> tuple[Pixels, str]:
    """The pixels, and a key of CONVERTED or ""; the caller knows the file's name and adds it to the error."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            _refuse(image)
            image.load()
            plain, note = _plain(_upright(image))
            if size and plain.size != (size, size):
                plain = plain.resize((size, size), Image.Resampling.BILINEAR)
            pixels = np.array(plain, dtype=np.uint8)
    except InputError:
        raise
    except Exception as e:  # a damaged image raises whatever its bytes lead Pillow to
        raise InputError(_reason(e)) from e
    return (pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)), note


def _refuse(image: Image.Image) -> None:
    width, height = image.size
    if width * height > MOST_PIXELS:
        raise InputError(f"{width}×{height} pixels are too many")
    if getattr(image, "n_frames", 1) > 1 and image.format != "MPO":  # MPO: a camera's photo with previews behind it
        raise InputError("animated or of several pages; one image a file")
    if _deep(image):
        raise InputError("more than 8 bits a channel; convert to 8 bits first")


def _deep(image: Image.Image) -> bool:
    """Pillow narrows some 16-bit images silently; the decoder's arguments tell."""
    if image.mode[0] in "IF":
        return True
    for tile in getattr(image, "tile", ()):
        arguments: Any = tile[3] if isinstance(tile[3], tuple) else (tile[3],)
        if any(isinstance(a, str) and ";16" in a for a in arguments):
            return True
        if tile[0].startswith("ppm") and isinstance(arguments[-1], int) and arguments[-1] > 255:
            return True
    return False


def _upright(image: Image.Image) -> Image.Image:
    if "exif" in image.info:
        return ImageOps.exif_transpose(image)
    return image


def _plain(image: Image.Image) -> tuple[Image.Image, str]:
    """The image in mode L or RGB, and the key of CONVERTED that says how."""
    if image.mode in ALPHA or "transparency" in image.info:
        return _on_black(image, "L" if image.mode in GREY else "RGB"), "alpha"
    if image.mode in GREY:
        return image.convert("L"), ""
    if image.mode in ("RGB", "P", "RGBX"):
        return image.convert("RGB"), ""
    if image.mode in ("CMYK", "YCbCr"):
        return image.convert("RGB"), image.mode
    raise InputError(f"colour mode {image.mode} is not read; convert to RGB or grey first")


def _on_black(image: Image.Image, mode: str) -> Image.Image:
    black = Image.new("RGBA", image.size, (0, 0, 0, 255))
    return Image.alpha_composite(black, image.convert("RGBA")).convert(mode)


def _reason(e: Exception) -> str:
    if isinstance(e, UnidentifiedImageError):
        return "not an image that Pillow reads"
    line = " ".join(str(e).split()) or type(e).__name__
    return f"does not decode ({line})"
