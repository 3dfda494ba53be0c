"""Abstain from uncertain answers: the largest share of answers whose error rate is certified on calibration examples.

Answers are ranked by their score 1 − p. Fixed-sequence testing starts at a number of the most certain examples that
depends on n alone and proceeds to all of them. Each step tests that the error rate among the answers is above the risk,
by the upper bound of Clopper and Pearson at level δ, and the first step that fails is the end (Angelopoulos et al.,
Learn then test, 2021). With probability 1 − δ the error rate of the answers is at most the risk, if calibration and new
examples are drawn alike and errors do not become rarer as certainty falls.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

DELTA = 0.1  # allowed probability that the certified error rate is wrong
NO_ANSWER, ALL_ANSWERS = 0.0, 2.0  # thresholds: an answer is given if its score is below the threshold
MAX_STEPS = 50


class Abstention(NamedTuple):
    """The threshold of answers, and what it is based on."""

    threshold: float  # an answer is given if its score is below it
    num_answers: int  # calibration examples that are answered
    num_errors: int  # of these
    bound: float  # upper bound of the error rate; 1 where nothing is certified

    @property
    def is_certified(self) -> bool:
        """Whether some answers have the required error rate."""
        return self.num_answers > 0


def compute_upper_bound(num_errors: int, n: int, delta: float = DELTA) -> float:
    """Return the upper bound of an error rate by Clopper and Pearson at level δ."""
    from scipy.stats import beta  # slow to import

    return float(beta.ppf(1 - delta, num_errors + 1, n - num_errors)) if num_errors < n else 1.0


def count_needed_answers(risk: float, delta: float = DELTA) -> int:
    """Return how many answers without an error certify a risk."""
    return math.ceil(math.log(delta) / math.log1p(-risk) - 1e-9)


def choose_threshold(scores: Tensor, is_wrong: Tensor, risk: float, delta: float = DELTA) -> Abstention:
    """Return the threshold for the scores [n] of the answers to calibration examples and whether they are wrong [n]."""
    n, best = len(scores), Abstention(NO_ANSWER, 0, 0, 1.0)
    scores, order = scores.double().sort(stable=True)
    is_wrong = is_wrong[order]
    for num_ranked in list_steps(n, risk, delta):
        # The score of the next example is the threshold, so that no score of an answered example chooses it.
        larger = scores[scores > scores[num_ranked - 1]]  # equal scores are answered together
        threshold = float(larger[0]) if len(larger) else ALL_ANSWERS
        is_answered = scores < threshold
        num_answers, num_errors = int(is_answered.sum()), int(is_wrong[is_answered].sum())
        bound = compute_upper_bound(num_errors, num_answers, delta)
        if bound > risk:
            break
        best = Abstention(threshold, num_answers, num_errors, bound)
    return best


def list_steps(n: int, risk: float, delta: float = DELTA) -> list[int]:
    """Return the numbers of most certain examples that are tested in turn: from half of them, or as many as needed."""
    first = max(count_needed_answers(risk, delta), n // 2)
    if first > n:
        return []
    step = max(1, -(-(n - first) // MAX_STEPS))
    return [*range(first, n, step), n]
