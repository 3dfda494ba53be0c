"""Which engine `auto` stands for. The choice itself needs no GPU."""

import pytest
import torch
from torch import Tensor, nn

from uefl import Local, Net, Silo
from uefl.engines import chosen
from uefl.errors import InputError


class Peeking(nn.Module):
    """Control flow that depends on numbers, which `vmap` does not know."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) if x.mean().item() < 1 else -x.flatten(1)


def engine(device: str, *layers: nn.Module, width: int = 4, rounds: int = 5, name: str = "auto") -> str:
    encoder = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), *layers)
    silos = [Silo.split(f"s{i}", torch.zeros(200, 1, 8, 8), torch.zeros(200).long()) for i in range(4)]
    return chosen(name, device, Net(encoder, 2, (1, 8, 8)), silos, Local(batch=64, epochs=20), rounds)


def test_a_cpu_trains_one_silo_after_another():
    assert engine("cpu") == "serial"


def test_small_networks_are_stacked_on_cuda():
    assert engine("cuda") == engine("cuda:1") == "stacked"


def test_a_network_that_fills_a_device_is_compiled_if_the_run_is_long():
    assert engine("cuda", width=6000, rounds=5) == "stacked"
    assert engine("cuda", width=6000, rounds=50) == "compiled"


@pytest.mark.parametrize("layer", [Peeking(), nn.Dropout(0.1)], ids=["control flow", "torch's dropout"])
def test_what_cannot_be_stacked_is_not(layer):
    assert engine("cuda", layer) == "serial"


def test_a_name_is_obeyed_unless_it_makes_no_sense():
    assert engine("cuda", name="serial") == "serial"
    assert engine("cpu", name="stacked") == "stacked"
    with pytest.raises(InputError, match="engine=compiled is for CUDA devices, on cpu"):
        engine("cpu", name="compiled")
