"""The record of a round: started after training, completed when the silos have evaluated the round's model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from uefl.core.federation import Evaluations, Reply, ServerState, Tensors
from uefl.core.metrics import (
    compute_metric,
    compute_metrics,
    compute_pooled_metrics,
    compute_scaled_nll,
    sum_reliability,
)

if TYPE_CHECKING:
    from uefl.algorithms.uncertainty_report import UncertaintyReport

SHARED_MODEL = "shared"  # entry of a silo: metrics of the model that all share, where the others are of its own


def start_record(server: ServerState, replies: Sequence[Reply], seconds: float) -> dict[str, Any]:
    """Return the record of a round before its model is evaluated.

    Without codewords, it has an entry per silo that takes part; others get theirs if they measure the model.
    """
    num_codewords = server.access.sum(1).tolist() if server.access.shape[1] else ()
    silos = {name: start_entry(v) for name, v in zip(server.silo_names, num_codewords)}
    for reply in replies:
        silos[reply.silo_name] = silos.get(reply.silo_name, start_entry()) | _describe_reply(reply)
    return {
        "round": server.round,
        "iteration": server.iteration,
        "participants": sorted(r.silo_name for r in replies),
        "total_codewords": server.access.shape[1],
        **_sum_cost(replies, seconds),
        "kmeans_seconds": 0.0,
        "silos": silos,
    }


def start_entry(num_codewords: int = 0) -> dict[str, Any]:
    """Return the entry of a silo in a record before anything happened to it."""
    return {"num_codewords": num_codewords, "is_uncertain": False}


def record_sample(server: ServerState, num_evaluated: int) -> ServerState:
    """Add to the open record how many silos measured its model, of how many."""
    sample = {"num_evaluated": num_evaluated, "num_silos": len(server.silo_names)}
    return server.replace(open_record={**server.open_record, **sample})


def record_kmeans_time(server: ServerState, seconds: float, **entries: Any) -> ServerState:
    """Add K-means time, and further entries, to the open record."""
    earlier = server.open_record.get("kmeans_seconds", 0.0)
    return server.replace(open_record={**server.open_record, "kmeans_seconds": earlier + seconds, **entries})


def record_query_cost(server: ServerState, replies: Sequence[Reply], seconds: float) -> ServerState:
    """Add the cost of a query outside the training message to the open record."""
    cost = {name: server.open_record.get(name, 0) + more for name, more in _sum_cost(replies, seconds).items()}
    return server.replace(open_record={**server.open_record, **cost})


def record_rejections(server: ServerState, replies: Sequence[Reply]) -> ServerState:
    """Add to the open record why replies after the last round are not used."""
    reasons = {r.silo_name: {"rejected": r.rejected} for r in replies if r.rejected}
    silos = dict(server.open_record["silos"])
    for name, reason in reasons.items():
        silos[name] = silos.get(name, start_entry()) | reason
    return server.replace(open_record={**server.open_record, "silos": silos})


def record_shared_model(
    server: ServerState, replies: Sequence[Reply], code_loss_weight: float, specificity: float
) -> ServerState:
    """Add to the open record how silos measured the model that all share, before they trained models of their own."""
    silos = dict(server.open_record["silos"])
    for reply in replies:
        if reply.evaluations.received and not reply.rejected:
            shared = describe_evaluation(reply.evaluations, code_loss_weight, specificity)
            silos[reply.silo_name] = silos.get(reply.silo_name, start_entry()) | {SHARED_MODEL: shared}
    return server.replace(open_record={**server.open_record, "silos": silos})


def record_decision(server: ServerState, report: UncertaintyReport, before: ServerState) -> ServerState:
    """Add to the open record which silos are uncertain, by which test, and how many codewords each received."""
    new_codewords = server.access[:, before.access.shape[1] :].sum(1).tolist()
    silos = {
        name: {
            **server.open_record["silos"][name],
            "is_uncertain": name in report.uncertain_silos,
            "new_codewords": count,
        }
        for name, count in zip(server.silo_names, new_codewords)
    }
    decision = {**report.entries, "is_codebook_final": server.is_codebook_final}
    entries = {"silos": silos, "has_decision": True, "decision": decision}
    return server.replace(open_record={**server.open_record, **entries})


def record_revocation(server: ServerState, validated: Sequence[str], before: ServerState) -> ServerState:
    """Add to the open record how many codewords each validated silo lost; its metrics are those without them."""
    silos = dict(server.open_record["silos"])
    for name in validated:
        k = server.silo_names.index(name)
        count, earlier = int(server.access[k].sum()), int(before.access[k].sum())
        silos[name] = {**silos[name], "num_codewords": count, "revoked_codewords": earlier - count}
    return server.replace(open_record={**server.open_record, "silos": silos})


def complete_record(
    server: ServerState, evaluations: Mapping[str, Evaluations], code_loss_weight: float, specificity: float
) -> ServerState:
    """Complete the open record with the silos' evaluations of its model; a silo without one has no metrics in it."""
    if not server.open_record:
        return server
    silos = dict(server.open_record["silos"])
    for silo_name, evaluation in evaluations.items():
        entry = silos.get(silo_name) or start_entry()
        silos[silo_name] = {**entry, **describe_evaluation(evaluation, code_loss_weight, specificity)}
    record = {**server.open_record, "silos": dict(sorted(silos.items()))}
    tests = [evaluation.received["test"] for evaluation in evaluations.values() if "test" in evaluation.received]
    if pooled := compute_pooled_metrics(tests, specificity):
        record |= {"all_silos": pooled, "reliability": sum_reliability(tests)}
    return server.replace(open_record={}, completed_records=(*server.completed_records, record))


def _sum_cost(replies: Sequence[Reply], seconds: float) -> dict[str, Any]:
    return {
        "bytes_down": sum(r.received_bytes for r in replies),
        "bytes_up": sum(r.sent_bytes for r in replies),
        "seconds": seconds,
    }


def _describe_reply(reply: Reply) -> dict[str, Any]:
    entries: dict[str, Any] = {
        "bytes_down": reply.received_bytes,
        "bytes_up": reply.sent_bytes,
        "seconds": reply.seconds,
    }
    entries |= {name: text for name, text in (("rejected", reply.rejected), ("note", reply.note)) if text}
    if "test" in reply.evaluations.local:
        sums = reply.evaluations.local["test"]
        entries |= {f"local_{name}": compute_metric(name, sums) for name in ("accuracy", "entropy")}
    return entries


def describe_evaluation(evaluation: Evaluations, code_loss_weight: float, specificity: float) -> dict[str, Any]:
    """Return the metrics of the test split, and below their names those of other splits and of target access."""
    splits = {s: _compute_silo_metrics(sums, code_loss_weight, specificity) for s, sums in evaluation.received.items()}
    entries: dict[str, Any] = splits.pop("test", {})
    if {"validation", "test"} <= set(evaluation.received):
        entries |= compute_scaled_nll(evaluation.received["validation"], evaluation.received["test"])
    targets = {n: _compute_silo_metrics(sums, code_loss_weight, specificity) for n, sums in evaluation.target.items()}
    return {**entries, **splits, **({"target_metrics": targets} if targets else {})}


def _compute_silo_metrics(sums: Tensors, code_loss_weight: float, specificity: float) -> dict[str, float]:
    metrics = compute_metrics(sums, specificity)
    return {**metrics, "code_loss": metrics["quantization_error"] * code_loss_weight}
