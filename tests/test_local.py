"""Optimisers are torch's, schedules run over all rounds, and nonsense is refused."""

import math

import pytest
import torch

from uefl.engines.optimizer import Optimizer
from uefl.errors import InputError
from uefl.federation import batches
from uefl.local import Local


def stepped(local, steps=3):
    torch.manual_seed(0)
    w = torch.randn(4)
    optimizer = Optimizer(local, {"w": w}, local.rate, {})
    for _ in range(steps):
        optimizer.step({"w": w**2})
    return w


@pytest.mark.parametrize(
    ("local", "theirs"),
    [
        (Local(rate=0.1), lambda p: torch.optim.Adam(p, 0.1)),
        (Local(optimizer="adamw", rate=0.1, weight_decay=0.2), lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.2)),
        (
            Local(optimizer="sgd", rate=0.1, momentum=0.5, weight_decay=0.3),
            lambda p: torch.optim.SGD(p, 0.1, momentum=0.5, weight_decay=0.3),
        ),
    ],
)
def test_the_optimiser_is_the_one_asked_for(local, theirs):
    torch.manual_seed(0)
    w = torch.randn(4, requires_grad=True)
    optimizer = theirs([w])
    for _ in range(3):
        w.grad = w.detach() ** 2
        optimizer.step()
    assert torch.equal(stepped(local), w.detach())


def test_a_constant_rate_is_constant():
    assert {Local(rate=0.5).rate_at(r, 10) for r in range(1, 11)} == {0.5}


def test_cosine_falls_from_the_rate_towards_nought():
    rates = [Local(rate=2.0, schedule="cosine").rate_at(r, 10) for r in range(1, 11)]
    assert rates[0] == 2
    assert rates[5] == pytest.approx(1)  # half of the rounds are done
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(1 + math.cos(0.9 * math.pi))
    assert rates[-1] > 0


def test_steps_fall_to_a_tenth_after_each_third_exactly():
    for third in range(1, 200):
        rates = [Local(rate=1.0, schedule="step").rate_at(r, 3 * third) for r in range(1, 3 * third + 1)]
        assert rates == pytest.approx([1.0] * third + [0.1] * third + [0.01] * third), third


def test_gradients_are_clipped_to_the_norm_of_all_together_and_left_alone_below_it():
    g = [torch.tensor([3.0]), torch.tensor([4.0, 0.0])]
    clipped = Local(clip=1.0).clipped(g)
    assert torch.cat(clipped).tolist() == pytest.approx([0.6, 0.8, 0], abs=1e-6)
    assert torch.equal(torch.cat(Local(clip=50.0).clipped(g)), torch.cat(g))
    assert Local().clipped(g) is g


@pytest.mark.parametrize(
    "wrong",
    [{"rate": 0}, {"rate": math.nan}, {"batch": 0}, {"epochs": -1}, {"evaluation_batch": 0}]
    + [{"momentum": -0.1}, {"weight_decay": -1.0}, {"clip": -1.0}, {"weight_decay": math.nan}],
)
def test_nonsense_is_refused_by_name(wrong):
    (name,) = wrong
    with pytest.raises(InputError, match=name):
        Local(**wrong)


@pytest.mark.parametrize(("n", "size"), [(1, 4), (2, 4), (4, 4), (5, 4), (8, 4), (9, 4), (10, 4), (17, 16), (0, 4)])
def test_batches_hold_everything_once_and_leave_no_lone_example(n, size):
    cuts = list(batches(n, size))
    assert [i for cut in cuts for i in range(n)[cut]] == list(range(n))
    assert all(2 <= len(range(n)[cut]) <= size + 1 for cut in cuts) or n < 2
