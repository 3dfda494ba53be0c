"""Augmentation shifts and flips training images by addressed noise, and changes nothing else."""

import pytest
import torch
import torch.nn.functional as F
from harness import make_encoder

from uefl.core.errors import InputError
from uefl.core.noise import derive_key, salt_noise_layers, set_noise_key
from uefl.models.augmentation import Augmentation
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


@pytest.mark.parametrize("specification", ["crop", "crop:0", "crop:-1", "turn:3", "flip+", "crop:1,flip"])
def test_other_specifications_raise_an_input_error(specification):
    with pytest.raises(InputError, match="known: crop:<pixels>, flip"):
        Augmentation.parse(specification)
