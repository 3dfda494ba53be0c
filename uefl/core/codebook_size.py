"""The rule for the size of a codebook where the settings leave it open (D33)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from statistics import median
from typing import NamedTuple

SEGMENTS_OF_ONE_TOKEN = 4
FEATURES_PER_CODEWORD = 40
MIN_CODEWORDS, MAX_CODEWORDS = 16, 1024


class CodebookSize(NamedTuple):
    """Codewords of the initial codebook and of every extension, and segments of a feature."""

    num_codewords: int
    segments: int


def choose_codebook_size(
    num_tokens: int, num_channels: int, num_examples: Collection[int], *, num_codewords: int = 0, segments: int = 0
) -> CodebookSize:
    """Return the size of a codebook; a number that is not 0 stays.

    Segments: 1 where the encoder returns several tokens per example (a map), since codewords of whole tokens separate
    domains. 4 for one token per example (a vector, a row of a table), whose segments are the only features; 1 if
    4 does not divide the channels. Codewords: the power of two nearest, by ratio, to a fortieth of the features (tokens
    times segments) that the median silo has for training, between 16 and 1024.
    """
    if not segments:
        segments = 1 if num_tokens > 1 or num_channels % SEGMENTS_OF_ONE_TOKEN else SEGMENTS_OF_ONE_TOKEN
    if not num_codewords:
        trainable = [n for n in num_examples if n] or [1]
        share = median(trainable) * num_tokens * segments / FEATURES_PER_CODEWORD
        num_codewords = min(max(2 ** round(math.log2(share)), MIN_CODEWORDS), MAX_CODEWORDS)
    return CodebookSize(int(num_codewords), segments)


def select_middle_sizes(num_examples: Iterable[int]) -> list[int]:
    """Return the at most three sizes of silos that decide the median together with the size of one more silo.

    A silo that joins over a network needs no more of the other silos for the rule above.
    """
    sizes = sorted(n for n in num_examples if n)
    num_outer = max(0, (len(sizes) - 2) // 2)  # as many below as above the two or three in the middle
    return sizes[num_outer : len(sizes) - num_outer]
