"""Which codewords a silo without training data may use: it has none of its own (D15).

Three choices are evaluated at such a silo, and the setting `target_access` decides which of them counts: the codewords
that all silos share, all codewords, or those of the silo with whose codewords the target is least uncertain. The last
choice uses the target's validation images without their labels; its test images decide nothing (D3).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from uefl.core.federation import Clients, Evaluations, ServerState
from uefl.core.metrics import compute_metric

if TYPE_CHECKING:
    from uefl.algorithms.fedavg import FedAvg

TargetAccess = Literal["shared", "all", "least_uncertain"]
SiloEvaluations = dict[str, Evaluations]


def evaluate_targets(
    method: FedAvg, clients: Clients, server: ServerState, evaluations: SiloEvaluations, target_access: TargetAccess
) -> SiloEvaluations:
    """Evaluate the three choices at every silo without training data; `target_access` becomes its result."""
    targets = tuple(n for n, count in clients.num_examples.items() if not count and _is_evaluated(evaluations, n))
    if not targets or bool((server.access == server.access[:1]).all()):  # all silos use the same codewords
        return evaluations
    every_codeword = torch.ones_like(server.access[0])
    choices = {"shared": evaluations, "all": _evaluate_with_access(method, clients, server, targets, every_codeword)}
    access_rows = torch.unique(server.access[[bool(n) for n in clients.num_examples.values()]], dim=0)
    candidates = [_evaluate_with_access(method, clients, server, targets, row) for row in access_rows]
    complete = [t for t in targets if all(_is_evaluated(e, t) for e in (choices["all"], *candidates))]
    choices["least_uncertain"] = {
        t: min((e[t] for e in candidates), key=_validation_entropy)
        for t in complete
        if all("validation" in e[t].received for e in candidates)
    }
    return evaluations | {t: _merge_choices(choices, t, target_access) for t in complete}


def _is_evaluated(evaluations: SiloEvaluations, silo_name: str) -> bool:
    return "test" in evaluations.get(silo_name, Evaluations()).received


def _evaluate_with_access(
    method: FedAvg, clients: Clients, server: ServerState, targets: tuple[str, ...], access_row: Tensor
) -> SiloEvaluations:
    """Evaluate the targets as if they had this row of the ledger."""
    access = server.access.clone()
    access[[server.silo_names.index(t) for t in targets]] = access_row
    broadcast = method.make_broadcast(clients, server)._replace(access=access, participants=targets)
    replies = clients.query(method, "evaluate", broadcast, ("validation", "test"))
    return {r.silo_name: Evaluations(r.answers) for r in replies if not r.rejected}


def _validation_entropy(evaluation: Evaluations) -> float:
    return compute_metric("entropy", evaluation.received["validation"])


def _merge_choices(choices: dict[str, SiloEvaluations], target: str, target_access: TargetAccess) -> Evaluations:
    """Return the chosen evaluation; without validation images, those with the shared codewords."""
    test_sums = {name: e[target].received["test"] for name, e in choices.items() if target in e}
    chosen = choices[target_access].get(target, choices["shared"][target])
    return Evaluations(chosen.received, target=test_sums)
