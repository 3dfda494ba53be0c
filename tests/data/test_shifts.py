"""Laws of feature shifts."""

import numpy as np
import pytest
import torch
from PIL import Image

from uefl.data.shifts import SHIFTS, described, parsed, rotated, shifted
from uefl.errors import InputError
from uefl.noise import bits, key

EXAMPLES = ["rotate:30", "rotate-nearest:30", "noise:25", "blur:1.5", "contrast:0.5", "colour:1.2/1/0.5", "hue:90"]


def pixels(n: int = 4, channels: int = 3, height: int = 9, width: int = 9) -> torch.Tensor:
    drawn = bits(key("pixels"), n * channels * height * width) & 0xFF
    return drawn.to(torch.uint8).reshape(n, channels, height, width)


def apply(x: torch.Tensor, shift: str, seed: int = 0) -> torch.Tensor:
    return shifted(x, shift, seed, torch.arange(len(x)))


@pytest.mark.parametrize("size", [8, 9])
@pytest.mark.parametrize("turns", [1, 2, 3, -1])
def test_positive_angles_turn_counter_clockwise(size: int, turns: int) -> None:
    flag = torch.zeros(1, 1, size, size, dtype=torch.uint8)
    flag[..., 1, 2:6] = 200  # a bar at the top, longer to the left, with a tail on one end
    flag[..., 1:5, 2] = 90
    assert rotated(flag, 90.0 * turns).equal(torch.rot90(flag, turns, (-2, -1)))


def test_a_whole_turn_changes_nothing() -> None:
    assert rotated(pixels(), 0).equal(pixels())
    assert rotated(pixels(), 360).equal(pixels())


def test_rotation_agrees_with_pillow() -> None:
    x = pixels(1, 1, 28, 28)
    for mode, name in ((Image.Resampling.BILINEAR, "rotate:50"), (Image.Resampling.NEAREST, "rotate-nearest:50")):
        theirs = np.asarray(Image.fromarray(x[0, 0].numpy()).rotate(50, mode), dtype=float)
        gap = np.abs(theirs - apply(x, name)[0, 0].numpy())[4:-4, 4:-4]  # borders blend with the fill in their own way
        assert np.median(gap) <= 1
        assert (gap <= 2).mean() > 0.95


def test_corners_turned_in_from_outside_are_black() -> None:
    white = torch.full((1, 1, 20, 20), 255, dtype=torch.uint8)
    turned = rotated(white, 45)
    assert turned[0, 0, 0, 0] == 0
    assert turned[0, 0, 10, 10] == 255


def test_noise_has_the_deviation_asked_for_and_an_address() -> None:
    grey = torch.full((8, 1, 64, 64), 128, dtype=torch.uint8)
    drawn = apply(grey, "noise:25")
    assert drawn.float().std().item() == pytest.approx(25, rel=0.03)
    assert drawn.equal(apply(grey, "noise:25"))
    assert not drawn.equal(apply(grey, "noise:25", seed=1))
    alone = shifted(grey[5:6], "noise:25", 0, torch.tensor([5]))
    assert alone.equal(drawn[5:6])  # the company an image keeps does not change its noise
    assert not drawn[0].equal(drawn[1])


def test_blur_spreads_a_point_evenly_and_keeps_flat_images_flat() -> None:
    point = torch.zeros(1, 1, 15, 15, dtype=torch.uint8)
    point[..., 7, 7] = 255
    spread = apply(point, "blur:1")
    assert spread[0, 0].equal(spread[0, 0].T)
    assert spread[0, 0, 7, 7] == round(255 * 0.3989**2)
    flat = torch.full((1, 3, 9, 9), 77, dtype=torch.uint8)
    assert apply(flat, "blur:2").equal(flat)


def test_contrast_scales_about_the_mean() -> None:
    x = pixels()
    assert apply(x, "contrast:1").equal(x)
    halved = apply(x, "contrast:0.5").float()
    torch.testing.assert_close(halved.mean((1, 2, 3)), x.float().mean((1, 2, 3)), atol=0.2, rtol=0)
    torch.testing.assert_close(halved.std((1, 2, 3)), x.float().std((1, 2, 3)) / 2, atol=0.2, rtol=0)


def test_hue_turns_red_to_green_to_blue() -> None:
    red = torch.tensor([200, 0, 0], dtype=torch.uint8).view(1, 3, 1, 1)
    assert apply(red, "hue:120").flatten().tolist() == [0, 200, 0]
    assert apply(red, "hue:240").flatten().tolist() == [0, 0, 200]
    assert apply(red, "hue:-120").flatten().tolist() == [0, 0, 200]
    grey = torch.full((1, 3, 2, 2), 90, dtype=torch.uint8)
    assert apply(grey, "hue:77").equal(grey)


def test_colour_multiplies_channels() -> None:
    x = torch.tensor([200, 100, 100], dtype=torch.uint8).view(1, 3, 1, 1)
    assert apply(x, "colour:2/1/0.5").flatten().tolist() == [255, 100, 50]


def test_a_chain_is_its_steps_one_after_another() -> None:
    x = pixels()
    assert apply(x, "rotate:120+contrast:0.5").equal(apply(apply(x, "rotate:120"), "contrast:0.5"))


@pytest.mark.parametrize("shift", EXAMPLES)
def test_every_shift_gives_pixels_and_leaves_its_input_alone(shift: str) -> None:
    x = pixels(300)
    before = x.clone()
    y = apply(x, shift)
    assert y.dtype == torch.uint8
    assert y.shape == x.shape
    assert x.equal(before)
    assert not y.equal(x)
    assert apply(x[:0], shift).shape == (0, *x.shape[1:])


def test_every_shift_has_an_example() -> None:
    assert {name for shift in EXAMPLES for name, _ in parsed(shift)} == set(SHIFTS)


@pytest.mark.parametrize(
    ("shift", "says"),
    [
        ("turn:5", "rotate:<degrees counter-clockwise>"),
        ("", "none"),
        ("rotate", "degrees"),
        ("rotate:abc", "'abc'"),
        ("rotate:nan", "'nan'"),
        ("noise:-1", "'-1'"),
        ("blur:0", "above 0"),
        ("colour:1", "red/green/blue"),
        ("rotate:5+", "known"),
    ],
)
def test_bad_shifts_are_refused_in_one_line(shift: str, says: str) -> None:
    with pytest.raises(InputError) as error:
        parsed(shift)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_colour_shifts_refuse_grey_images() -> None:
    with pytest.raises(InputError, match="3 channels"):
        apply(pixels(channels=1), "hue:90")


def test_shifts_are_described_briefly() -> None:
    assert described("rotate:-50") == "-50°"
    assert described("rotate:120+contrast:0.5") == "120° + contrast 0.5"
    assert described("none") == ""
