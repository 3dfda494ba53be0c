"""Revoke new codewords that do not help: their silo predicts its validation examples better without them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from uefl.algorithms.access_evaluation import evaluate_with_access
from uefl.algorithms.round_record import record_revocation
from uefl.core.federation import Clients, ServerState, Tensors
from uefl.core.metrics import compute_metric

if TYPE_CHECKING:
    from uefl.algorithms.fedavg import FedAvg

UNVALIDATED_FROM = "first_unvalidated_codeword"  # key in method_state


def mark_unvalidated(server: ServerState, before: ServerState) -> ServerState:
    """Store which codewords are new: those that the server did not have before."""
    first = torch.tensor(before.access.shape[1])
    return server.replace(method_state={**server.method_state, UNVALIDATED_FROM: first})


def revoke_useless_codewords(method: FedAvg, clients: Clients, server: ServerState) -> ServerState:
    """Revoke the new codewords of every silo whose validation examples have a lower NLL without them.

    A silo whose evaluation is missing keeps its codewords.
    """
    first = int(server.method_state.get(UNVALIDATED_FROM, torch.tensor(server.access.shape[1])))
    is_new = torch.arange(server.access.shape[1]) >= first
    silo_names = [n for n, row in zip(server.silo_names, server.access) if bool((row & is_new).any())]
    if not silo_names:
        return server
    without_access = server.access & ~is_new
    server, present = evaluate_with_access(method, clients, server, silo_names, server.access)
    server, without = evaluate_with_access(method, clients, server, silo_names, without_access)
    validated = [name for name in silo_names if name in present and name in without]
    useless = [name for name in validated if _compute_nll(without[name]) < _compute_nll(present[name])]
    rows = [server.silo_names.index(name) for name in useless]
    access = server.access.clone()
    access[rows] = without_access[rows]
    server = record_revocation(server.replace(access=access), validated, before=server)
    return mark_unvalidated(server, before=server)  # none is left to be validated


def _compute_nll(sums: Tensors) -> float:
    return compute_metric("nll", sums)
