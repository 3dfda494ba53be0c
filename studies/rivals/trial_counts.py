"""How many settings of each method have been tried on a data set, over all its tables."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence

from studies.methods.runner import RunRecord
from studies.rivals.setups import SETUPS
from studies.rivals.trials import RATES, UEFL

NO_CHOICE = ("schedule search", "Prevalence only")  # FedAvg's runs that choose the rate for all, and a fixed prediction
TITLES = {
    "mnist": "MNIST",
    "fmnist": "Fashion-MNIST",
    "heart": "Heart disease",
    "folder": "Digits of three devices",
    "gtsrb": "GTSRB",
    "pacs": "PACS",
    "cifar10": "CIFAR10",
    "cifar100": "CIFAR100",
}


def count_trials(trials: Sequence[RunRecord]) -> dict[str, dict[str, int]]:
    """Return the number of distinct settings by data set and method; the same settings in two tables count once."""
    tried: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for record in trials:
        method = record["method"].split(": ")[0].removesuffix(RATES)
        if method not in NO_CHOICE:
            settings = {n: v for n, v in record["settings"].items() if not n.startswith("data.")}
            tried[SETUPS[record["setup"]].data.name][method].add(json.dumps(settings, sort_keys=True))
    return {data: {method: len(s) for method, s in methods.items()} for data, methods in tried.items()}


def render_trial_counts(trials: Sequence[RunRecord]) -> str:
    """Render the numbers of settings that were tried on each data set."""
    lines = ["| data | UEFL | other methods |", "| --- | --- | --- |"]
    for data, counts in count_trials(trials).items():
        others = sorted(count for method, count in counts.items() if method != UEFL)
        spread = f"{others[0]} to {others[-1]}" if others[0] < others[-1] else f"{others[0]}"
        lines.append(f"| {TITLES[data]} | {counts[UEFL]} | {spread} |")
    return "\n".join(lines)
