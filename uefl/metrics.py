"""What is measured of a model at a silo: sums a client sends, and the metrics that follow from them.

Accuracy is that of the plain prediction; entropy, likelihood, Brier score and calibration are those of the averaged
sampled prediction, and its accuracy stands beside (D17).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from uefl.codebook import perplexity, usage
from uefl.federation import WORDS, Batch, Model, State
from uefl.uncertainty import brier, ece, nll, reliability, uncertainty

Metrics = dict[str, float]


def measure(model: Model, batch: Batch, passes: int) -> State:
    """Sums over a batch."""
    seen = model.call("examine", batch.x, passes)
    p = seen.logits.softmax(-1).mean(0)
    u = uncertainty(seen.samples.softmax(-1))
    n = len(batch.y)
    words = next((len(w) for name, w in model.params.items() if name.endswith(WORDS)), 0)
    sums = {
        "count": torch.tensor(float(n), device=p.device),
        "correct": (p.argmax(-1) == batch.y).sum(),
        "correct_sampled": (u.mean.argmax(-1) == batch.y).sum(),
        "entropy": u.predictive.double().sum(),
        "entropy_squared": u.predictive.double().square().sum(),
        "expected_entropy": u.expected.double().sum(),
        "nll": nll(u.mean, batch.y).double().sum(),
        "brier": brier(u.mean, batch.y).double().sum(),
        "reliability": reliability(u.mean, batch.y),
        "distance": seen.commitment.detach() * n / len(seen.chosen),  # mean squared distance to the chosen words
        "used": torch.stack([usage(i, words) for i in seen.chosen]),  # [M, V_k]
    }
    return {name: value.double() for name, value in sums.items()}


def metrics(sums: Mapping[str, Tensor]) -> Metrics:
    """From sums over a part to the numbers people read."""
    n = sums["count"].clamp_min(1)
    predictive, expected = sums["entropy"] / n, sums["expected_entropy"] / n
    return {
        "count": float(sums["count"]),
        "accuracy": float(sums["correct"] / n),
        "accuracy_sampled": float(sums["correct_sampled"] / n),
        "entropy": float(predictive),
        "entropy_variance": float((sums["entropy_squared"] / n - predictive.square()).clamp_min(0)),
        "expected_entropy": float(expected),
        "mutual_information": float((predictive - expected).clamp_min(0)),
        "nll": float(sums["nll"] / n),
        "brier": float(sums["brier"] / n),
        "ece": float(ece(sums["reliability"])),
        "distance": float(sums["distance"] / n),
        "perplexity": float(perplexity(sums["used"]).mean()) if sums["used"].numel() else 0.0,
    }


def mean_over(values: Iterable[Mapping[str, Any]], name: str) -> float:
    """Mean of one metric over silos: mA, mE, mP."""
    found = [v[name] for v in values if name in v]
    return sum(found) / len(found) if found else float("nan")
