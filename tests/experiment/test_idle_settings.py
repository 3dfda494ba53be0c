"""Settings that change nothing are named before the run, in one sentence each; settings that work are not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import SHORT_RUN, SMALL_CODEBOOK, make_network, make_striped_silos
from torch import nn

from uefl.algorithms.fedavg import FedAvg
from uefl.algorithms.fedbn import FedBN
from uefl.algorithms.uefl import UEFL
from uefl.core.federation import Examples, Silo
from uefl.experiment.idle_settings import describe_idle_settings
from uefl.experiment.parsing import parse_experiments
from uefl.experiment.run import run
from uefl.models.frozen_batch_norm import freeze_batch_norm_statistics

METHOD = UEFL(**{**SHORT_RUN, "rounds": 3, "extra_rounds": 1, "iterations": 3}, codebook=SMALL_CODEBOOK)


def drop_validation(silo: Silo) -> Silo:
    return replace(silo, validation=Examples(silo.validation.x[:0], silo.validation.y[:0]))


def describe(method: UEFL = METHOD, silos: list[Silo] | None = None, **codebook: Any) -> list[str]:
    method = replace(method, codebook=replace(method.codebook, **codebook))
    return describe_idle_settings(method, make_network(method), make_striped_silos() if silos is None else silos)


def test_settings_that_work_are_not_named() -> None:
    assert describe() == []
    assert describe(extend="all", silos=[drop_validation(silo) for silo in make_striped_silos()]) == []
    assert describe(replace(METHOD, iterations=1, group_rounds=0)) == []


@pytest.mark.parametrize("extend", ["uncertain", "random", "validated"])
def test_silos_without_validation_examples_cannot_be_compared(extend: str) -> None:
    (sentence,) = describe(extend=extend, silos=[drop_validation(silo) for silo in make_striped_silos()])
    assert sentence.startswith(f"extend={extend} has no effect: it compares silos by validation examples")


def test_a_run_whose_later_rounds_are_all_in_groups_has_no_decision() -> None:
    (sentence,) = describe(replace(METHOD, iterations=2, group_rounds=1))
    assert sentence == (
        "extend=uncertain has no effect: no iteration ends before the last shared round (iterations=2, extra_rounds=1, "
        "group_rounds=1)"
    )


def test_a_silo_smaller_than_a_codewords_least_number_of_examples_sends_none() -> None:
    silos = make_striped_silos()
    largest = max(len(silo.train.y) for silo in silos)
    assert describe(silos=silos, min_examples=largest) == []
    (sentence,) = describe(silos=silos, min_examples=largest + 1)
    assert f"min_examples={largest + 1} is more than the largest silo has for training ({largest})" in sentence
    patients = [replace(silo, train_groups=torch.zeros(len(silo.train.y), dtype=torch.int64)) for silo in silos]
    (sentence,) = describe(silos=patients, min_examples=2)
    assert "min_examples=2 is more than the largest silo has for training (1)" in sentence


def test_no_standard_errors_are_no_test() -> None:
    (sentence,) = describe(uncertainty_test="standard_errors", min_standard_errors=0.0)
    assert (
        sentence == "uncertainty_test=standard_errors with min_standard_errors=0 is the same as uncertainty_test=none"
    )


def test_rounds_of_the_first_iteration_are_never_in_groups() -> None:
    (sentence,) = describe(replace(METHOD, iterations=1, group_rounds=2))
    assert (
        sentence == "group_rounds=2 has no effect: all rounds are of the first iteration (iterations=1, extra_rounds=1)"
    )


def test_the_learning_rate_starts_again_once_with_the_group_rounds() -> None:
    def restart(restart_rounds: int, group_rounds: int) -> UEFL:
        local = replace(METHOD.local, restart_rounds=restart_rounds)
        return replace(METHOD, local=local, extra_rounds=2, group_rounds=group_rounds)

    (sentence,) = describe(restart(3, 2))
    assert sentence == (
        "restart_rounds=3 has no effect: the learning rate starts again with the 2 rounds in groups; set "
        "restart_rounds=2 for other methods, or group_rounds=0"
    )
    assert describe(restart(2, 2)) == describe(restart(3, 0)) == describe(restart(0, 2)) == []
    rates = [[restart(n, 2).lr_at(r) for r in range(1, 8)] for n in (0, 2, 3)]
    assert rates[0] == rates[1] == rates[2]
    assert [restart(2, 0).lr_at(r) for r in range(1, 8)] == rates[0]


def test_frozen_statistics_of_batch_norm_cannot_stay_at_a_silo() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    for batch_norm in ("local", "not_averaged", "personal"):
        assert describe_idle_settings(FedAvg(**SHORT_RUN, batch_norm=batch_norm), net, make_striped_silos()) == []
    freeze_batch_norm_statistics(net)
    for batch_norm in ("local", "not_averaged"):
        (sentence,) = describe_idle_settings(FedAvg(**SHORT_RUN, batch_norm=batch_norm), net, make_striped_silos())
        assert sentence == f"batch_norm={batch_norm} has no effect: the statistics of batch norm are frozen"
    assert describe_idle_settings(FedBN(**SHORT_RUN), net, make_striped_silos()) == []  # scale and shift stay there


def test_fedbn_without_batch_norm_is_fedavg_and_the_run_says_so(tmp_path: Any) -> None:
    settings = ["fedbn", "digits", "encoder=identity", "rounds=1", "iterations=1", "epochs=1", "train_per_silo=20"]
    (experiment,) = parse_experiments(settings, [], "default").values()
    events: list[dict[str, Any]] = []
    run(experiment, tmp_path, on_event=events.append)
    messages = [event["message"] for event in events if event["kind"] == "warning"]
    assert "batch_norm=personal has no effect: the network has no batch norm" in messages
    with_norm = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    assert describe_idle_settings(FedBN(**SHORT_RUN), with_norm, make_striped_silos()) == []
