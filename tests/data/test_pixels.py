import io

import numpy as np
import pytest
from making import as_folder, deep_png, encoded, pixels, png
from PIL import Image

from uefl.data.pixels import decoded
from uefl.data.sources import read
from uefl.errors import InputError

COLOUR = pixels(1)


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM", "TGA", "WEBP", "JPEG2000", "GIF"])
def test_what_pillow_keeps_without_loss_arrives_without_loss(kind):
    options = {"lossless": True} if kind == "WEBP" else {}
    image = COLOUR if kind != "GIF" else np.kron(COLOUR[:2, :2], np.ones((4, 4, 1), np.uint8))
    arrived, note = decoded(encoded(image, kind, **options))
    assert np.array_equal(arrived, image.transpose(2, 0, 1))
    assert note == ""


def test_grey_black_and_white_and_palettes():
    grey = pixels(2, (8, 8))
    assert np.array_equal(decoded(encoded(grey))[0], grey[None])
    assert set(decoded(encoded(Image.fromarray(grey).convert("1")))[0].ravel()) == {0, 255}
    assert decoded(encoded(Image.fromarray(COLOUR).quantize(4)))[0].shape == (3, 8, 8)


def test_transparency_is_laid_on_black():
    clear = np.concatenate([COLOUR, np.full((8, 8, 1), 255, np.uint8)], 2)
    clear[:4, :, 3] = 0
    arrived, note = decoded(encoded(clear))
    assert note == "alpha"
    assert not arrived[:, :4].any()
    assert np.array_equal(arrived[:, 4:], COLOUR.transpose(2, 0, 1)[:, 4:])
    grey = Image.fromarray(pixels(3, (8, 8)))
    assert decoded(encoded(grey, transparency=0))[0].shape == (1, 8, 8)
    assert decoded(encoded(grey.convert("LA")))[0].shape == (1, 8, 8)


def test_cmyk_becomes_rgb_and_is_counted(tmp_path):
    red = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    arrived, note = decoded(encoded(red, "TIFF"))
    assert note == "CMYK"
    assert arrived[:, 0, 0].tolist() == [255, 0, 0]
    files = {"a/x/1.png": png(1), "a/y/2.tiff": encoded(red, "TIFF"), "a/y/3.jpg": encoded(red, "JPEG")}
    images = read("folder", str(as_folder(tmp_path, files)))
    assert images.notes == ("2 CMYK images turned into RGB without colour profile",)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_photos_stand_upright(kind):
    exif = Image.Exif()
    exif[274] = 6  # turn by 90° clockwise to see it upright
    arrived, _ = decoded(encoded(COLOUR, kind, exif=exif))
    assert np.array_equal(arrived, np.rot90(COLOUR, -1).transpose(2, 0, 1))


def several(kind):
    frames = [Image.fromarray(pixels(i)) for i in range(3)]
    return encoded(frames[0], kind, save_all=True, append_images=frames[1:])


DEEP = {
    "grey png": deep_png(1),
    "colour png": deep_png(3),
    "grey tiff": encoded(pixels(1, (8, 8)).astype(np.uint16), "TIFF"),
    "float tiff": encoded(pixels(1, (8, 8)).astype(np.float32), "TIFF"),
    "grey pgm": b"P5 2 2 65535\n" + bytes(8),
    "colour ppm": b"P6 2 2 65535\n" + bytes(24),
}


@pytest.mark.parametrize("name", DEEP)
def test_more_than_eight_bits_are_refused(name):
    with pytest.raises(InputError, match="more than 8 bits a channel"):
        decoded(DEEP[name])


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_animations_and_pages_are_refused(kind):
    with pytest.raises(InputError, match="animated or of several pages"):
        decoded(several(kind))


def test_a_photo_with_previews_behind_it_is_one_image():
    assert decoded(several("MPO"))[0].shape == (3, 8, 8)


def test_programs_are_not_started_for_an_image():
    out = io.BytesIO()
    Image.fromarray(COLOUR).save(out, "EPS")
    with pytest.raises(InputError, match="not an image that Pillow reads"):
        decoded(out.getvalue())


def test_too_many_pixels_are_refused_before_they_are_decoded():
    bomb = encoded(Image.new("1", (9000, 9000)))
    assert len(bomb) < 20_000
    with pytest.raises(InputError, match="9000×9000 pixels are too many"):
        decoded(bomb)


def test_lab_is_refused():
    with pytest.raises(InputError, match="colour mode LAB is not read"):
        decoded(encoded(Image.new("LAB", (4, 4)), "TIFF"))
