"""Choose the engine for a run in this process if the user does not name one."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence

import torch
from torch import nn
from torch.func import functional_call, vmap
from torch.utils.flop_counter import FlopCounterMode

from uefl.core.errors import InputError
from uefl.core.federation import Silo, is_integer
from uefl.core.local import LocalTraining
from uefl.engines.processes.worker_pool import can_start_processes, choose_num_workers
from uefl.engines.serial import has_torch_dropout
from uefl.engines.stacked.stack_size import can_fill_device, count_activations
from uefl.engines.stacked.vmap_overrides import VmapOverrides

MIN_SECONDS_TO_SPREAD = 30.0  # of a run, estimated; on two idle cores, workers pay from about 11 on (docs/runs.md)
FLOPS_PER_SECOND, SECONDS_PER_STEP = 5e10, 1e-3  # of one core in the benchmark `frameworks`, for that estimate
MIN_STEPS_TO_COMPILE = 8000  # steps of a run; with fewer, compiling costs more time than it saves


def check_device(device: str) -> None:
    """Raise an error that names the available devices unless a device is one of them."""
    if device not in list_devices():
        raise InputError(f"device={device} is not available; available devices: {', '.join(list_devices())}")


def list_devices() -> list[str]:
    """Return the devices of this machine."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return ["cpu", *(["cuda"] if count else []), *(f"cuda:{i}" for i in range(count))]


def choose_engine(
    name: str,
    device: str,
    net: nn.Module,
    silos: Sequence[Silo],
    local: LocalTraining,
    total_rounds: int,
    *,
    clients_per_round: int = 0,
    num_workers: int = 0,
) -> str:
    """Return the name of the engine; `auto` becomes the engine that benchmarks favor (benchmarks/README.md)."""
    if name == "processes" and device != "cpu":
        raise InputError(f"engine=processes needs device=cpu; on {device} use auto, serial, stacked or compiled")
    if name == "compiled" and not device.startswith("cuda"):
        raise InputError(f"engine=compiled needs a CUDA device; on {device} use auto, serial, processes or stacked")
    if name != "auto":
        return name
    x = silos[0].test.x
    input_shape, input_dtype = x.shape[1:], x.dtype if is_integer(x) else None
    if not device.startswith("cuda"):  # on CPU vmap makes convolutions slower
        sizes = sorted((len(silo.train.y) for silo in silos if len(silo.train.y)), reverse=True)
        sizes = sizes[: clients_per_round or len(sizes)]
        can_spread = can_start_processes() and choose_num_workers(num_workers, len(sizes)) > 1
        may_use_cores = num_workers or not multiprocessing.parent_process()  # else the parent has other work for them
        if not can_spread or not may_use_cores:
            return "serial"
        seconds = estimate_round_seconds(net, input_shape, input_dtype, sizes, local) * total_rounds
        return "processes" if seconds >= MIN_SECONDS_TO_SPREAD else "serial"
    if not can_vmap(net, input_shape, input_dtype):
        return "serial"
    steps = sum(-(-len(silo.train.y) // local.batch_size) for silo in silos) * local.epochs * total_rounds
    fills_device = can_fill_device(count_activations(net, input_shape, input_dtype), local.batch_size)
    return "compiled" if fills_device and steps >= MIN_STEPS_TO_COMPILE else "stacked"


def estimate_round_seconds(
    net: nn.Module,
    input_shape: Sequence[int],
    input_dtype: torch.dtype | None,
    sizes: Sequence[int],
    local: LocalTraining,
) -> float:
    """Return roughly how long one core trains silos of these sizes; 0 if the network cannot be probed."""
    x = next(net.parameters()).new_zeros(1, *input_shape, dtype=input_dtype)
    training = net.training
    try:
        with torch.no_grad(), torch.random.fork_rng([]), FlopCounterMode(display=False) as counter:
            net.eval()(x)
    except Exception:  # of any kind: a network may need more than one example
        return 0.0
    finally:
        net.train(training)
    flops = 3.0 * int(counter.get_total_flops()) * sum(sizes)  # a gradient costs twice the forward pass
    steps = sum(-(-size // local.batch_size) for size in sizes)
    return local.epochs * (flops / FLOPS_PER_SECOND + steps * SECONDS_PER_STEP)


def can_vmap(net: nn.Module, input_shape: Sequence[int], input_dtype: torch.dtype | None = None) -> bool:
    """Return whether two copies of a network run under `vmap`, which does not support every operation."""
    if has_torch_dropout(net):
        return False
    tensors = {n: torch.stack([t.detach()] * 2) for n, t in net.state_dict().items()}
    x = next(net.parameters()).new_zeros(2, 2, *input_shape, dtype=input_dtype)
    training = net.training
    try:
        with torch.no_grad(), VmapOverrides(use_triton=False):
            vmap(lambda tensors, x: functional_call(net.train(), tensors, (x,)).logits)(tensors, x)
    except Exception:  # of any kind: such a network runs on the serial engine
        return False
    finally:
        net.train(training)
    return True
