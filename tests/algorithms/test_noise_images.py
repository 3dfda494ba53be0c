"""Noise images: a mean per class and noise per image, both drawn by the seed."""

import torch

from uefl.algorithms.noise_images import make_noise_images


def make_classes(seed, noise_deviation, purpose="virtual"):
    images = make_noise_images(seed, purpose, 3, 5, 1, noise_deviation)
    return images.reshape(3, 5, 1, 8, 8)


def test_means_of_classes_and_noise_depend_on_the_seed():
    one, other = (make_classes(seed, 0.0) for seed in (0, 1))
    assert torch.equal(one, one[:, :1].expand_as(one))  # without noise, all images of a class are its mean
    assert not torch.isclose(one, other).any()
    noise, other_noise = (make_classes(seed, 1.0) - make_classes(seed, 0.0) for seed in (0, 1))
    assert not torch.isclose(noise, other_noise).any()


def test_images_of_another_purpose_are_others():
    assert not torch.isclose(make_classes(0, 0.0), make_classes(0, 0.0, "pseudo")).any()
