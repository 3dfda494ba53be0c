"""Sentences about methods that ran on the same seeds or folds: which is ahead, and which silos are uncertain.

A record is one run: `name`, `repeat` (its seed or fold), `nll`, `accuracy` and `validation_nll` (means over silos), and
`decision`, the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any

from uefl.algorithms.uncertainty_report import NOT_COMPARABLE
from uefl.core.paired_difference import Difference, compare_pairs

Record = dict[str, Any]


def find_rival(records: Sequence[Record], method: str) -> str:
    """Return the other method with the lowest mean NLL on validation examples; test examples choose nothing."""
    scores = {name: mean(get_values(records, name, "validation_nll")) for name in list_names(records) if name != method}
    return min(scores, key=lambda name: scores[name])


def describe_verdict(records: Sequence[Record], method: str, unit: str, test_to_train: float = 0.0) -> str:
    """Return one sentence that compares a method with its best rival and claims no more than the 95 % interval."""
    rival = find_rival(records, method)
    named = f"{rival}, the best other method by validation"
    count = len(get_values(records, method, "nll"))
    if count < 2:
        nll, accuracy = (
            " and ".join(f"{get_values(records, name, key)[0]:.3f}" for name in (method, rival))
            for key in ("nll", "accuracy")
        )
        return (
            f"No difference between {method} and {named}, can be claimed from a single run each, which has no interval "
            f"(NLL {nll}, lower is better; accuracy {accuracy})."
        )
    nll_difference = compare_methods(records, method, rival, "nll", test_to_train)
    points = compare_methods(records, method, rival, "accuracy", test_to_train, scale=100)
    return (
        f"{_describe_outcome(nll_difference, method, named)}: difference {format_difference(nll_difference, 3)}, lower "
        f"is better; of accuracy {format_difference(points, 1)} points; 95 % intervals over {count} {unit}."
    )


def compare_methods(
    records: Sequence[Record], method: str, rival: str, key: str, test_to_train: float = 0.0, scale: float = 1.0
) -> Difference:
    """Return method − rival in a metric, paired by seed or fold."""
    values, reference = ([scale * v for v in get_values(records, name, key)] for name in (method, rival))
    return compare_pairs(values, reference, test_to_train)


def _describe_outcome(nll: Difference, method: str, rival: str) -> str:
    if nll.high < 0:
        return f"By NLL, {method} is ahead of {rival}"
    if nll.low > 0:
        return f"By NLL, {method} is behind {rival}"
    return f"By NLL, no difference between {method} and {rival}, can be shown"


def format_difference(difference: Difference, digits: int) -> str:
    """Format a mean difference with the ends of its interval, each with its sign."""
    center, low, high = (format_signed(value, digits) for value in difference[:3])
    return f"{center} ({low} to {high})"


def format_signed(value: float, digits: int) -> str:
    """Format a number with its sign; a number that rounds to 0 has none."""
    text = f"{value:+.{digits}f}".replace("-", "−")
    return text[1:] if not float(text[1:]) else text


def describe_uncertain_silos(records: Sequence[Record], method: str, unit: str) -> str:
    """Return one sentence on the silos that a method found uncertain at its last decision, with e_k and threshold."""
    decisions = [r["decision"] for r in records if r["name"] == method and r["decision"].get("silos")]
    if not decisions:
        return f"{method} decided nothing: no silo's uncertainty was compared."
    if decisions[0].get("test") == NOT_COMPARABLE:
        return f"{method} compared no silo's uncertainty: silos predict with tensors of their own, such as batch norm."
    beyond = " beyond chance" if decisions[0].get("test") == "permutation" else ""
    reports = {s: [d for d in decisions if s in d["uncertain_silos"]] for s in dict.fromkeys(_list_silos(decisions))}
    found = sorted((silo for silo, own in reports.items() if own), key=lambda silo: (-len(reports[silo]), silo))
    if not found:
        highest = max(reports, key=lambda silo: _average_entropy(silo, decisions))
        return (
            f"{method} found no silo more uncertain than the least uncertain one{beyond} in {len(decisions)} {unit} "
            f"(highest: {highest}, {_describe_entropy(highest, decisions)})."
        )
    listed = ", ".join(
        f"{silo} in {len(reports[silo])} of {len(decisions)} {unit} ({_describe_entropy(silo, reports[silo])})"
        for silo in found
    )
    return f"{method} found silos more uncertain than the least uncertain one{beyond}: {listed}."


def _list_silos(decisions: Sequence[Record]) -> list[str]:
    return [silo for decision in decisions for silo in decision["silos"]]


def _describe_entropy(silo: str, decisions: Sequence[Record]) -> str:
    """Return a silo's entropy and the threshold, means over these decisions."""
    threshold = mean(decision["threshold"] for decision in decisions)
    return f"entropy e_k {_average_entropy(silo, decisions):.2f}, threshold {threshold:.2f}"


def _average_entropy(silo: str, decisions: Sequence[Record]) -> float:
    entropies: list[float] = [d["silos"][silo]["entropy"] for d in decisions if silo in d["silos"]]
    return mean(entropies)


def get_values(records: Sequence[Record], name: str, key: str) -> list[float]:
    """Return the values of a method, one per seed or fold, in an order that is the same for every method."""
    return [run[key] for run in sorted(select_runs(records, name), key=lambda record: record["repeat"])]


def select_runs(records: Sequence[Record], name: str) -> list[Record]:
    """Return the runs of a method."""
    return [record for record in records if record["name"] == name]


def list_names(records: Sequence[Record]) -> list[str]:
    """Return the names of the methods in the order of the records."""
    return list(dict.fromkeys(record["name"] for record in records))
