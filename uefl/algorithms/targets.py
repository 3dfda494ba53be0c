"""A silo that nobody trained with has no words of its own: which ones may it use? (D15)

All three readings are measured at such a silo, whichever of them counts: the words that everyone shares, all words
there are, or those of the silo with whose words the target is least uncertain, which needs no label.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from uefl.federation import Clients, Server, State
from uefl.metrics import metrics

if TYPE_CHECKING:
    from uefl.algorithms.fedavg import FedAvg

Reading = Literal["shared", "all", "least_uncertain"]
TARGET = "target "  # prefix of the readings among a silo's answers
Answers = dict[str, Mapping[str, State]]


def read_targets(method: FedAvg, clients: Clients, server: Server, answers: Answers, counts: Reading) -> Answers:
    """Add the readings to the answers of every silo without training data, and let one of them count."""
    targets = tuple(name for name, n in clients.sizes.items() if not n and "test" in answers.get(name, {}))
    own = not bool((server.access == server.access[:1]).all())
    if not targets or not own:  # as long as all silos use the same words there is nothing to choose
        return answers
    whole = torch.ones_like(server.access[0])
    readings = {"shared": answers, "all": _under(method, clients, server, targets, whole)}
    rows = torch.unique(server.access[[bool(n) for n in clients.sizes.values()]], dim=0)
    tried = [_under(method, clients, server, targets, row) for row in rows]
    heard = [t for t in targets if all("test" in a.get(t, {}) for a in (readings["all"], *tried))]
    readings["least_uncertain"] = {t: min((a[t] for a in tried), key=_entropy) for t in heard}
    return answers | {t: _noted(readings, t, counts) for t in heard}


def _under(method: FedAvg, clients: Clients, server: Server, targets: tuple[str, ...], row: Tensor) -> Answers:
    """The targets' measurements if they had this row of the ledger."""
    access = server.access.clone()
    access[[server.silos.index(t) for t in targets]] = row
    say = method.say(clients, server)._replace(access=access, who=targets)
    return {r.who: r.answers for r in clients.ask(method, "measure", say, ("validation", "test")) if not r.refused}


def _entropy(answer: Mapping[str, State]) -> float:
    return metrics(answer["test"])["entropy"]


def _noted(readings: Mapping[str, Answers], target: str, counts: Reading) -> Mapping[str, State]:
    each = {TARGET + name: answers[target]["test"] for name, answers in readings.items()}
    return {**readings[counts][target], **each}
