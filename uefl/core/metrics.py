"""Metrics of a model at a silo. A client sends sums over its examples; every metric is computed from these sums.

One entry of `METRICS` defines a metric for all uses: sums, value, summaries, tables, figures and studies. Accuracy is
that of the prediction without dropout; entropy, likelihood, Brier score and calibration are those of the averaged
sampled prediction (D17).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from uefl.core.codebook import count_codewords, perplexity
from uefl.core.federation import Batch, ClientModel, Tensors, is_codeword_tensor
from uefl.core.uncertainty import Uncertainty, brier_score, compute_uncertainty, ece, nll, reliability_sums

Metrics = dict[str, float]


class BatchOutputs(NamedTuple):
    """The outputs of a client's model for one batch. M is 1, or the size of an ensemble."""

    y: Tensor  # [B] labels
    probabilities: Tensor  # [B, C] prediction without dropout
    uncertainty: Uncertainty  # of the sampled predictions
    commitment_loss: Tensor  # mean squared distance of features to their codewords, summed over M
    codeword_indices: Tensor  # [M, B, l, s]
    num_codewords: int


Sums = Mapping[str, Tensor]
SumFunction = Callable[[BatchOutputs], Tensor]


def _mean(name: str) -> Callable[[Sums], Tensor]:
    """Return a function that divides a sum by the number of examples."""
    return lambda sums: sums[name] / sums["num_examples"].clamp_min(1)


@dataclass(frozen=True)
class Metric:
    """A number per silo, computed from sums over its examples."""

    name: str  # key in records and summaries
    description: str  # noun phrase
    value: Callable[[Sums], Tensor]
    sums: Mapping[str, SumFunction] = field(default_factory=dict)  # what a client computes per batch; shared by name
    label: str = ""  # of the mean over silos in tables, such as mA; empty: not shown in tables
    column: str = ""  # heading of a table's column
    digits: int = 3  # decimals in tables
    better: Literal["higher", "lower", ""] = ""
    requires_codebook: bool = False  # shown only for methods with a codebook
    in_summary: bool = True


METRICS = (
    Metric(
        "accuracy",
        "accuracy",
        _mean("correct"),
        {"correct": lambda b: (b.probabilities.argmax(-1) == b.y).sum()},
        label="mA",
        column="acc.",
        better="higher",
    ),
    Metric(
        "accuracy_sampled",
        "accuracy of the averaged sampled prediction",
        _mean("correct_sampled"),
        {"correct_sampled": lambda b: (b.uncertainty.mean.argmax(-1) == b.y).sum()},
        better="higher",
    ),
    Metric(
        "entropy",
        "predictive entropy",
        _mean("entropy"),
        {"entropy": lambda b: b.uncertainty.predictive_entropy.double().sum()},
        label="mE",
        column="entropy",
        better="lower",
    ),
    Metric(
        "entropy_variance",
        "variance of the predictive entropy over examples",
        lambda sums: (_mean("entropy_squared")(sums) - _mean("entropy")(sums).square()).clamp_min(0),
        {"entropy_squared": lambda b: b.uncertainty.predictive_entropy.double().square().sum()},
        in_summary=False,
    ),
    Metric(
        "expected_entropy",
        "mean entropy of the sampled predictions",
        _mean("expected_entropy"),
        {"expected_entropy": lambda b: b.uncertainty.expected_entropy.double().sum()},
        better="lower",
    ),
    Metric(
        "mutual_information",
        "mutual information between prediction and model",
        lambda sums: (_mean("entropy")(sums) - _mean("expected_entropy")(sums)).clamp_min(0),
        better="lower",
    ),
    Metric(
        "nll",
        "negative log-likelihood of the labels",
        _mean("nll"),
        {"nll": lambda b: nll(b.uncertainty.mean, b.y).double().sum()},
        better="lower",
    ),
    Metric(
        "brier",
        "Brier score",
        _mean("brier"),
        {"brier": lambda b: brier_score(b.uncertainty.mean, b.y).double().sum()},
        better="lower",
    ),
    Metric(
        "ece",
        "expected calibration error",
        lambda sums: ece(sums["reliability"]),
        {"reliability": lambda b: reliability_sums(b.uncertainty.mean, b.y)},
        better="lower",
    ),
    Metric(
        "quantization_error",
        "mean squared distance of features to their codewords",
        _mean("quantization_error"),
        {"quantization_error": lambda b: b.commitment_loss * len(b.y) / len(b.codeword_indices)},
        better="lower",
        in_summary=False,
    ),
    Metric(
        "perplexity",
        "perplexity of codeword use",
        lambda sums: perplexity(sums["codeword_counts"]).mean() if sums["codeword_counts"].numel() else torch.zeros(()),
        {"codeword_counts": lambda b: torch.stack([count_codewords(i, b.num_codewords) for i in b.codeword_indices])},
        label="mP",
        column="perpl.",
        digits=0,
        requires_codebook=True,
    ),
)
TABLE_METRICS = tuple(metric for metric in METRICS if metric.label)


def compute_metric_sums(model: ClientModel, batch: Batch, mc_samples: int) -> Tensors:
    """Compute the sums of all metrics over a batch."""
    prediction = model.call("predict_with_samples", batch.x, mc_samples)
    outputs = BatchOutputs(
        batch.y,
        prediction.logits.softmax(-1).mean(0),
        compute_uncertainty(prediction.sampled_logits.softmax(-1)),
        prediction.commitment_loss.detach(),
        prediction.codeword_indices,
        next((len(codewords) for name, codewords in model.params.items() if is_codeword_tensor(name)), 0),
    )
    sums = {"num_examples": torch.tensor(float(len(batch.y)), device=outputs.probabilities.device)}
    for metric in METRICS:
        sums |= {name: compute(outputs) for name, compute in metric.sums.items()}
    return {name: value.double() for name, value in sums.items()}


def compute_metrics(sums: Sums) -> Metrics:
    """Compute all metrics from the sums over a split."""
    values = {metric.name: float(metric.value(sums)) for metric in METRICS}
    return {"num_examples": float(sums["num_examples"]), **values}


def mean_metric(rows: Iterable[Mapping[str, Any]], name: str) -> float:
    """Return the mean of a metric over the silos that have it."""
    values = [row[name] for row in rows if name in row]
    return sum(values) / len(values) if values else float("nan")


def describe_means(*, with_codebook: bool) -> str:
    """Explain the labels of the means over silos in one line."""
    parts: list[str] = []
    for metric in select_table_metrics(with_codebook=with_codebook):
        direction = f" ({metric.better} is better)" if metric.better else ""
        parts.append(f"{metric.label}: mean {metric.description}{'' if parts else ' over silos'}{direction}")
    return "; ".join(parts)


def select_table_metrics(*, with_codebook: bool) -> list[Metric]:
    """Return the metrics that tables show for methods with or without a codebook."""
    return [metric for metric in TABLE_METRICS if with_codebook or not metric.requires_codebook]
