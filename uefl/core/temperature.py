"""Temperature scaling from sums: a silo adds up its NLL at fixed temperatures, and takes the best one by validation.

Guo et al., On calibration of modern neural networks (ICML 2017), for averaged probabilities: p^(1/T), normalized.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# a geometric grid with a ratio of 1.09, and 1 in its middle
NUM_TEMPERATURES, MIN_TEMPERATURE, MAX_TEMPERATURE = 33, 0.25, 4.0
TEMPERATURES = tuple(
    MIN_TEMPERATURE * (MAX_TEMPERATURE / MIN_TEMPERATURE) ** (i / (NUM_TEMPERATURES - 1))
    for i in range(NUM_TEMPERATURES)
)
_BY_DISTANCE_FROM_1 = sorted(range(NUM_TEMPERATURES), key=lambda i: abs(math.log(TEMPERATURES[i])))


def sum_nll_by_temperature(p: Tensor, y: Tensor) -> Tensor:
    """Return the NLL of labels y [B] under probabilities p [B, C], summed over examples, at each temperature."""
    log_p = p.double().clamp_min(torch.finfo(torch.float32).tiny).log()
    steps = torch.arange(NUM_TEMPERATURES, dtype=torch.float64, device=p.device)  # no copy to the device: CUDA graphs
    temperatures = MIN_TEMPERATURE * (MAX_TEMPERATURE / MIN_TEMPERATURE) ** (steps / (NUM_TEMPERATURES - 1))
    scaled = torch.log_softmax(log_p / temperatures[:, None, None], -1)  # [temperatures, B, C]
    return -scaled.gather(-1, y.expand(len(temperatures), -1)[..., None]).sum((1, 2))


def scale_nll(validation: Tensor, test: Tensor, num_test: float) -> tuple[float, float]:
    """Return the temperature with the lowest validation NLL, and the mean test NLL at it; of equal ones, nearest 1."""
    best = min(_BY_DISTANCE_FROM_1, key=validation.tolist().__getitem__)
    return TEMPERATURES[best], float(test[best]) / max(num_test, 1)


def scale_probabilities(p: Tensor, temperature: float) -> Tensor:
    """Return probabilities [B, C] at a temperature: p^(1/T), normalized, in double precision."""
    log_p = p.double().clamp_min(torch.finfo(torch.float32).tiny).log()
    return torch.softmax(log_p / temperature, -1)


def fit_temperature(p: Tensor, y: Tensor) -> float:
    """Return the temperature at which labels y [B] are most probable; without examples, 1."""
    sums = sum_nll_by_temperature(p, y)
    return scale_nll(sums, sums, len(y))[0]
