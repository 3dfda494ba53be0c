"""The rule for the size of a codebook, with numbers computed by hand."""

import random
from statistics import median

import pytest

from uefl.core.codebook_size import choose_codebook_size, select_middle_sizes


@pytest.mark.parametrize(
    ("num_tokens", "num_channels", "segments"), [(49, 64, 1), (4, 6, 1), (1, 64, 4), (1, 6, 1), (1, 4, 4)]
)
def test_segments_are_those_of_the_encoders_output(num_tokens, num_channels, segments):
    assert choose_codebook_size(num_tokens, num_channels, [100]).segments == segments


@pytest.mark.parametrize(
    ("num_examples", "num_tokens", "num_codewords"),
    [
        ([2000] * 9, 16, 1024),  # 32000 / 40 = 800
        ([400] * 3, 16, 128),  # 160: nearer to 128 than to 256, by ratio
        ([100, 400, 0, 100000], 16, 128),  # the median of silos that train
        ([180] * 4, 1, 16),  # four segments: 720 / 40 = 18
        ([10], 1, 16),
        ([60000], 49, 1024),
        ([], 1, 16),
    ],
)
def test_codewords_are_the_power_of_two_near_a_fortieth_of_the_features(num_examples, num_tokens, num_codewords):
    assert choose_codebook_size(num_tokens, 8, num_examples).num_codewords == num_codewords


def test_numbers_that_are_set_stay_and_segments_count_as_features():
    assert choose_codebook_size(16, 8, [400], num_codewords=7, segments=2) == (7, 2)
    assert choose_codebook_size(16, 8, [400], segments=2).num_codewords == 256  # 320
    assert choose_codebook_size(1, 8, [400], num_codewords=7) == (7, 4)


def test_three_sizes_in_the_middle_give_one_more_silo_the_median_of_all():
    rng = random.Random(0)
    for num_silos in range(1, 9):
        sizes = [rng.randrange(1, 100) for _ in range(num_silos)]
        middle = select_middle_sizes([*sizes, 0])  # a silo without training examples does not count
        assert len(middle) <= 3
        for own in (1, 20, 50, 77, 200):
            assert median([*middle, own]) == median([*sizes, own])
