"""Optimizers equal torch's, schedules cover all rounds, and values outside their range are errors."""

import math
from dataclasses import replace

import pytest
import torch

from uefl.algorithms.ditto import Ditto
from uefl.algorithms.fedavg import FedAvg
from uefl.algorithms.fedbn import FedBN
from uefl.algorithms.ifca import IFCA
from uefl.algorithms.uefl import UEFL
from uefl.core.errors import InputError
from uefl.core.federation import iterate_batch_slices
from uefl.core.local import LocalTraining
from uefl.engines.optimizer import NamedOptimizer


def run_optimizer(local, steps=3):
    torch.manual_seed(0)
    w = torch.randn(4)
    optimizer = NamedOptimizer(local, {"w": w}, local.lr, {})
    for _ in range(steps):
        optimizer.step({"w": w**2})
    return w


@pytest.mark.parametrize(
    ("local", "make_torch_optimizer"),
    [
        (LocalTraining(lr=0.1), lambda p: torch.optim.Adam(p, 0.1)),
        (
            LocalTraining(optimizer="adamw", lr=0.1, weight_decay=0.2),
            lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.2),
        ),
        (
            LocalTraining(optimizer="sgd", lr=0.1, momentum=0.5, weight_decay=0.3),
            lambda p: torch.optim.SGD(p, 0.1, momentum=0.5, weight_decay=0.3),
        ),
    ],
)
def test_optimizer_equals_that_of_torch(local, make_torch_optimizer):
    torch.manual_seed(0)
    w = torch.randn(4, requires_grad=True)
    optimizer = make_torch_optimizer([w])
    for _ in range(3):
        w.grad = w.detach() ** 2
        optimizer.step()
    assert torch.equal(run_optimizer(local), w.detach())


def test_constant_learning_rate_is_constant():
    assert {LocalTraining(lr=0.5).lr_at(r, 10) for r in range(1, 11)} == {0.5}


def test_cosine_decreases_from_the_learning_rate_towards_zero():
    lrs = [LocalTraining(lr=2.0, schedule="cosine").lr_at(r, 10) for r in range(1, 11)]
    assert lrs[0] == 2
    assert lrs[5] == pytest.approx(1)  # half of the rounds are done
    assert lrs == sorted(lrs, reverse=True)
    assert lrs[-1] == pytest.approx(1 + math.cos(0.9 * math.pi))
    assert lrs[-1] > 0


def test_step_schedule_divides_by_ten_exactly_after_each_third():
    for third in range(1, 200):
        lrs = [LocalTraining(lr=1.0, schedule="step").lr_at(r, 3 * third) for r in range(1, 3 * third + 1)]
        assert lrs == pytest.approx([1.0] * third + [0.1] * third + [0.01] * third), third


@pytest.mark.parametrize("schedule", ["constant", "cosine", "step"])
def test_the_last_rounds_restart_at_half_the_rate_which_falls_to_zero(schedule):
    local = LocalTraining(lr=2.0, schedule=schedule, restart_rounds=4)
    before = [LocalTraining(lr=2.0, schedule=schedule).lr_at(r, 6) for r in range(1, 7)]
    assert [local.lr_at(r, 10) for r in range(1, 11)] == [*before, 1.0, 0.75, 0.5, 0.25]
    assert [local.lr_at(r, 2) for r in (1, 2)] == [1.0, 0.5], "a run may be shorter"


def test_every_method_follows_the_rates_of_group_rounds_if_it_is_told_to():
    rounds = {"rounds": 5, "extra_rounds": 3, "iterations": 3}
    local = LocalTraining(lr=0.1, schedule="cosine")
    in_groups = UEFL(**rounds, group_rounds=3, local=local)
    for method in (FedAvg, FedBN, Ditto, IFCA):
        other = method(**rounds, local=replace(local, restart_rounds=3))
        assert [other.lr_at(r) for r in range(1, 12)] == [in_groups.lr_at(r) for r in range(1, 12)]
    assert [FedAvg(**rounds, local=local).lr_at(r) for r in (9, 10)] != [in_groups.lr_at(r) for r in (9, 10)]


def test_gradients_are_clipped_by_their_common_norm_and_unchanged_below_it():
    gradients = [torch.tensor([3.0]), torch.tensor([4.0, 0.0])]
    clipped = LocalTraining(max_grad_norm=1.0).clip_gradients(gradients)
    assert torch.cat(clipped).tolist() == pytest.approx([0.6, 0.8, 0], abs=1e-6)
    assert torch.equal(torch.cat(LocalTraining(max_grad_norm=50.0).clip_gradients(gradients)), torch.cat(gradients))
    assert LocalTraining().clip_gradients(gradients) is gradients


@pytest.mark.parametrize(
    ("name", "value"),
    [("lr", 0), ("lr", math.nan), ("batch_size", 0), ("epochs", -1), ("eval_batch_size", 0)]
    + [("momentum", -0.1), ("weight_decay", -1.0), ("max_grad_norm", -1.0), ("weight_decay", math.nan)],
)
def test_value_outside_its_range_is_named(name, value):
    with pytest.raises(InputError, match=f"{name}={value} must be"):
        LocalTraining(**{name: value})


@pytest.mark.parametrize(
    ("n", "batch_size"), [(1, 4), (2, 4), (4, 4), (5, 4), (8, 4), (9, 4), (10, 4), (17, 16), (0, 4)]
)
def test_batches_contain_every_example_once_and_none_has_a_single_example(n, batch_size):
    batches = [range(n)[batch_slice] for batch_slice in iterate_batch_slices(n, batch_size)]
    assert [i for batch in batches for i in batch] == list(range(n))
    assert all(2 <= len(batch) <= batch_size + 1 for batch in batches) or n < 2
