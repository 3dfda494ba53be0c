"""Which engine runs a federation in this process, where the user leaves it open."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn
from torch.func import functional_call, vmap

from uefl.engines.mapping import Mapping
from uefl.engines.serial import Serial, foreign
from uefl.engines.stacked import Stacked
from uefl.engines.stacking import fills_a_device, size_of
from uefl.errors import InputError
from uefl.federation import Silo
from uefl.local import Local

IN_PROCESS: dict[str, Callable[..., Serial]] = {
    "serial": Serial,
    "stacked": Stacked,
    "compiled": partial(Stacked, compiled=True),
}
WORTH = 8000  # steps of a run from which on it gets back the minute that compiling took


def chosen(name: str, device: str, net: nn.Module, silos: Sequence[Silo], local: Local, rounds: int) -> str:
    """The engine of this name, or for `auto` the one that measurements speak for (benchmarks/README.md)."""
    if name == "compiled" and not device.startswith("cuda"):
        raise InputError(f"engine=compiled is for CUDA devices, on {device} compiled code is slower")
    if name != "auto":
        return name
    shape = silos[0].test.x.shape[1:]
    if not device.startswith("cuda") or not mappable(net, shape):  # on CPU vmap makes convolutions slower
        return "serial"
    steps = sum(-(-len(silo.train.y) // local.batch) for silo in silos) * local.epochs * rounds
    large = fills_a_device(size_of(net, shape), local.batch)
    return "compiled" if large and steps >= WORTH else "stacked"


def mappable(net: nn.Module, shape: Sequence[int]) -> bool:
    """Whether two copies of a network run as one: anyone's network may hold what `vmap` does not know."""
    if foreign(net):
        return False
    tensors = {n: torch.stack([t.detach()] * 2) for n, t in net.state_dict().items()}
    x = next(net.parameters()).new_zeros(2, 2, *shape)
    was = net.training
    try:
        with torch.no_grad(), Mapping(convolve=False):
            vmap(lambda tensors, x: functional_call(net.train(), tensors, (x,)).logits)(tensors, x)
    except Exception:  # whatever it is: such a network runs one silo after another
        return False
    finally:
        net.train(was)
    return True
