"""Metrics of a model at a silo. A client sends sums over its examples; every metric is computed from these sums.

One entry of `METRICS` defines a metric for all uses: sums, value, summaries, tables, figures and studies. Accuracy is
that of the prediction without dropout; entropy, likelihood, Brier score and calibration are those of the averaged
sampled prediction (D17).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from uefl.core.codebook import count_codewords, perplexity
from uefl.core.discrimination import Estimate, auprc, auroc, count_scores, has_both_classes, sensitivity_at
from uefl.core.entropy_comparison import count_entropies
from uefl.core.federation import Batch, ClientModel, Tensors, is_codeword_tensor
from uefl.core.label_prior import adjust_logits
from uefl.core.selective_risk import augrc, count_outcomes, risks_at_coverages
from uefl.core.temperature import scale_nll, sum_nll_by_temperature
from uefl.core.uncertainty import Uncertainty, brier_score, compute_uncertainty, ece, nll, reliability_sums

Metrics = dict[str, float]
NLL_BY_TEMPERATURE = "nll_by_temperature"  # sum: NLL at fixed temperatures
SCORE_COUNTS = "score_counts"  # sum: examples by class and score, for two classes
ENTROPY_COUNTS = "entropy_counts"  # sum: examples by entropy, for the comparison of silos
OUTCOME_COUNTS = "outcome_counts"  # sum: examples by correctness and entropy
CODEWORD_COUNTS = "codeword_counts"  # sum: features by codeword
SPECIFICITY = "specificity"
DEFAULT_SPECIFICITY = 0.9
MIN_CALIBRATION_EXAMPLES = 500  # with fewer, the expected calibration error is mostly noise
SCALED_METRICS = ("temperature", "nll_scaled")  # of silos that have validation examples
RISK_COVERAGES = (10, 20, 30, 40, 50, 60, 70, 80, 90, 100)  # per cent; the points of the risk-coverage curve


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


def _mean(name: str) -> Callable[[Sums], float]:
    """Return a function that divides a sum by the number of examples; with numbers, since tensors take much longer."""
    return lambda sums: float(sums[name]) / max(float(sums["num_examples"]), 1.0)


@dataclass(frozen=True)
class Metric:
    """A number per silo, computed from sums over its examples."""

    name: str  # key in records and summaries
    description: str  # noun phrase
    value: Callable[[Sums], Tensor | float]
    sums: Mapping[str, SumFunction] = field(default_factory=dict)  # what a client computes per batch; shared by name
    label: str = ""  # of the mean over silos in tables, such as mA; empty: not shown in tables
    column: str = ""  # heading of a table's column
    digits: int = 3  # decimals in tables
    better: Literal["higher", "lower", ""] = ""
    note: str = ""  # in place of the direction, where neither is better by itself
    is_quality: bool = False  # measures the quality of uncertainty: has a table of its own, also for all silos together
    min_examples: int = 0  # defined only for at least this many examples
    requires_codebook: bool = False  # shown only for methods with a codebook
    in_summary: bool = True
    num_classes: int = 0  # defined only for this number of classes and test examples of each; 0: always


def _make_two_class_metrics(
    name: str,
    description: str,
    estimate: Callable[[Sums], Estimate],
    *,
    label: str,
    column: str,
    sums: Mapping[str, SumFunction] | None = None,
) -> tuple[Metric, Metric, Metric]:
    """Return a metric of two classes and the ends of its interval of 95 %; all use the score counts."""
    value = Metric(
        name, description, lambda s: estimate(s).value, sums or {}, label, column, better="higher", num_classes=2
    )
    low = replace(value, name=f"{name}_low", value=lambda s: estimate(s).low, sums={}, label="", column="", better="")
    return value, low, replace(low, name=f"{name}_high", value=lambda s: estimate(s).high)


def _count_outcomes(b: BatchOutputs) -> Tensor:
    """Count examples by whether the averaged sampled prediction is correct, and by its entropy."""
    p = b.uncertainty.mean
    return count_outcomes(b.uncertainty.predictive_entropy, p.argmax(-1) == b.y, p.shape[-1])


def _make_risk_metric(index: int) -> Metric:
    """Return the point of the risk-coverage curve at which this share of the examples is accepted."""
    percent, coverages = RISK_COVERAGES[index], tuple(percent / 100 for percent in RISK_COVERAGES)
    return Metric(
        f"risk_at_{percent}",
        f"error rate of the {percent} % most certain predictions",
        lambda sums: risks_at_coverages(sums[OUTCOME_COUNTS], coverages)[index],
        better="lower",
        is_quality=True,
    )


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
        {
            "entropy": lambda b: b.uncertainty.predictive_entropy.double().sum(),
            ENTROPY_COUNTS: lambda b: count_entropies(b.uncertainty.predictive_entropy, b.probabilities.shape[-1]),
        },
        label="mE",
        column="entropy",
        note="lower is more certain, which is good only together with accuracy, NLL and AUGRC",
    ),
    Metric(
        "entropy_variance",
        "variance of the predictive entropy over examples",
        lambda sums: max(_mean("entropy_squared")(sums) - _mean("entropy")(sums) * _mean("entropy")(sums), 0.0),
        {"entropy_squared": lambda b: b.uncertainty.predictive_entropy.double().square().sum()},
        in_summary=False,
    ),
    Metric(
        "expected_entropy",
        "mean entropy of the sampled predictions",
        _mean("expected_entropy"),
        {"expected_entropy": lambda b: b.uncertainty.expected_entropy.double().sum()},
    ),
    Metric(
        "mutual_information",
        "mutual information between prediction and model",
        lambda sums: max(_mean("entropy")(sums) - _mean("expected_entropy")(sums), 0.0),
    ),
    Metric(
        "nll",
        "negative log-likelihood of the labels",
        _mean("nll"),
        {
            "nll": lambda b: nll(b.uncertainty.mean, b.y).double().sum(),
            NLL_BY_TEMPERATURE: lambda b: sum_nll_by_temperature(b.uncertainty.mean, b.y),
        },
        label="mNLL",
        column="NLL",
        better="lower",
        is_quality=True,
    ),
    Metric(
        "brier",
        "Brier score",
        _mean("brier"),
        {"brier": lambda b: brier_score(b.uncertainty.mean, b.y).double().sum()},
        label="mBrier",
        column="Brier",
        better="lower",
        is_quality=True,
    ),
    Metric(
        "ece",
        "expected calibration error",
        lambda sums: ece(sums["reliability"]),
        {"reliability": lambda b: reliability_sums(b.uncertainty.mean, b.y)},
        label="mECE",
        column="ECE",
        better="lower",
        is_quality=True,
        min_examples=MIN_CALIBRATION_EXAMPLES,
    ),
    Metric(
        "augrc",
        "area under the generalized risk-coverage curve",
        lambda sums: augrc(sums[OUTCOME_COUNTS]),
        {OUTCOME_COUNTS: _count_outcomes},
        label="mAUGRC",
        column="AUGRC",
        digits=4,
        better="lower",
        is_quality=True,
    ),
    *map(_make_risk_metric, range(len(RISK_COVERAGES))),
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
        lambda sums: perplexity(sums[CODEWORD_COUNTS]).mean() if sums[CODEWORD_COUNTS].numel() else torch.zeros(()),
        {CODEWORD_COUNTS: lambda b: torch.stack([count_codewords(i, b.num_codewords) for i in b.codeword_indices])},
        label="mP",
        column="perpl.",
        digits=0,
        requires_codebook=True,
    ),
    *_make_two_class_metrics(
        "auroc",
        "area under the ROC curve",
        lambda s: auroc(s[SCORE_COUNTS]),
        label="mAUROC",
        column="AUROC",
        sums={SCORE_COUNTS: lambda b: count_scores(b.probabilities, b.y)},
    ),
    *_make_two_class_metrics(
        "auprc", "average precision", lambda s: auprc(s[SCORE_COUNTS]), label="mAUPRC", column="AUPRC"
    ),
    *_make_two_class_metrics(
        "sensitivity",
        "sensitivity at the set specificity",
        lambda s: sensitivity_at(s[SCORE_COUNTS], float(s[SPECIFICITY])),
        label="mSens",
        column="sens.",
    ),
)
_SHOWN = tuple(metric for metric in METRICS if metric.label)
TABLE_METRICS = tuple(metric for metric in _SHOWN if not metric.num_classes and not metric.is_quality)
QUALITY_METRICS = tuple(metric for metric in _SHOWN if metric.is_quality)
TWO_CLASS_METRICS = tuple(metric for metric in _SHOWN if metric.num_classes == 2)


def compute_metric_sums(model: ClientModel, batch: Batch, mc_samples: int) -> Tensors:
    """Compute the sums of all metrics over a batch."""
    prediction = model.call("predict_with_samples", batch.x, mc_samples)
    outputs = BatchOutputs(
        batch.y,
        adjust_logits(model, prediction.logits).softmax(-1).mean(0),
        compute_uncertainty(adjust_logits(model, prediction.sampled_logits).softmax(-1)),
        prediction.commitment_loss.detach(),
        prediction.codeword_indices,
        next((len(codewords) for name, codewords in model.params.items() if is_codeword_tensor(name)), 0),
    )
    sums = {"num_examples": torch.tensor(float(len(batch.y)), device=outputs.probabilities.device)}
    for metric in METRICS:
        if metric.num_classes in (0, outputs.probabilities.shape[-1]):
            sums |= {name: compute(outputs) for name, compute in metric.sums.items()}
    return {name: value.double() for name, value in sums.items()}


def compute_metrics(sums: Sums, specificity: float = DEFAULT_SPECIFICITY) -> Metrics:
    """Compute all metrics from the sums over a split; those of two classes only where both classes occur."""
    num_examples = float(sums["num_examples"])
    defined = [metric for metric in METRICS if not metric.num_classes and num_examples >= metric.min_examples]
    values = {metric.name: float(metric.value(sums)) for metric in defined}
    return {"num_examples": num_examples, **values, **compute_two_class_metrics(sums, specificity)}


def compute_metric(name: str, sums: Sums) -> float:
    """Compute one metric that is always defined; all of them take longer."""
    return float(next(metric for metric in METRICS if metric.name == name).value(sums))


def compute_pooled_metrics(silos: Sequence[Sums], specificity: float = DEFAULT_SPECIFICITY) -> Metrics:
    """Compute the quality of uncertainty, and the metrics of two classes, of the examples of all silos together."""
    if not silos:
        return {}
    # Silos have different codewords, so the counts of their use do not add up; no metric here needs them.
    names = [name for name in silos[0] if all(name in sums for sums in silos) and name != CODEWORD_COUNTS]
    pooled = {name: torch.stack([sums[name].cpu() for sums in silos]).sum(0) for name in names}
    num_examples = float(pooled["num_examples"])
    quality = [metric for metric in METRICS if metric.is_quality and num_examples >= metric.min_examples]
    values = {metric.name: float(metric.value(pooled)) for metric in quality}
    return {"num_examples": num_examples, **values, **compute_two_class_metrics(pooled, specificity)}


def sum_reliability(silos: Sequence[Sums]) -> list[list[float]]:
    """Return examples, confidence and correct predictions by bin of confidence, of the examples of all silos."""
    pooled = [sums["reliability"].cpu() for sums in silos if "reliability" in sums]
    return torch.stack(pooled).sum(0).tolist() if pooled else []


def find_histogram_error(answer: Sums) -> str:
    """Return which histogram of an answer does not count every example once, or an empty string.

    The server repeats values by these counts, so wrong ones could exhaust its memory.
    """
    for name in (ENTROPY_COUNTS, OUTCOME_COUNTS, SCORE_COUNTS):
        if name in answer and (bool((answer[name] < 0).any()) or answer[name].sum() != answer["num_examples"]):
            return f"{name} does not add up to {float(answer['num_examples']):g} examples"
    return ""


def compute_two_class_metrics(sums: Sums, specificity: float = DEFAULT_SPECIFICITY) -> Metrics:
    """Compute the metrics of two classes where both occur."""
    if SCORE_COUNTS not in sums or not has_both_classes(sums[SCORE_COUNTS]):
        return {}
    sums = {**sums, SPECIFICITY: torch.tensor(specificity, dtype=torch.float64)}
    return {metric.name: float(metric.value(sums)) for metric in METRICS if metric.num_classes == 2}


def compute_scaled_nll(validation: Sums, test: Sums) -> Metrics:
    """Return a silo's temperature by its validation examples, and the NLL of its test examples at it."""
    if NLL_BY_TEMPERATURE not in validation or NLL_BY_TEMPERATURE not in test or not float(validation["num_examples"]):
        return {}
    sums = validation[NLL_BY_TEMPERATURE], test[NLL_BY_TEMPERATURE]
    temperature, value = scale_nll(*sums, float(test["num_examples"]))
    return dict(zip(SCALED_METRICS, (temperature, value)))


