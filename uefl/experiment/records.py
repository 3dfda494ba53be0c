"""Records: one JSON line per round, and the summary of a run that is computed from them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from uefl.algorithms.round_record import SHARED_MODEL
from uefl.core.errors import InputError
from uefl.core.metrics import (
    METRICS,
    QUALITY_METRICS,
    SCALED_METRICS,
    TABLE_METRICS,
    TWO_CLASS_METRICS,
    find_worst,
    mean_metric,
)

Record = dict[str, Any]
NUM_LAST_ROUNDS = 5
DEFAULT_AGGREGATION = f"mean of last {NUM_LAST_ROUNDS}"  # what tables show
AGGREGATIONS = ("last", DEFAULT_AGGREGATION, "best by validation")
OPTIONAL_METRICS = {*(metric.name for metric in METRICS if metric.num_classes or metric.min_examples), *SCALED_METRICS}
REPORTED_METRICS = (
    *(metric.name for metric in METRICS if metric.in_summary),
    *SCALED_METRICS,
    "code_loss",
    "num_codewords",
)


def append_records(path: Path, records: Sequence[Record]) -> None:
    """Append records and flush them to the disk, before a checkpoint relies on them."""
    with path.open("a") as file:
        for record in records:
            file.write(json.dumps(record, sort_keys=True) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_records(path: Path) -> list[Record]:
    """Read all complete lines; a line that a killed process left incomplete is dropped."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]  # text after the last line break is incomplete
    return [_parse_record(path, number, line) for number, line in enumerate(lines, 1)]


def _parse_record(path: Path, number: int, line: bytes) -> Record:
    try:
        record = json.loads(line)
        if not isinstance(record, dict):
            raise ValueError("not a table of values")
    except ValueError as e:
        raise InputError(
            f"{path} is damaged in line {number} ({e}); restore it, or move the run folder away to start again"
        ) from None
    return record


def read_first_records(path: Path, num_rounds: int) -> list[Record]:
    """Read the records of the first rounds, all of which must be there."""
    records = [record for record in read_records(path) if record.get("round", 0) <= num_rounds]
    if [record.get("round") for record in records] != [*range(1, num_rounds + 1)]:
        raise InputError(
            f"{path} is damaged (it must have one line for each of {num_rounds} rounds); restore it, or move the run "
            "folder away to start again"
        )
    return records


def summarize_records(records: Sequence[Record], domains: dict[str, str]) -> dict[str, Any]:
    """Summarize a run: last round, mean of the last five rounds, and the best round by validation accuracy.

    Of the last five, those count that were evaluated. After fine-tuning, all of them are the last round: earlier ones
    have another model than the one that is used.
    """
    rounds_of_model = records[-1:] if records[-1].get("is_fine_tuned") else records
    evaluated = [r for r in rounds_of_model if is_evaluated(r)] or records[-1:]
    validated = [r for r in rounds_of_model if not math.isnan(_validation_accuracy(r))]  # silos may miss a round
    best = max(validated or evaluated[-1:], key=lambda r: (_validation_accuracy(r), -r["round"]))
    first = records[-1]["round"] - NUM_LAST_ROUNDS + 1
    last = [r for r in validated if r["round"] >= first] or validated[-1:]
    recent = [r for r in evaluated if r["round"] >= first] or evaluated[-1:]
    aggregations = dict(zip(AGGREGATIONS, (evaluated[-1:], recent, [best])))
    return {
        "rounds": records[-1]["round"],
        "total_codewords": records[-1]["total_codewords"],
        "extensions": [summarize_decision(r) for r in records if r.get("has_decision")],
        "revocations": [summary for r in records if (summary := summarize_revocation(r))],
        "groups": records[-1].get("groups", []),
        "unlike_silos": records[-1].get("unlike_silos", []),
        "own_models": summarize_own_models(records[-1]),
        "bytes_up": sum(r["bytes_up"] for r in records),
        "bytes_down": sum(r["bytes_down"] for r in records),
        "seconds": sum(r["seconds"] for r in records),
        "kmeans_seconds": sum(r["kmeans_seconds"] for r in records),
        "validation_accuracy": sum(map(_validation_accuracy, last)) / max(len(last), 1),
        **{name: _average_rounds(rounds, domains) for name, rounds in aggregations.items()},
    }


def is_evaluated(record: Record) -> bool:
    """Return whether a silo evaluated the model of a round; with evaluate_every, not every round is."""
    return any("accuracy" in silo for silo in record["silos"].values())


def choose_aggregation(averaged_rounds: Iterable[int]) -> str:
    """Return what a table of several runs shows: the last round of all if one of them, fine-tuned, has that alone."""
    return DEFAULT_AGGREGATION if len(set(averaged_rounds)) == 1 else "last"


def describe_rounds(counts: Iterable[int]) -> str:
    """Describe over how many rounds tables average the runs: a short run has fewer than five."""
    distinct = sorted(set(counts))
    return "last round" if distinct == [1] else f"mean of last {' or '.join(map(str, distinct))} rounds"


def list_uncertain_silos(record: Record) -> list[str]:
    """Return the silos that a decision found uncertain."""
    return [name for name, silo in record["silos"].items() if silo["is_uncertain"]]


