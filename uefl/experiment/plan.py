"""What a run will do, before it starts: images, silos, weights, and an estimate of its time from two training steps."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from uefl.algorithms.fedavg import FedAvg, ensemble_cross_entropy
from uefl.core.codebook_size import CodebookSize
from uefl.core.federation import SPLITS, Silo

_FORWARD_SHARE = 1 / 3  # time of an evaluated example relative to a trained one
_NUM_PROBED = 2  # the first step also allocates


@dataclass(frozen=True)
class RunPlan:
    """Counts that tell how large a run is, and its estimated seconds."""

    num_images: int
    num_silos: int
    num_parameters: int
    num_rounds: int
    seconds: float
    codebook_size: CodebookSize | None = None


def make_plan(method: FedAvg, net: nn.Module, silos: Sequence[Silo], device: str, *, num_parallel: int = 1) -> RunPlan:
    """Count, and measure the time of a training step on a copy of the network; `num_parallel` silos run at once."""
    num_images = sum(len(silo.examples(split).y) for silo in silos for split in SPLITS)
    num_parameters = sum(parameter.numel() for parameter in net.parameters())
    num_at_once = method.clients_per_round or len(silos)
    share = -(-num_at_once // num_parallel) / num_at_once  # of the silos that one process has to run
    seconds = _measure_step(method, net, silos, device) * count_steps(method, silos) * share
    size = method.codebook_hooks.choose_size(net, [len(silo.train.y) for silo in silos])
    return RunPlan(num_images, len(silos), num_parameters, method.total_rounds, seconds, size)


def count_steps(method: FedAvg, silos: Sequence[Silo]) -> float:
    """Return the training steps of a run, with evaluations counted as a part of a step."""
    trained = sum(len(silo.train.y) for silo in silos) * method.local.epochs
    splits = (*method.eval_splits, *method.local_eval_splits)
    evaluated = sum(len(silo.examples(split).y) for silo in silos for split in splits)
    trained_share, evaluated_share = (
        min(count / len(silos), 1.0) if count else 1.0 for count in (method.clients_per_round, method.eval_clients)
    )
    examples = trained * trained_share + evaluated * evaluated_share * _FORWARD_SHARE
    return method.total_rounds * examples / method.local.batch_size


def _measure_step(method: FedAvg, net: nn.Module, silos: Sequence[Silo], device: str) -> float:
    """Return the seconds of one training step without the optimizer."""
    largest = max(silos, key=lambda silo: len(silo.train.y)).train
    size = min(method.local.batch_size, len(largest.y))
    probe = copy.deepcopy(net).to(device).train()
    x, y = largest.x[:size].to(device), largest.y[:size].to(device)
    params = [parameter for parameter in probe.parameters() if parameter.requires_grad]
    seconds = 0.0
    with torch.random.fork_rng([device] if device.startswith("cuda") else []):
        for _ in range(_NUM_PROBED):
            started = time.perf_counter()
            torch.autograd.grad(ensemble_cross_entropy(probe(x).logits, y), params, allow_unused=True)
            if device.startswith("cuda"):
                torch.cuda.synchronize(device)
            seconds = time.perf_counter() - started
    return seconds * method.local.batch_size / size


def describe_seconds(seconds: float) -> str:
    """Return a time in the unit that fits."""
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
