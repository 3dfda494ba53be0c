"""The plan of a run: its counts, and a time that is measured, not guessed."""

import time
from dataclasses import replace

import pytest
import torch
from harness import LOCAL, MLP_MODEL, SHORT_RUN, build_model, make_pattern_silos
from torch import nn

from uefl.algorithms.fedavg import FedAvg
from uefl.experiment.chance import compute_chance_accuracy
from uefl.experiment.plan import count_steps, make_plan

METHOD = FedAvg(**SHORT_RUN)


class SlowLayer(nn.Module):
    """A layer that takes 20 ms."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return x


def test_a_plan_counts_images_silos_and_parameters_and_leaves_the_network_as_it_is() -> None:
    net = build_model(METHOD)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    state = torch.get_rng_state()
    plan = make_plan(METHOD, net, make_pattern_silos((24, 33)), "cpu")
    assert (plan.num_images, plan.num_silos, plan.num_rounds) == (24 + 33 + 2 * (9 + 30), 2, 5)
    assert plan.num_parameters == sum(p.numel() for p in net.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert torch.equal(state, torch.get_rng_state()), "a plan draws nothing from the user's generator"


def test_the_estimate_grows_with_the_time_of_a_step() -> None:
    silos, net = make_pattern_silos((24, 33)), build_model(METHOD, MLP_MODEL)
    net.encoder.layers.append(SlowLayer())
    plan = make_plan(METHOD, net, silos, "cpu")
    training_steps = METHOD.total_rounds * LOCAL.epochs * (24 + 33) / LOCAL.batch_size
    assert plan.seconds > 0.02 * training_steps


def test_the_estimate_counts_only_silos_that_take_part_or_measure() -> None:
    """Of four equal silos, one trains and one measures: a quarter of all steps."""
    silos = make_pattern_silos((24, 24, 24, 24))
    few = replace(METHOD, clients_per_round=1, eval_clients=1)
    assert count_steps(few, silos) == pytest.approx(count_steps(METHOD, silos) / 4)
    assert count_steps(replace(METHOD, eval_clients=9), silos) == count_steps(METHOD, silos)


def test_chance_is_the_accuracy_of_the_most_common_class() -> None:
    silos = make_pattern_silos((24, 33))
    assert compute_chance_accuracy(silos) == 1 / 3
