"""The mean over silos, and over the users of a word, by hand; and what is refused at the door."""

import re

import pytest
import torch

from uefl.aggregate import Mean, flaw
from uefl.federation import Reply

WORDS = "codebook.words"


def row(*allowed):
    return torch.tensor(allowed, dtype=torch.bool)


def test_weights_are_the_sizes():
    mean = Mean({"w": torch.zeros(2)})
    mean.add({"w": torch.tensor([1.0, 2.0])}, 10, row())
    mean.add({"w": torch.tensor([4.0, -4.0])}, 30, row())
    assert mean.result()["w"].tolist() == [(10 * 1 + 30 * 4) / 40, (10 * 2 - 30 * 4) / 40]


def test_a_word_is_the_mean_of_its_users_only():
    """Word 0: all three. Word 1: silos of 10 and 30. Word 2: the silo of 30 alone. Word 3: nobody."""
    old = torch.tensor([[9.0], [9.0], [9.0], [9.0]])
    mean = Mean({WORDS: old})
    mean.add({WORDS: torch.tensor([[1.0], [2.0]])}, 10, row(1, 1, 0, 0))
    mean.add({WORDS: torch.tensor([[3.0]])}, 20, row(1, 0, 0, 0))
    mean.add({WORDS: torch.tensor([[5.0], [6.0], [7.0]])}, 30, row(1, 1, 1, 0))
    expected = [(10 * 1 + 20 * 3 + 30 * 5) / 60, (10 * 2 + 30 * 6) / 40, 7, 9]
    assert mean.result()[WORDS][:, 0].tolist() == pytest.approx(expected)
    assert old.flatten().tolist() == [9.0] * 4


def test_words_of_every_member_are_words():
    mean = Mean({f"members.1.{WORDS}": torch.tensor([[9.0], [9.0]])})
    mean.add({f"members.1.{WORDS}": torch.tensor([[1.0]])}, 5, row(0, 1))
    assert mean.result()[f"members.1.{WORDS}"].flatten().tolist() == [9, 1]


def test_what_nobody_sends_stays():
    old = {"w": torch.tensor([1.0]), WORDS: torch.zeros(0, 3)}
    assert all(torch.equal(t, old[n]) for n, t in Mean(old).result().items())


def test_counters_stay_whole_numbers_and_dtypes_what_they_were():
    mean = Mean({"n": torch.tensor(0), "h": torch.zeros(1, dtype=torch.float16)})
    for n, weight in ((3, 1), (6, 2)):
        mean.add({"n": torch.tensor(n), "h": torch.ones(1, dtype=torch.float16)}, weight, row())
    found = mean.result()
    assert found["n"].dtype == torch.int64
    assert found["n"].item() == 5
    assert found["h"].dtype == torch.float16


def test_the_mean_of_many_is_summed_in_double():
    """Ten thousand silos that agree: a sum in single precision drifts away from them."""
    mean, value = Mean({"w": torch.zeros(1)}), torch.tensor([0.1])
    for _ in range(10_000):
        mean.add({"w": value}, 1, row())
    assert torch.equal(mean.result()["w"], value)


STATE = {"w": torch.zeros(2), "n": torch.tensor(1), WORDS: torch.zeros(3, 2)}
GOOD = {"w": torch.ones(2), "n": torch.tensor(2), WORDS: torch.zeros(2, 2)}
BAD = {
    "w is not finite": {**GOOD, "w": torch.tensor([1.0, torch.nan])},
    "codebook.words is not finite": {**GOOD, WORDS: torch.full((2, 2), torch.inf)},
    r"w has shape \(3,\), expected \(2,\)": {**GOOD, "w": torch.ones(3)},
    r"codebook.words has shape \(3, 2\), expected \(2, 2\)": {**GOOD, WORDS: torch.zeros(3, 2)},
    "tensor w is missing": {n: t for n, t in GOOD.items() if n != "w"},
    "tensor spy is not expected": {**GOOD, "spy": torch.ones(1)},
}


def test_a_good_reply_has_no_flaw():
    assert flaw(Reply("ada", 5, GOOD), STATE, row(1, 0, 1)) == ""


@pytest.mark.parametrize("why", BAD)
def test_a_bad_reply_is_named(why):
    assert re.fullmatch(why, flaw(Reply("ada", 5, BAD[why]), STATE, row(1, 0, 1)))


@pytest.mark.parametrize("size", [0, -3, float("nan"), float("inf")])
def test_a_size_that_is_no_size_is_refused(size):
    assert "size" in flaw(Reply("ada", size, GOOD), STATE, row(1, 0, 1))
