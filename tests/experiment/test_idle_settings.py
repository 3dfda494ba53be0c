"""Settings that change nothing are named before the run, in one sentence each; settings that work are not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import SHORT_RUN, SMALL_CODEBOOK, make_network, make_striped_silos
from torch import nn

from uefl.algorithms.fedbn import FedBN
from uefl.algorithms.uefl import UEFL
from uefl.core.federation import Examples, Silo
from uefl.experiment.idle_settings import describe_idle_settings
from uefl.experiment.parsing import parse_experiments
from uefl.experiment.run import run

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
    assert sentence.startswith("uncertainty_test=standard_errors has no effect")


def test_fedbn_without_batch_norm_is_fedavg_and_the_run_says_so(tmp_path: Any) -> None:
    settings = ["fedbn", "digits", "encoder=identity", "rounds=1", "iterations=1", "epochs=1", "train_per_silo=20"]
    (experiment,) = parse_experiments(settings, [], "default").values()
    events: list[dict[str, Any]] = []
    run(experiment, tmp_path, on_event=events.append)
    messages = [event["message"] for event in events if event["kind"] == "warning"]
    assert "batch_norm=personal has no effect: the network has no batch norm" in messages
    with_norm = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    assert describe_idle_settings(FedBN(**SHORT_RUN), with_norm, make_striped_silos()) == []
