"""Properties of feature shifts."""

import numpy as np
import pytest
import torch
from PIL import Image

from uefl.core.errors import InputError
from uefl.core.noise import derive_key, random_bits
from uefl.data.shifts import SHIFTS, apply_shift, describe_shift, parse_shift, rotate_images

EXAMPLES = ["rotate:30", "rotate-nearest:30", "noise:25", "blur:1.5", "contrast:0.5", "color:1.2/1/0.5", "hue:90"]


def make_images(count: int = 4, channels: int = 3, height: int = 9, width: int = 9) -> torch.Tensor:
    bits = random_bits(derive_key("pixels"), count * channels * height * width) & 0xFF
    return bits.to(torch.uint8).reshape(count, channels, height, width)


def apply(x: torch.Tensor, shift: str, seed: int = 0) -> torch.Tensor:
    return apply_shift(x, shift, seed, torch.arange(len(x)))


@pytest.mark.parametrize("size", [8, 9])
@pytest.mark.parametrize("turns", [1, 2, 3, -1])
def test_positive_angles_rotate_counter_clockwise(size: int, turns: int) -> None:
    flag = torch.zeros(1, 1, size, size, dtype=torch.uint8)
    flag[..., 1, 2:6] = 200  # a bar at the top, longer to the left, with a tail on one end
    flag[..., 1:5, 2] = 90
    assert rotate_images(flag, 90.0 * turns).equal(torch.rot90(flag, turns, (-2, -1)))


def test_full_rotation_changes_nothing() -> None:
    assert rotate_images(make_images(), 0).equal(make_images())
    assert rotate_images(make_images(), 360).equal(make_images())


def test_rotation_agrees_with_pillow() -> None:
    x = make_images(1, 1, 28, 28)
    for mode, name in ((Image.Resampling.BILINEAR, "rotate:50"), (Image.Resampling.NEAREST, "rotate-nearest:50")):
        expected = np.asarray(Image.fromarray(x[0, 0].numpy()).rotate(50, mode), dtype=float)
        gap = np.abs(expected - apply(x, name)[0, 0].numpy())[
            4:-4, 4:-4
        ]  # borders are blended with the fill differently
        assert np.median(gap) <= 1
        assert (gap <= 2).mean() > 0.95  # a coordinate on the edge of two pixels may be rounded to either


def test_corners_from_outside_the_image_are_black() -> None:
    white = torch.full((1, 1, 20, 20), 255, dtype=torch.uint8)
    rotated = rotate_images(white, 45)
    assert rotated[0, 0, 0, 0] == 0
    assert rotated[0, 0, 10, 10] == 255


def test_noise_has_the_given_deviation_and_depends_on_seed_and_index() -> None:
    gray = torch.full((8, 1, 64, 64), 128, dtype=torch.uint8)
    noisy = apply(gray, "noise:25")
    assert noisy.float().std().item() == pytest.approx(25, rel=0.03)  # 32768 pixels: seven standard errors
    assert noisy.equal(apply(gray, "noise:25"))
    assert not noisy.equal(apply(gray, "noise:25", seed=1))
    single = apply_shift(gray[5:6], "noise:25", 0, torch.tensor([5]))
    assert single.equal(noisy[5:6])  # the other images do not change the noise of an image
    assert not noisy[0].equal(noisy[1])


def test_blur_spreads_a_point_evenly_and_keeps_constant_images() -> None:
    point = torch.zeros(1, 1, 15, 15, dtype=torch.uint8)
    point[..., 7, 7] = 255
    spread = apply(point, "blur:1")
    assert spread[0, 0].equal(spread[0, 0].T)
    assert spread[0, 0, 7, 7] == round(255 * 0.3989**2)
    constant = torch.full((1, 3, 9, 9), 77, dtype=torch.uint8)
    assert apply(constant, "blur:2").equal(constant)


def test_contrast_scales_about_the_mean() -> None:
    x = make_images()
    assert apply(x, "contrast:1").equal(x)
    halved = apply(x, "contrast:0.5").float()
    # Pixels are rounded to whole numbers.
    torch.testing.assert_close(halved.mean((1, 2, 3)), x.float().mean((1, 2, 3)), atol=0.2, rtol=0)
    torch.testing.assert_close(halved.std((1, 2, 3)), x.float().std((1, 2, 3)) / 2, atol=0.2, rtol=0)


def test_hue_rotates_red_to_green_to_blue() -> None:
    red = torch.tensor([200, 0, 0], dtype=torch.uint8).view(1, 3, 1, 1)
    assert apply(red, "hue:120").flatten().tolist() == [0, 200, 0]
    assert apply(red, "hue:240").flatten().tolist() == [0, 0, 200]
    assert apply(red, "hue:-120").flatten().tolist() == [0, 0, 200]
    gray = torch.full((1, 3, 2, 2), 90, dtype=torch.uint8)
    assert apply(gray, "hue:77").equal(gray)


def test_color_multiplies_channels() -> None:
    x = torch.tensor([200, 100, 100], dtype=torch.uint8).view(1, 3, 1, 1)
    assert apply(x, "color:2/1/0.5").flatten().tolist() == [255, 100, 50]


def test_chain_equals_its_steps_in_order() -> None:
    x = make_images()
    assert apply(x, "rotate:120+contrast:0.5").equal(apply(apply(x, "rotate:120"), "contrast:0.5"))


@pytest.mark.parametrize("shift", EXAMPLES)
def test_every_shift_returns_uint8_and_does_not_modify_its_input(shift: str) -> None:
    x = make_images(300)
    before = x.clone()
    y = apply(x, shift)
    assert y.dtype == torch.uint8
    assert y.shape == x.shape
    assert x.equal(before)
    assert not y.equal(x)
    assert apply(x[:0], shift).shape == (0, *x.shape[1:])


def test_every_shift_has_an_example() -> None:
    assert {name for shift in EXAMPLES for name, _ in parse_shift(shift)} == set(SHIFTS)


@pytest.mark.parametrize(
    ("shift", "message"),
    [
        ("turn:5", "rotate:<degrees counter-clockwise>"),
        ("", "none"),
        ("rotate", "degrees"),
        ("rotate:abc", "'abc'"),
        ("rotate:nan", "'nan'"),
        ("noise:-1", "'-1'"),
        ("blur:0", "greater than 0"),
        ("color:1", "red/green/blue"),
        ("rotate:5+", "known"),
    ],
)
def test_invalid_shift_is_rejected_in_one_line(shift: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        parse_shift(shift)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_color_shifts_reject_gray_images() -> None:
    with pytest.raises(InputError, match="3 channels"):
        apply(make_images(channels=1), "hue:90")


def test_shift_descriptions() -> None:
    assert describe_shift("rotate:-50") == "-50°"
    assert describe_shift("rotate:120+contrast:0.5") == "120° + contrast 0.5"
    assert describe_shift("none") == ""
