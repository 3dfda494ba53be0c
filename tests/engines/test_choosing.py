"""Which engine `auto` chooses. The choice itself needs no GPU."""

import pytest
import torch
from torch import Tensor, nn

from uefl.core.errors import InputError
from uefl.core.federation import Silo
from uefl.core.local import LocalTraining
from uefl.engines.choosing import choose_engine
from uefl.models.network import Net


class DataDependentLayer(nn.Module):
    """Control flow that depends on values, which `vmap` does not support."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) if x.mean().item() < 1 else -x.flatten(1)


def choose(device: str, *layers: nn.Module, width: int = 4, rounds: int = 5, name: str = "auto") -> str:
    encoder = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), *layers)
    silos = [Silo.from_tensors(f"s{i}", torch.zeros(200, 1, 8, 8), torch.zeros(200).long()) for i in range(4)]
    local = LocalTraining(batch_size=64, epochs=20)
    return choose_engine(name, device, Net(encoder, 2, (1, 8, 8)), silos, local, rounds)


def test_a_cpu_uses_the_serial_engine():
    assert choose("cpu") == "serial"


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
    with pytest.raises(InputError, match="engine=compiled needs a CUDA device; on cpu use auto, serial or stacked"):
        choose("cpu", name="compiled")
