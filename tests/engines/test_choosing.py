"""Which engine `auto` chooses. The choice itself needs no GPU."""

import multiprocessing

import pytest
import torch
from torch import Tensor, nn

from uefl.core.errors import InputError
from uefl.core.federation import Silo
from uefl.core.local import LocalTraining
from uefl.engines.choosing import choose_engine
from uefl.engines.processes import worker_pool
from uefl.models.network import Net


class DataDependentLayer(nn.Module):
    """Control flow that depends on values, which `vmap` does not support."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) if x.mean().item() < 1 else -x.flatten(1)


def choose(
    device: str,
    *layers: nn.Module,
    width: int = 4,
    rounds: int = 5,
    name: str = "auto",
    lazy: bool = False,
    **numbers: int,
) -> str:
    encoder = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), *layers)
    x, y = torch.zeros(200, 1, 8, 8), torch.zeros(200).long()
    silos = [Silo.from_tensors(f"s{i}", x, y, lazy=lazy) for i in range(4)]
    local = LocalTraining(batch_size=64, epochs=20)
    return choose_engine(name, device, Net(encoder, 2, (1, 8, 8)), silos, local, rounds, **numbers)


@pytest.fixture
def four_cores(monkeypatch):
    monkeypatch.setattr(worker_pool, "count_cores", lambda: 4)


@pytest.mark.usefixtures("four_cores")
@pytest.mark.parametrize("lazy", [False, True], ids=["in memory", "in a file"])
def test_a_long_run_on_a_cpu_is_spread_over_processes(lazy):
    steps, examples = 4 * 3 * 20, 4 * 144 * 20  # of a round: silos, steps or examples of one, epochs
    flops_per_example = 2 * (64 * 4 * 9 + 256 * 512 + 512 * 2)  # of a forward pass: convolution and two layers
    rounds = int(30 / (steps * 1e-3 + 3 * flops_per_example * examples / 5e10))
    assert choose("cpu", rounds=rounds, lazy=lazy) == "serial"
    assert choose("cpu", rounds=rounds + 1, lazy=lazy) == "processes"
    assert choose("cpu", width=5, rounds=rounds, lazy=lazy) == "processes", "a larger network takes longer"
    assert choose("cpu", rounds=rounds + 1, lazy=lazy, clients_per_round=3) == "serial", "fewer silos take less time"


@pytest.mark.usefixtures("four_cores")
def test_a_run_is_spread_only_over_idle_cores(monkeypatch):
    assert choose("cpu", rounds=1000, clients_per_round=1) == "serial", "a single silo per round"
    assert choose("cpu", rounds=1000, num_workers=1) == "serial", "as the user sets it"
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())
    assert choose("cpu", rounds=1000) == "serial", "a process whose parent may have other work for the cores"
    assert choose("cpu", rounds=1000, num_workers=2) == "processes", "a run of a comparison, with its share"
    assert choose("cpu", rounds=1000, num_workers=1) == "serial", "a run whose share is one core"
    assert choose("cpu", rounds=1000, num_workers=2, clients_per_round=1) == "serial", "a single silo per round"
    monkeypatch.undo()
    monkeypatch.setattr(worker_pool, "count_cores", lambda: 1)
    assert choose("cpu", rounds=1000) == "serial"


@pytest.mark.usefixtures("four_cores")
def test_a_system_that_cannot_share_memory_uses_the_serial_engine(monkeypatch):
    monkeypatch.setattr("uefl.engines.choosing.can_start_processes", lambda: False)
    assert choose("cpu", rounds=1000) == "serial"


def test_small_networks_are_stacked_on_cuda():
    assert choose("cuda") == choose("cuda:1") == "stacked"


def test_a_network_that_fills_a_device_is_compiled_if_the_run_is_long():
    assert choose("cuda", width=6000, rounds=5) == "stacked"
    assert choose("cuda", width=6000, rounds=50) == "compiled"


@pytest.mark.parametrize(
    "layer", [DataDependentLayer(), nn.Dropout(0.1)], ids=["data-dependent control flow", "torch's dropout"]
)
def test_networks_that_cannot_be_stacked_use_the_serial_engine(layer):
    assert choose("cuda", layer) == "serial"


def test_a_named_engine_is_used_unless_the_device_does_not_support_it():
    assert choose("cuda", name="serial") == "serial"
    assert choose("cpu", name="stacked") == "stacked"
    assert choose("cpu", name="processes") == "processes"
    with pytest.raises(
        InputError, match="engine=compiled needs a CUDA device; on cpu use auto, serial, processes or stacked"
    ):
        choose("cpu", name="compiled")
    with pytest.raises(
        InputError, match="engine=processes needs device=cpu; on cuda use auto, serial, stacked or comp"
    ):
        choose("cuda", name="processes")
