"""The record of a round: opened when silos have trained, closed when they have measured what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from uefl.algorithms.targets import TARGET
from uefl.federation import Reply, Server, State
from uefl.metrics import metrics


def opened(server: Server, replies: Sequence[Reply], seconds: float) -> dict[str, Any]:
    """What is known before the integrated model is measured."""
    words = server.access.sum(1).tolist()
    silos: dict[str, dict[str, Any]] = {n: {"words": v, "uncertain": False} for n, v in zip(server.silos, words)}
    for reply in replies:
        mine = silos[reply.who]
        mine |= {"down": reply.received_bytes, "up": reply.sent_bytes, "seconds": reply.seconds}
        if reply.refused:
            mine["refused"] = reply.refused
        if reply.note:
            mine["note"] = reply.note
        if "local test" in reply.answers:
            local = metrics(reply.answers["local test"])
            mine |= {"local_accuracy": local["accuracy"], "local_entropy": local["entropy"]}
    return {
        "round": server.round,
        "iteration": server.iteration,
        "who": sorted(r.who for r in replies),
        "words_total": server.access.shape[1],
        "bytes_down": sum(r.received_bytes for r in replies),
        "bytes_up": sum(r.sent_bytes for r in replies),
        "seconds": seconds,
        "kmeans_seconds": 0.0,
        "silos": silos,
    }


def noted(server: Server, seconds: float, **facts: Any) -> Server:
    """Write K-means time, and facts, into the record."""
    known = server.pending.get("kmeans_seconds", 0.0)
    return server.but(pending={**server.pending, "kmeans_seconds": known + seconds, **facts})


def counted(server: Server, replies: Sequence[Reply], seconds: float) -> Server:
    """Add to the record what a question cost that is not part of a round's one message."""
    cost = {
        "bytes_down": sum(r.received_bytes for r in replies),
        "bytes_up": sum(r.sent_bytes for r in replies),
        "seconds": seconds,
    }
    return server.but(pending={**server.pending, **{n: server.pending.get(n, 0) + more for n, more in cost.items()}})


def judged(server: Server, uncertain: Sequence[str], before: Server) -> Server:
    """Say in the record who was found uncertain, and how many words that brought."""
    gained = server.access[:, before.access.shape[1] :].sum(1).tolist()
    silos = {name: dict(mine) for name, mine in server.pending["silos"].items()}
    for name, new in zip(server.silos, gained):
        silos[name] |= {"uncertain": name in uncertain, "new_words": new}
    return server.but(pending={**server.pending, "silos": silos, "judged": True})


def closed(server: Server, answers: Mapping[str, Mapping[str, State]], prefix: str, code_weight: float) -> Server:
    """Complete the record with what silos measured of that round's model; one that did not has no measurement in it."""
    if not server.pending:
        return server
    silos = {name: dict(mine) for name, mine in server.pending["silos"].items()}
    for who, mine in answers.items():
        if f"{prefix}test" in mine:
            silos[who] |= _measured(mine[f"{prefix}test"], code_weight)
        for split in ("validation", "train"):
            if prefix + split in mine:
                silos[who][split] = _measured(mine[prefix + split], code_weight)
        readings = {n.removeprefix(TARGET): _measured(a, code_weight) for n, a in mine.items() if n.startswith(TARGET)}
        if readings:
            silos[who]["readings"] = readings
    return server.but(pending={}, records=(*server.records, {**server.pending, "silos": silos}))


def _measured(sums: State, code_weight: float) -> dict[str, float]:
    found = metrics(sums)
    return {**found, "code_loss": found["distance"] * code_weight}
