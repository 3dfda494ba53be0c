"""Records: one JSON line a round, and the summary that follows from them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from uefl.metrics import mean_over

Record = dict[str, Any]
METRICS = (
    "accuracy",
    "accuracy_sampled",
    "entropy",
    "expected_entropy",
    "mutual_information",
    "nll",
    "brier",
    "ece",
    "perplexity",
    "code_loss",
    "words",
)


def append(path: Path, records: Sequence[Record]) -> None:
    """Add lines, and have them on the disk before the checkpoint that counts on them."""
    with path.open("a") as file:
        for record in records:
            file.write(json.dumps(record, sort_keys=True) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> list[Record]:
    """All complete lines; one torn by a kill is dropped."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1]]  # what follows the last line break was never finished


def summarise(records: Sequence[Record], domains: dict[str, str]) -> dict[str, Any]:
    """What is reported of a run: last round, mean of the last five (the tables'), best by validation."""
    validated = [r for r in records if not math.isnan(_validation(r))]  # in a round of silence nobody measures
    best = max(validated or records[-1:], key=lambda r: (_validation(r), -r["round"]))
    chosen = {"last": records[-1:], "mean of last 5": records[-5:], "best by validation": [best]}
    return {
        "rounds": records[-1]["round"],
        "words_total": records[-1]["words_total"],
        "extensions": [_extension(r) for r in records if r.get("judged")],
        "bytes_up": sum(r["bytes_up"] for r in records),
        "bytes_down": sum(r["bytes_down"] for r in records),
        "seconds": sum(r["seconds"] for r in records),
        "kmeans_seconds": sum(r["kmeans_seconds"] for r in records),
        "validation_accuracy": sum(map(_validation, validated[-5:])) / max(len(validated[-5:]), 1),
        **{name: _level(rounds, domains) for name, rounds in chosen.items()},
    }


def _validation(record: Record) -> float:
    return mean_over([m["validation"] for m in record["silos"].values() if "validation" in m], "accuracy")


def _extension(record: Record) -> dict[str, Any]:
    return {
        "round": record["round"],
        "uncertain": [name for name, mine in record["silos"].items() if mine["uncertain"]],
        "new_words": {name: mine["new_words"] for name, mine in record["silos"].items() if mine["new_words"]},
    }


def _level(rounds: Sequence[Record], domains: dict[str, str]) -> dict[str, Any]:
    """mA, mE, mP, and every metric per silo and per domain, as means over some rounds."""
    names = [n for n, mine in rounds[-1]["silos"].items() if mine.get("count")]
    silos = {n: _means([r["silos"][n] for r in rounds]) for n in names}
    silos = {n: {**mine, "words": rounds[-1]["silos"][n]["words"]} for n, mine in silos.items()}  # as they ended
    groups = {d: [silos[n] for n in names if domains[n] == d] for d in dict.fromkeys(domains[n] for n in names)}
    return {
        "round": [r["round"] for r in rounds],
        "mA": mean_over(silos.values(), "accuracy"),
        "mE": mean_over(silos.values(), "entropy"),
        "mP": mean_over(silos.values(), "perplexity"),
        "domains": {d: _means(group) for d, group in groups.items()},
        "silos": {n: {"domain": domains[n], **mine} for n, mine in silos.items()},
    }


def _means(of: Sequence[Record]) -> dict[str, float]:
    return {metric: mean_over(of, metric) for metric in METRICS}