def count_new_codewords(record: Record) -> dict[str, int]:
    """Return the number of new codewords of the silos that received any."""
    return {name: silo["new_codewords"] for name, silo in record["silos"].items() if silo.get("new_codewords")}


def _validation_accuracy(record: Record) -> float:
    return mean_metric([s["validation"] for s in record["silos"].values() if "validation" in s], "accuracy")


def summarize_own_models(record: Record) -> dict[str, Any]:
    """Summarize what models of silos' own changed: the mean NLL of test examples; empty where there are none."""
    silos = [s for s in record["silos"].values() if "nll" in s and "nll" in s.get(SHARED_MODEL, {})]
    if not silos:
        return {}
    shared_nll = mean_metric([s[SHARED_MODEL] for s in silos], "nll")
    return {"num_silos": len(silos), "nll": mean_metric(silos, "nll"), "shared_nll": shared_nll}


def summarize_revocation(record: Record) -> dict[str, Any]:
    """Summarize which silos lost new codewords after a round; empty where none was validated."""
    lost = {name: silo["revoked_codewords"] for name, silo in record["silos"].items() if "revoked_codewords" in silo}
    revoked = {name: count for name, count in lost.items() if count}
    return {"round": record["round"], "num_silos": len(lost), "revoked_codewords": revoked} if lost else {}


def summarize_decision(record: Record) -> dict[str, Any]:
    """Summarize the decision of a round: the silos found, the codewords given, and what the test is based on."""
    return {
        "round": record["round"],
        "uncertain_silos": list_uncertain_silos(record),
        "new_codewords": count_new_codewords(record),
        "decision": record.get("decision", {}),
    }


def _average_rounds(rounds: Sequence[Record], domains: dict[str, str]) -> dict[str, Any]:
    """Average some rounds: the means over silos (mA, mE, mP), and every metric per silo and per domain."""
    sample = _summarize_samples(rounds)
    names = [n for n, silo in _join_silos(rounds if sample else rounds[-1:]).items() if silo.get("num_examples")]
    # A silo that joined a finished run has no earlier rounds.
    silos = {name: _mean_metrics([r["silos"][name] for r in rounds if name in r["silos"]]) for name in names}
    for name, silo in silos.items():
        if not sample:
            silo["num_codewords"] = rounds[-1]["silos"][name]["num_codewords"]  # of the last round, not a mean
    groups = {d: [silos[n] for n in names if domains[n] == d] for d in dict.fromkeys(domains[n] for n in names)}
    return {
        "round": [r["round"] for r in rounds],
        **({"sample": sample} if sample else {}),
        **{metric.label: mean_metric(silos.values(), metric.name) for metric in TABLE_METRICS},
        **_summarize_quality(silos),
        **_summarize_two_classes(silos),
        "all_silos": _mean_pooled_metrics(rounds),
        "domains": {domain: _mean_metrics(group) for domain, group in groups.items()},
        "silos": {name: {"domain": domains[name], **silo} for name, silo in silos.items()},
    }


def _join_silos(rounds: Sequence[Record]) -> Record:
    """Return the entries of all silos of some rounds, sorted by name; of a silo that has several, one with metrics."""
    entries = [entry for r in rounds for entry in r["silos"].items()]
    return dict(sorted(entries, key=lambda entry: (entry[0], "num_examples" in entry[1])))


def _summarize_samples(rounds: Sequence[Record]) -> dict[str, Any]:
    """Return how many silos measured each of these rounds, of how many; empty if all silos were asked to."""
    sampled = [r for r in rounds if "num_evaluated" in r]
    if not sampled:
        return {}
    return {"num_evaluated": [r["num_evaluated"] for r in sampled], "num_silos": sampled[-1]["num_silos"]}


def count_silos(summary: dict[str, Any]) -> int:
    """Return the number of silos of a run, of one of its aggregations over rounds."""
    return int(summary["sample"]["num_silos"] if "sample" in summary else len(summary["silos"]))


def _summarize_quality(silos: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return means over silos of the quality of uncertainty; a silo with too few examples has no calibration error."""
    metrics = [m for m in QUALITY_METRICS if any(m.name in silo for silo in silos.values())]
    return {metric.label: mean_metric(silos.values(), metric.name) for metric in metrics}


def _mean_pooled_metrics(rounds: Sequence[Record]) -> dict[str, float]:
    """Return the metrics of the test examples of all silos together."""
    pooled = [r["all_silos"] for r in rounds if "all_silos" in r]
    return {name: mean_metric(pooled, name) for name in (pooled[0] if pooled else ())}


def _summarize_two_classes(silos: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Return means over silos, and the worst silo by metric."""
    metrics = [m for m in TWO_CLASS_METRICS if any(m.name in silo for silo in silos.values())]
    if not metrics:
        return {}
    return {
        **{metric.label: mean_metric(silos.values(), metric.name) for metric in metrics},
        "worst_silos": {metric.name: find_worst(silos, metric) for metric in metrics},
    }


def _mean_metrics(rows: Sequence[Record]) -> dict[str, float]:
    """Average every metric; those of two classes or of many examples are left out where no row has them."""
    names = [name for name in REPORTED_METRICS if name not in OPTIONAL_METRICS or any(name in row for row in rows)]
    return {name: mean_metric(rows, name) for name in names}
