"""A small federation over the in-process grid, and the same federation in the serial engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from in_process_grid import InProcessGrid

from uefl.algorithms import METHODS
from uefl.core.federation import Clients, ServerState
from uefl.core.local import LocalTraining
from uefl.data.config import DataConfig
from uefl.engines.serial import SerialEngine
from uefl.experiment.experiment import DTYPES, Experiment
from uefl.experiment.rounds import iterate_rounds
from uefl.flower.client import make_client_app
from uefl.flower.connect import connect
from uefl.flower.engine import FlowerEngine
from uefl.flower.node_data import load_data_once
from uefl.flower.silo_registry import RoundPolicy, SiloListener
from uefl.models.model_config import ModelConfig

QUICK_POLICY = RoundPolicy(connect_timeout=0.2, reply_timeout=0.2, poll_interval=0.01, retries=1)
SILOS = ("D1-1", "D2-1", "D3-1")


def make_experiment(method_name: str = "uefl", **fields: Any) -> Experiment:
    """Three silos with dropout, and an extension of the codebook for all silos but the least uncertain one."""
    method_class = METHODS[method_name]
    defaults: dict[str, Any] = {"rounds": 2, "extra_rounds": 1, "iterations": 2, "mc_samples": 3}
    defaults["local"] = method_class().adapt_local_training(LocalTraining(batch_size=16))
    codebook = method_class().codebook
    if codebook:
        defaults["codebook"] = replace(codebook, num_codewords=8, warmup_rounds=1, gamma=0.0, min_standard_errors=0.0)
    return Experiment(
        method=method_class(**{**defaults, **fields}),
        data=DataConfig(
            train_per_silo=24,
            test_per_silo=12,
            num_silos=(1, 1, 1),
            image_size=14,
            public_images=30 if method_class.needs_public_images else 0,
        ),
        model=ModelConfig(width=4, hidden_size=16),
        precision="float64",
    )


def make_grid(state_folder: Path) -> InProcessGrid:
    """Three nodes whose ids do not reveal which silo they are."""
    return InProcessGrid(make_client_app(state_folder=state_folder), {90 - i: {"partition-id": i} for i in range(3)})


def make_flower_engine(
    grid: InProcessGrid,
    experiment: Experiment,
    *,
    policy: RoundPolicy = QUICK_POLICY,
    on_silo_event: SiloListener = lambda _silo, _activity: None,
) -> FlowerEngine:
    return connect(grid, experiment, num_silos=3, policy=policy, on_silo_event=on_silo_event)


def make_serial_engine(experiment: Experiment) -> SerialEngine:
    silos, images = load_data_once(experiment.data, experiment.seed)
    net = experiment.build_network(tuple(silos[0].test.x.shape[1:]), len(images.classes))
    return SerialEngine(silos, net, seed=experiment.seed, dtype=DTYPES[experiment.precision])


def run_rounds(
    clients: Clients, experiment: Experiment, server: ServerState | None = None
) -> tuple[ServerState, list[dict[str, Any]]]:
    """Run all rounds; return the final state and the records."""
    states = list(iterate_rounds(experiment.method, clients, server))
    return states[-1], [record for state in states for record in state.completed_records]


def drop_seconds(value: Any) -> Any:
    """Return a record without measured times, the only values in which two engines may differ."""
    if not isinstance(value, dict):
        return value
    return {name: drop_seconds(inner) for name, inner in value.items() if "seconds" not in name}


def max_difference(one: ServerState, other: ServerState) -> float:
    """Return the largest difference between two models."""
    assert one.model_state.keys() == other.model_state.keys()
    differences = [(one.model_state[n].double() - other.model_state[n].double()).abs() for n in one.model_state]
    return float(torch.cat([d.flatten() for d in differences]).max()) if differences else 0.0