def find_worst(rows: Mapping[str, Mapping[str, Any]], metric: Metric) -> str:
    """Return the name of the row with the worst value of a metric, or an empty text if no row has it."""
    worst = min if metric.better == "higher" else max
    names = [name for name, row in rows.items() if metric.name in row]
    return worst(names, key=lambda name: rows[name][metric.name]) if names else ""


def mean_metric(rows: Iterable[Mapping[str, Any]], name: str) -> float:
    """Return the mean of a metric over the silos that have it."""
    values = [row[name] for row in rows if name in row]
    return sum(values) / len(values) if values else float("nan")


def describe_means(*, with_codebook: bool, two_classes: bool = False) -> str:
    """Explain the labels of the means over silos in one line."""
    return describe_labels(select_table_metrics(with_codebook=with_codebook, two_classes=two_classes))


def describe_labels(metrics: Iterable[Metric]) -> str:
    """Explain the labels of means over silos of these metrics in one line."""
    parts: list[str] = []
    for metric in metrics:
        over = "" if parts else " over silos"
        parts.append(f"{metric.label}: mean {metric.description}{over}{_describe_direction(metric)}")
    return "; ".join(parts)


def describe_columns(metrics: Iterable[Metric] = QUALITY_METRICS) -> str:
    """Explain columns in one line, by default those of the table of the quality of uncertainty."""
    return "; ".join(f"{m.column}: {m.description}{_describe_direction(m)}" for m in metrics)


def _describe_direction(metric: Metric) -> str:
    """Return in brackets which direction is better, and how many examples the metric needs."""
    parts = [metric.note or (f"{metric.better} is better" if metric.better else "")]
    if metric.min_examples:
        parts.append(f"– for fewer than {metric.min_examples} test examples, which are too few for it")
    text = "; ".join(filter(None, parts))
    return f" ({text})" if text else ""


def select_table_metrics(*, with_codebook: bool, two_classes: bool = False) -> list[Metric]:
    """Return the metrics that tables show for methods with or without a codebook, and for two classes."""
    metrics = [metric for metric in TABLE_METRICS if with_codebook or not metric.requires_codebook]
    return [*metrics, *(TWO_CLASS_METRICS if two_classes else ())]
