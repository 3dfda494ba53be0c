"""Evaluate silos as if they had other codewords than they have."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from uefl.algorithms.round_record import record_query_cost
from uefl.core.federation import Clients, ServerState, Split, Tensors

if TYPE_CHECKING:
    from uefl.algorithms.fedavg import FedAvg


def evaluate_with_access(
    method: FedAvg,
    clients: Clients,
    server: ServerState,
    silo_names: Sequence[str],
    access: Tensor,
    split: Split = "validation",
) -> tuple[ServerState, dict[str, Tensors]]:
    """Return the metric sums of silos that use the codewords of this access; the record counts the cost."""
    started = time.perf_counter()
    broadcast = method.make_broadcast(clients, server)._replace(access=access, participants=tuple(silo_names))
    replies = list(clients.query(method, "evaluate", broadcast, (split,)))
    server = record_query_cost(server, [r._replace(sent_bytes=0) for r in replies], time.perf_counter() - started)
    return server, {r.silo_name: r.answers[split] for r in replies if not r.rejected and split in r.answers}
