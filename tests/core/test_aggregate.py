"""Weighted means of replies, computed by hand, and the errors for which a reply is rejected."""

import re

import pytest
import torch

from uefl.core.aggregate import WeightedMean, find_finite_rows, find_reply_error
from uefl.core.federation import CODEWORDS_SUFFIX as CODEWORDS
from uefl.core.federation import Reply


def make_access_row(*allowed):
    return torch.tensor(allowed, dtype=torch.bool)


def test_tensors_are_weighted_by_the_given_weights():
    mean = WeightedMean({"w": torch.zeros(2)})
    mean.add({"w": torch.tensor([1.0, 2.0])}, 10, make_access_row())
    mean.add({"w": torch.tensor([4.0, -4.0])}, 30, make_access_row())
    assert mean.result()["w"].tolist() == [(10 * 1 + 30 * 4) / 40, (10 * 2 - 30 * 4) / 40]


def test_codeword_is_averaged_over_the_silos_that_may_use_it():
    """Codeword 0: all three silos. 1: the silos of weight 10 and 30. 2: only the silo of weight 30. 3: none."""
    previous = torch.tensor([[9.0], [9.0], [9.0], [9.0]])
    mean = WeightedMean({CODEWORDS: previous})
    mean.add({CODEWORDS: torch.tensor([[1.0], [2.0]])}, 10, make_access_row(1, 1, 0, 0))
    mean.add({CODEWORDS: torch.tensor([[3.0]])}, 20, make_access_row(1, 0, 0, 0))
    mean.add({CODEWORDS: torch.tensor([[5.0], [6.0], [7.0]])}, 30, make_access_row(1, 1, 1, 0))
    expected = [(10 * 1 + 20 * 3 + 30 * 5) / 60, (10 * 2 + 30 * 6) / 40, 7, 9]
    assert mean.result()[CODEWORDS][:, 0].tolist() == pytest.approx(expected)
    assert previous.flatten().tolist() == [9.0] * 4


def test_codewords_of_ensemble_members_are_averaged_as_codewords():
    name = f"members.1.{CODEWORDS}"
    mean = WeightedMean({name: torch.tensor([[9.0], [9.0]])})
    mean.add({name: torch.tensor([[1.0]])}, 5, make_access_row(0, 1))
    assert mean.result()[name].flatten().tolist() == [9, 1]


def test_tensors_that_no_silo_sends_keep_their_values():
    previous = {"w": torch.tensor([1.0]), CODEWORDS: torch.zeros(0, 3)}
    assert all(torch.equal(t, previous[n]) for n, t in WeightedMean(previous).result().items())


def test_integers_are_rounded_and_dtypes_are_preserved():
    mean = WeightedMean({"n": torch.tensor(0), "h": torch.zeros(1, dtype=torch.float16)})
    for n, weight in ((4, 1), (5, 2)):  # 14 thirds
        mean.add({"n": torch.tensor(n), "h": torch.ones(1, dtype=torch.float16)}, weight, make_access_row())
    result = mean.result()
    assert result["n"].dtype == torch.int64
    assert result["n"].item() == 5
    assert result["h"].dtype == torch.float16


def test_mean_of_many_replies_is_summed_in_double_precision():
    """Ten thousand silos send the same value: a sum in single precision drifts away from it."""
    mean, value = WeightedMean({"w": torch.zeros(1)}), torch.tensor([0.1])
    for _ in range(10_000):
        mean.add({"w": value}, 1, make_access_row())
    assert torch.equal(mean.result()["w"], value)


MODEL_STATE = {"w": torch.zeros(2), "n": torch.tensor(1), CODEWORDS: torch.zeros(3, 2)}
ACCESS_ROW = make_access_row(1, 0, 1)
VALID = {"w": torch.ones(2), "n": torch.tensor(2), CODEWORDS: torch.zeros(2, 2)}
INVALID = {  # by the pattern of the error
    "w is not finite": {**VALID, "w": torch.tensor([1.0, torch.nan])},
    "codebook.codewords is not finite": {**VALID, CODEWORDS: torch.full((2, 2), torch.inf)},
    r"w has shape \(3,\), expected \(2,\)": {**VALID, "w": torch.ones(3)},
    r"codebook.codewords has shape \(3, 2\), expected \(2, 2\)": {**VALID, CODEWORDS: torch.zeros(3, 2)},
    "tensor w is missing": {n: t for n, t in VALID.items() if n != "w"},
    "tensor spy is not expected": {**VALID, "spy": torch.ones(1)},
}


def test_valid_reply_has_no_error():
    assert find_reply_error(Reply("ada", 5, VALID), MODEL_STATE, ACCESS_ROW) == ""


@pytest.mark.parametrize("pattern", INVALID)
def test_invalid_tensor_is_named_with_the_reason(pattern):
    assert re.fullmatch(pattern, find_reply_error(Reply("ada", 5, INVALID[pattern]), MODEL_STATE, ACCESS_ROW))


@pytest.mark.parametrize("num_examples", [0, -3, float("nan"), float("inf")])
def test_number_of_examples_must_be_positive_and_finite(num_examples):
    error = find_reply_error(Reply("ada", num_examples, VALID), MODEL_STATE, ACCESS_ROW)
    assert error == f"num_examples={num_examples} is not a positive number"


def test_a_row_of_a_stack_is_finite_only_if_all_its_tensors_are():
    weights, counts = torch.ones(4, 2), torch.ones(4, dtype=torch.int64)
    weights[1, 0], bias = torch.inf, torch.zeros(4, 3)
    bias[2, 2] = torch.nan
    stacked = {"w": weights, "b": bias, "n": counts, "empty": torch.zeros(4, 0)}
    assert find_finite_rows(stacked, 4) == [True, False, False, True]
    assert find_finite_rows({"n": counts}, 4) == [True] * 4


def test_silos_may_send_different_sets_of_tensors():
    mean = WeightedMean({"w": torch.zeros(2, 3, 2, 2), "b": torch.zeros(2), "n": torch.tensor(0)})
    mean.add({"w": torch.full((2, 3, 2, 2), 1.0), "b": torch.tensor([1.0, 2.0])}, 1, make_access_row())
    mean.add({"b": torch.tensor([4.0, 5.0]), "n": torch.tensor(7)}, 2, make_access_row())
    result = mean.result()
    assert bool((result["w"] == 1).all())
    assert result["b"].tolist() == [3.0, 4.0]
    assert result["n"].item() == 7


def test_filters_keep_their_values_and_memory_layout_whatever_layout_a_reply_has():
    filters = torch.arange(2.0 * 3 * 2 * 5).reshape(2, 3, 2, 5)
    for previous in (torch.zeros(2, 3, 2, 5), torch.zeros(2, 3, 2, 5).to(memory_format=torch.channels_last)):
        mean = WeightedMean({"w": previous})
        mean.add({"w": filters}, 1, make_access_row())
        mean.add({"w": filters.to(memory_format=torch.channels_last)}, 3, make_access_row())
        assert torch.equal(mean.result()["w"], filters)
        assert mean.result()["w"].stride() == previous.stride()
