"""A silo computes in the precision that the coordinator's settings ask for, or rejects the request."""

from dataclasses import replace

import pytest
import torch
from in_process_grid import InProcessGrid
from small_federation import QUICK_POLICY, make_experiment, make_grid, run_rounds

from uefl.core.errors import InputError, ResumableError
from uefl.engines.serial import SerialEngine
from uefl.flower import client
from uefl.flower.connect import connect


def make_precise_experiment(precision):
    return replace(make_experiment("fedavg", rounds=1, iterations=1), precision=precision)


def test_a_silo_without_the_hardware_for_a_precision_rejects_it(tmp_path):
    experiment = make_precise_experiment("bf16")
    with pytest.raises(ResumableError, match="precision=bf16 needs a CUDA device; allowed on cpu: float32, float64"):
        run_rounds(connect(make_grid(tmp_path), experiment, num_silos=3, policy=QUICK_POLICY), experiment)


@pytest.mark.parametrize(
    ("precision", "device", "expected"),
    [
        ("auto", "cpu", (torch.float32, "full")),
        ("float64", "cpu", (torch.float64, "full")),
        ("auto", "cuda", (torch.float32, "tf32")),
        ("float32", "cuda", (torch.float32, "full")),
        ("tf32", "cuda", (torch.float32, "tf32")),
        ("bf16", "cuda", (torch.float32, "bf16")),
    ],
)
def test_a_silo_asks_its_engine_for_the_precision_of_the_settings(precision, device, expected, tmp_path, monkeypatch):
    requested = []

    def make_engine(*args, **fields):
        requested.append((fields["dtype"], fields["matmul_precision"]))
        if device != "cpu":  # this machine may have no GPU
            raise InputError("the engine was requested")
        return SerialEngine(*args, **fields)

    monkeypatch.setattr(client, "SerialEngine", make_engine)
    nodes = {i: {"partition-id": i, "device": device} for i in range(3)}
    grid = InProcessGrid(client.make_client_app(state_folder=tmp_path), nodes)
    experiment = make_precise_experiment(precision)
    engine = connect(grid, experiment, num_silos=3, policy=QUICK_POLICY)
    if device == "cpu":
        run_rounds(engine, experiment)
    else:
        with pytest.raises(ResumableError, match="the engine was requested"):
            run_rounds(engine, experiment)
    assert set(requested) == {expected}
