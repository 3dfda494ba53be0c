"""Augmentation shifts and flips training images by addressed noise, and changes nothing else."""

import colorsys

import pytest
import torch
import torch.nn.functional as F
from harness import make_encoder
from torch.func import functional_call, vmap

from uefl.core.errors import InputError
from uefl.core.noise import derive_key, salt_noise_layers, set_noise_key
from uefl.models.augmentation import Augmentation
from uefl.models.color import jitter_colors, shift_hue
from uefl.models.network import Net


def augment(augmentation: Augmentation, x: torch.Tensor, address: str = "a") -> torch.Tensor:
    salt_noise_layers(augmentation)
    set_noise_key([augmentation], derive_key(address))
    out: torch.Tensor = augmentation.train()(x)
    return out


@pytest.mark.parametrize("specification", ["crop:2", "flip", "crop:1+flip", "flip+crop:3"])
def test_every_image_is_shifted_and_possibly_flipped(specification):
    x = torch.randn(2000, 1, 8, 6)
    augmentation = Augmentation.parse(specification)
    crop, padded = augmentation.crop, F.pad(x, [augmentation.crop] * 4)
    offsets, flips = range(2 * crop + 1), (False, True) if augmentation.flip else (False,)
    variants = [(i, j, flip) for i in offsets for j in offsets for flip in flips]
    copies = torch.stack([torch.flip(padded[..., i : i + 8, j : j + 6], [-1] * flip) for i, j, flip in variants])
    is_equal = (copies == augment(augmentation, x)).all((2, 3, 4))
    assert is_equal.any(0).all()
    assert is_equal.any(1).all(), "every variant occurs"


def test_draws_depend_on_their_address():
    x, augmentation = torch.randn(32, 1, 8, 8), Augmentation(2, flip=True)
    assert torch.equal(augment(augmentation, x), augment(augmentation, x))
    assert not torch.equal(augment(augmentation, x), augment(augmentation, x, "b"))


def test_resized_crop_enlarges_a_part_of_at_least_the_given_area():
    ramp = torch.linspace(-1, 1, 64)
    x = torch.stack([ramp.expand(64, 64), ramp[:, None].expand(64, 64)]).expand(500, 2, 64, 64)
    out = augment(Augmentation.parse("resized-crop:0.7"), x)
    inner = out[:, :, 16:48, 16:48]  # away from the border
    width = (inner[:, 0, :, 1:] - inner[:, 0, :, :-1]).mean((1, 2)) / (ramp[1] - ramp[0])
    height = (inner[:, 1, 1:] - inner[:, 1, :-1]).mean((1, 2)) / (ramp[1] - ramp[0])
    assert (width * height).min() > 0.6  # a side is at most the image's, which may cost some of the 0.7
    assert (width * height).max() <= 1.001
    assert (width / height).min() < 0.85 < 1.15 < (width / height).max()
    assert out.min() >= -1
    assert out.max() <= 1


def test_hue_shift_is_that_of_the_standard_library():
    pixels = torch.rand(20, 3, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    pixels[0, :, 0, 0], pixels[0, :, 0, 1] = 0.3, 0.0  # gray and black
    shifts = torch.linspace(-0.5, 0.5, 20, dtype=torch.float64)
    out = shift_hue(pixels, shifts)
    for image, shift, shifted in zip(pixels, shifts.tolist(), out):
        for pixel, expected in zip(image.flatten(1).t().tolist(), shifted.flatten(1).t().tolist()):
            hue, saturation, value = colorsys.rgb_to_hsv(*pixel)
            assert colorsys.hsv_to_rgb((hue + shift) % 1, saturation, value) == pytest.approx(expected, abs=1e-9)


def test_jitter_changes_brightness_contrast_and_saturation_as_torchvision_does():
    pixels = torch.rand(1, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    one, zero, half = torch.ones(1), torch.zeros(1), torch.full((1,), 0.5)
    gray = 0.299 * pixels[:, :1] + 0.587 * pixels[:, 1:2] + 0.114 * pixels[:, 2:]
    assert torch.allclose(jitter_colors(pixels, one, one, one, zero), pixels, atol=1e-6)
    assert torch.allclose(jitter_colors(pixels, half, one, one, zero), pixels / 2, atol=1e-6)
    assert torch.allclose(jitter_colors(pixels, one, half, one, zero), (pixels + gray.mean()) / 2, atol=1e-6)
    assert torch.allclose(jitter_colors(pixels, one, one, half, zero), (pixels + gray) / 2, atol=1e-6)


def test_jitter_and_gray_work_on_pixels_and_return_standardized_images():
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    constants = [torch.tensor(values)[:, None, None] for values in (mean, std)]
    pixels = torch.rand(1000, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    x = (pixels - constants[0]) / constants[1]
    jittered = augment(Augmentation.parse("jitter:0.3", mean, std), x) * constants[1] + constants[0]
    assert jittered.min() > -1e-6
    assert jittered.max() < 1 + 1e-6
    brightness = jittered.amax((1, 2, 3)) / pixels.amax((1, 2, 3))
    assert brightness.min() < 0.75
    assert not torch.allclose(jittered, pixels, atol=0.05)
    grayed = augment(Augmentation.parse("gray:0.1", mean, std), x) * constants[1] + constants[0]
    is_gray = (grayed.amax(1) - grayed.amin(1)).amax((1, 2)) < 1e-5
    assert 0.06 < is_gray.float().mean() < 0.14
    assert torch.allclose(grayed[~is_gray], pixels[~is_gray], atol=1e-5)


def test_stacked_clients_are_augmented_like_single_ones():
    augmentation = Augmentation.parse("resized-crop:0.7+flip+jitter:0.3+gray:0.5").train()
    salt_noise_layers(augmentation)
    x, keys = torch.randn(3, 6, 3, 8, 8), torch.tensor([derive_key(i) for i in range(3)])
    stacked = vmap(lambda key, x: functional_call(augmentation, {"key": key}, x))(keys, x)
    for i in range(3):
        set_noise_key([augmentation], int(keys[i]))
        assert torch.allclose(stacked[i], augmentation(x[i]), atol=1e-5)


def test_colors_of_gray_images_cannot_change():
    with pytest.raises(InputError, match=r"augment=jitter:0\.3 needs images of 3 channels, not 1"):
        Net(make_encoder(), 3, (1, 8, 8), augment="jitter:0.3")


def test_the_memory_layout_stays_channels_last():
    x = torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last)
    assert augment(Augmentation(2), x).is_contiguous(memory_format=torch.channels_last)


def test_predictions_and_dropout_passes_use_images_as_they_are():
    net = Net(make_encoder(), 3, (1, 8, 8), hidden_size=16, dropout=0.0, augment="crop:3+flip").eval()
    other = Net(make_encoder(), 3, (1, 8, 8), hidden_size=16, dropout=0.0).eval()
    other.load_state_dict(net.state_dict())
    x = torch.randn(20, 1, 8, 8)
    assert torch.equal(net(x).logits, other(x).logits)
    assert torch.equal(net.predict_with_samples(x, 3).sampled_logits, other.predict_with_samples(x, 3).sampled_logits)
    assert not torch.equal(net.train()(x).logits, other.train()(x).logits)


@pytest.mark.parametrize(
    "specification", ["crop", "crop:0", "crop:-1", "turn:3", "flip+", "crop:1,flip", "jitter:0.6", "gray:nan"]
)
def test_other_specifications_raise_an_input_error(specification):
    with pytest.raises(InputError, match="known: crop:<pixels>, flip"):
        Augmentation.parse(specification)
