"""Augmentation moves and mirrors training images, by addressed noise, and touches nothing else."""

import pytest
import torch
import torch.nn.functional as F
from stripes import encoder

from uefl import Net
from uefl.augment import Augment
from uefl.errors import InputError
from uefl.noise import key, noises, set_key


def moved(augment: Augment, x: torch.Tensor, address: str = "a") -> torch.Tensor:
    noises(augment)
    set_key([augment], key(address))
    out: torch.Tensor = augment.train()(x)
    return out


@pytest.mark.parametrize("text", ["crop:2", "flip", "crop:1+flip", "flip+crop:3"])
def test_every_image_is_a_shifted_and_perhaps_mirrored_copy_of_itself(text):
    x = torch.randn(2000, 1, 8, 6)
    augment = Augment.spoken(text)
    c, padded = augment.crop, F.pad(x, [augment.crop] * 4)
    places = [
        (i, j, m)
        for i in range(2 * c + 1)
        for j in range(2 * c + 1)
        for m in ((False, True) if augment.flip else (False,))
    ]
    copies = torch.stack([torch.flip(padded[..., i : i + 8, j : j + 6], [-1] * m) for i, j, m in places])
    hits = (copies == moved(augment, x)).all((2, 3, 4))
    assert hits.any(0).all()
    assert hits.any(1).all(), "every move happens"


def test_draws_have_an_address():
    x, augment = torch.randn(32, 1, 8, 8), Augment(2, flip=True)
    assert torch.equal(moved(augment, x), moved(augment, x))
    assert not torch.equal(moved(augment, x), moved(augment, x, "b"))


def test_layout_stays_with_channels_last():
    x = torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last)
    assert moved(Augment(2), x).is_contiguous(memory_format=torch.channels_last)


def test_predictions_and_dropout_passes_see_images_as_they_are():
    net = Net(encoder(), 3, (1, 8, 8), hidden=16, dropout=0.0, augment="crop:3+flip").eval()
    bare = Net(encoder(), 3, (1, 8, 8), hidden=16, dropout=0.0).eval()
    bare.load_state_dict(net.state_dict())
    x = torch.randn(20, 1, 8, 8)
    assert torch.equal(net(x).logits, bare(x).logits)
    assert torch.equal(net.examine(x, 3).samples, bare.examine(x, 3).samples)
    assert not torch.equal(net.train()(x).logits, bare.train()(x).logits)


@pytest.mark.parametrize("text", ["crop", "crop:0", "crop:-1", "turn:3", "flip+", "crop:1,flip"])
def test_anything_else_is_refused(text):
    with pytest.raises(InputError, match="is none of crop:<pixels>, flip"):
        Augment.spoken(text)
