import io

import numpy as np
import pytest
from file_factories import encode_image, make_16bit_png, make_pixels, make_png, write_folder
from PIL import Image

from uefl.core.errors import InputError
from uefl.data.readers.decode import decode_image
from uefl.data.sources import read_images

COLOR = make_pixels(1)


@pytest.mark.parametrize("format", ["PNG", "BMP", "TIFF", "PPM", "TGA", "WEBP", "JPEG2000", "GIF"])
def test_lossless_formats_are_decoded_without_loss(format):
    options = {"lossless": True} if format == "WEBP" else {}
    image = COLOR if format != "GIF" else np.kron(COLOR[:2, :2], np.ones((4, 4, 1), np.uint8))
    pixels, conversion = decode_image(encode_image(image, format, **options))
    assert np.array_equal(pixels, image.transpose(2, 0, 1))
    assert conversion == ""


def test_gray_bilevel_and_palette_images():
    gray = make_pixels(2, (8, 8))
    assert np.array_equal(decode_image(encode_image(gray))[0], gray[None])
    assert set(decode_image(encode_image(Image.fromarray(gray).convert("1")))[0].ravel()) == {0, 255}
    assert decode_image(encode_image(Image.fromarray(COLOR).quantize(4)))[0].shape == (3, 8, 8)


def test_transparency_is_composited_on_black():
    transparent = np.concatenate([COLOR, np.full((8, 8, 1), 255, np.uint8)], 2)
    transparent[:4, :, 3] = 0
    pixels, conversion = decode_image(encode_image(transparent))
    assert conversion == "alpha"
    assert not pixels[:, :4].any()
    assert np.array_equal(pixels[:, 4:], COLOR.transpose(2, 0, 1)[:, 4:])
    gray = Image.fromarray(make_pixels(3, (8, 8)))
    assert decode_image(encode_image(gray, transparency=0))[0].shape == (1, 8, 8)
    assert decode_image(encode_image(gray.convert("LA")))[0].shape == (1, 8, 8)


def test_cmyk_is_converted_to_rgb_and_counted(tmp_path):
    red = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    pixels, conversion = decode_image(encode_image(red, "TIFF"))
    assert conversion == "CMYK"
    assert pixels[:, 0, 0].tolist() == [255, 0, 0]
    files = {"a/x/1.png": make_png(1), "a/y/2.tiff": encode_image(red, "TIFF"), "a/y/3.jpg": encode_image(red, "JPEG")}
    images = read_images("folder", str(write_folder(tmp_path, files)))
    assert images.notes == ("2 CMYK images converted to RGB without color profile",)


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_exif_orientation_is_applied(format):
    exif = Image.Exif()
    exif[274] = 6  # upright after a rotation by 90° clockwise
    pixels, _ = decode_image(encode_image(COLOR, format, exif=exif))
    assert np.array_equal(pixels, np.rot90(COLOR, -1).transpose(2, 0, 1))


def encode_frames(format):
    frames = [Image.fromarray(make_pixels(i)) for i in range(3)]
    return encode_image(frames[0], format, save_all=True, append_images=frames[1:])


HIGH_BIT_DEPTH = {
    "gray png": make_16bit_png(1),
    "color png": make_16bit_png(3),
    "gray tiff": encode_image(make_pixels(1, (8, 8)).astype(np.uint16), "TIFF"),
    "float tiff": encode_image(make_pixels(1, (8, 8)).astype(np.float32), "TIFF"),
    "gray pgm": b"P5 2 2 65535\n" + bytes(8),
    "color ppm": b"P6 2 2 65535\n" + bytes(24),
}


@pytest.mark.parametrize("name", HIGH_BIT_DEPTH)
def test_more_than_eight_bits_are_rejected(name):
    with pytest.raises(InputError, match="more than 8 bits per channel"):
        decode_image(HIGH_BIT_DEPTH[name])


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "TIFF"])
def test_animated_and_multi_page_images_are_rejected(format):
    with pytest.raises(InputError, match="animated and multi-page images are not supported"):
        decode_image(encode_frames(format))


def test_photo_with_embedded_previews_is_one_image():
    assert decode_image(encode_frames("MPO"))[0].shape == (3, 8, 8)


def test_eps_is_rejected_because_pillow_would_start_a_program():
    out = io.BytesIO()
    Image.fromarray(COLOR).save(out, "EPS")
    with pytest.raises(InputError, match="not an image format that Pillow supports"):
        decode_image(out.getvalue())


def test_too_many_pixels_are_rejected_before_decoding():
    bomb = encode_image(Image.new("1", (9000, 9000)))
    assert len(bomb) < 20_000
    with pytest.raises(InputError, match="9000×9000 pixels, more than"):
        decode_image(bomb)


def test_lab_is_rejected():
    with pytest.raises(InputError, match="color mode LAB is not supported"):
        decode_image(encode_image(Image.new("LAB", (4, 4)), "TIFF"))
